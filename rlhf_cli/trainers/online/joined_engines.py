"""Rollout engines in which the next batch joins the running one, so that its last responses leave no slot idle."""

from collections import defaultdict, deque

from rlhf_cli.data.rollouts import Generation, GenerationRequest, SamplingParams
from rlhf_cli.trainers.online.interfaces import TurnEngines


class JoinedEngines:
    """Engines that sample later batches during the current one, for partial rollouts.

    `join` sends a batch's requests, which take slots as earlier responses end. Batches are collected one at a time, in
    the order of `join`: `begin` selects the next one. Its early responses are kept until then.
    """

    def __init__(self, engines: TurnEngines) -> None:
        self._engines = engines
        # Batches by their request numbers in the engines' batch, which goes on as long as one of them is open.
        self._current, self._joined = range(0), deque[range]()
        self._num_open = 0  # responses of the current batch that `collect` has not returned
        self._arrived = defaultdict[range, list[tuple[int, Generation]]](list)

    def join(self, requests: list[GenerationRequest], sampling: SamplingParams) -> None:
        """Send a batch's requests to the engines, before `begin`. All batches use the same sampling parameters."""
        if self._joined or self._num_open:
            first = (self._joined[-1] if self._joined else self._current).stop
            self._engines.add(requests)
        else:
            first = 0
            self._engines.begin(requests, sampling)
        self._joined.append(range(first, first + len(requests)))

    def begin(self, requests: list[GenerationRequest], sampling: SamplingParams) -> None:
        """Start to collect the next batch, and send its requests unless they have joined."""
        if not self._joined:
            self.join(requests, sampling)
        self._current = self._joined.popleft()
        self._num_open = len(self._current)

    @property
    def is_generating(self) -> bool:
        """Whether responses in the current batch are pending."""
        return self._num_open > 0

    async def collect(self, timeout: float | None = None) -> list[tuple[int, Generation]]:
        """Return finished responses of the current batch with request numbers.

        Waits for a response of any batch, at most `timeout` seconds.
        """
        if self._current not in self._arrived:
            for number, response in await self._engines.collect(timeout):
                batch = next(batch for batch in (self._current, *self._joined) if number in batch)
                self._arrived[batch].append((number - batch.start, response))
        found = self._arrived.pop(self._current, [])
        self._num_open -= len(found)
        return found

    def cut(self, max_tokens: int) -> None:
        """Drop responses of all batches that exceed `max_tokens`."""
        self._engines.cut(max_tokens)

    def wake_cache(self) -> None:
        """Do nothing, like `sleep`: asynchronous runs use dedicated GPUs."""

    def sleep(self) -> None:
        """Do nothing: the engines sample the next batch."""
