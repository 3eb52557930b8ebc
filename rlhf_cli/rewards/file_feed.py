"""Background calls to the user's reward function, one call per group of responses to a prompt.

The worker side is workers/user_file.py. session.py submits a group when all responses to the prompt are complete.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import TYPE_CHECKING, Self

from rlhf_cli.rewards.parts import file_parts
from rlhf_cli.rewards.png import png_in_base64
from rlhf_cli.rewards.records import Score, ScoreRequest
from rlhf_cli.rewards.workers.pool import Failure, WorkerPool
from rlhf_cli.rewards.workers.user_forms import UserBatch

if TYPE_CHECKING:
    from rlhf_cli.models.vision.pictures import Picture


@dataclass(eq=False)
class _Call:
    """One reward function call: response numbers, arguments, and the results received so far."""

    numbers: Sequence[int]
    batch: UserBatch
    tries: int = 0
    parts: list[Score] = field(default_factory=list)


Decode = Callable[[Sequence[int]], str]
"""Decodes tokens and keeps special tokens."""

# Sent instead of a row that the reward function does not read.
_NO_ROW = '{"prompt": "", "columns": {}}'


def batch_of(requests: Sequence[ScoreRequest], decode: Decode | None, *, needs: Sequence[str]) -> UserBatch:
    """Build the reward function's arguments. Large columns are included only if listed in `needs`.

    Without `decode`, `raw_responses` equal `responses`.
    """
    rows = [request.row or _NO_ROW for request in requests] if "rows" in needs else [_NO_ROW] * len(requests)
    # All samples for a prompt share a row: parse and send it once.
    distinct = list(dict.fromkeys(rows))
    is_raw = decode is not None and "raw_responses" in needs
    pictured = requests if "images" in needs else []
    pictures = _numbered(pictured)
    raw = [decode(request.token_ids) if decode and is_raw else request.response for request in requests]
    return UserBatch(
        queries=[request.query for request in requests],
        prompts=[request.prompt for request in requests],
        labels=[request.label for request in requests],
        responses=[request.response for request in requests],
        raw_responses=raw if "raw_responses" in needs else [],
        token_ids=[list(request.token_ids) for request in requests] if "token_ids" in needs else [],
        lengths=[request.num_tokens for request in requests],
        finish_reasons=["length" if request.truncated else "stop" for request in requests],
        sources=[request.source for request in requests],
        rows=[json.loads(row) for row in distinct],
        row_of=[distinct.index(row) for row in rows],
        messages=[list(request.messages) for request in requests],
        pictures=[png_in_base64(picture) for picture in pictures],
        pictures_of=[[pictures[picture] for picture in request.pictures] for request in pictured],
    )


def _numbered(requests: Sequence[ScoreRequest]) -> "dict[Picture, int]":
    """Number the distinct images, so that each one is encoded and sent once."""
    distinct = dict.fromkeys(picture for request in requests for picture in request.pictures)
    return {picture: number for number, picture in enumerate(distinct)}


class FileFeed:
    """One round of reward function calls; a context manager.

    If a call or any returned value fails, the function is called again with the whole group, up to `retries` times.
    Valid values from earlier tries are kept. Calls that time out are not retried.
    """

    def __init__(self, pool: WorkerPool, *, retries: int, decode: Decode | None) -> None:
        self._pool, self._decode = pool, decode
        self._feed = pool.feed()
        self._retries = retries
        # Indexed by the feed's item number. A retry adds another entry.
        self._calls: list[_Call] = []
        self._num_open = 0
        # Results that `ready` has not returned yet.
        self._results: list[tuple[int, Score]] = []
        self.failures: list[Failure] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._feed.close()

    def add(self, numbers: Sequence[int], requests: Sequence[ScoreRequest]) -> None:
        """Submit one group of responses. Never blocks."""
        self._num_open += 1
        self._send(_Call(numbers, batch_of(requests, self._decode, needs=self._pool.about["needs"])))

    def ready(self) -> list[tuple[int, Score]]:
        """Return new results as (response number, result) pairs. Never blocks."""
        self._advance()
        results, self._results = self._results, []
        return results

    @property
    def is_open(self) -> bool:
        """Whether results are pending or not yet returned by `ready`."""
        return self._num_open > 0 or bool(self._results)

    async def wait(self) -> None:
        """Wait until a call completes. Returns immediately if no call is pending."""
        await self._feed.wait()

    def _send(self, call: _Call) -> None:
        self._calls.append(call)
        self._feed.add([call.batch])

    def _advance(self) -> None:
        """Collect completed calls and retry failed ones."""
        for item, outcome in self._feed.ready():
            call = self._calls[item]
            self.failures += [outcome.failure] if outcome.failure is not None else []
            new = file_parts(outcome, len(call.numbers))
            # A retry reruns the whole group, because the function may compare responses. Values that were valid before
            # stay, so that a flaky function cannot turn a scored response into a failed one.
            call.parts = [
                old if old.value is not None else now for old, now in zip(call.parts or new, new, strict=True)
            ]
            call.tries += 1
            # A retry after a timeout would most likely block another worker for the full timeout.
            is_late = outcome.failure is not None and outcome.failure.kind == "timeout"
            if call.tries <= self._retries and not is_late and any(part.value is None for part in call.parts):
                self._send(call)
            else:
                self._num_open -= 1
                self._results += zip(call.numbers, call.parts, strict=True)
