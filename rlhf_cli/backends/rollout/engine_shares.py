"""Distribution of a batch over engines: requests per engine, and pending calls."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from rlhf_cli.backends.rollout.engine import Arrivals
from rlhf_cli.data.rollouts import Generation, GenerationRequest, SamplingParams


@dataclass(frozen=True, slots=True)
class Listening:
    """A pending `collect` call. `num_requests` is the engine's number of requests when the call was made."""

    engine: int
    num_requests: int


@dataclass
class SharedBatch:
    """A batch spread over engines.

    - `requests`: by number. As soon as requests are added, only open ones, because such a batch may never end.
    - `shares`: request numbers per engine.
    - `calls`: pending calls that will return responses.
    - `begun`: each engine's current batch number.
    - `seen`: numbers of completed requests.
    - `homes`: engine per prompt and per episode, filled by the first `add`. An engine that has already read the
      beginning can reuse its prefix cache.
    """

    requests: dict[int, GenerationRequest]
    sampling: SamplingParams
    shares: list[list[int]]
    calls: dict[object, Listening] = field(default_factory=dict)
    begun: dict[int, int] = field(default_factory=dict)
    max_tokens: int | None = None
    seen: set[int] = field(default_factory=set)
    has_added: bool = False
    homes: dict[object, int] = field(default_factory=dict)
    # Expected tokens in each engine's open requests. Maintained only after the first `add`.
    _loads: list[int] = field(default_factory=list)
    _num_requests: int = 0  # so far, also only after the first `add`

    @property
    def heard(self) -> set[int]:
        """Engines with a pending call."""
        return {call.engine for call in self.calls.values()}

    def forget(self, engines: set[int]) -> set[int]:
        """Remove dead engines' calls and batches. Returns the engines that must repeat unfinished work.

        A dead engine without unfinished work starts a new batch at the next `add`.
        """
        unfinished = engines & self.heard
        self.calls = {call: listening for call, listening in self.calls.items() if listening.engine not in engines}
        self.begun = {engine: batch for engine, batch in self.begun.items() if engine not in engines}
        return unfinished

    def add(self, requests: Sequence[GenerationRequest]) -> dict[int, list[GenerationRequest]]:
        """Distribute additional requests. Returns the requests per engine.

        Later turns in an episode and further samples for a prompt go to the engine that processed the earlier tokens. A
        new prompt goes to the least loaded engine.
        """
        if not self.has_added:
            self._settle_all()
        added: dict[int, list[GenerationRequest]] = {}
        for request in requests:
            engine = self.homes.get(request.episode)
            if engine is None:
                engine = self.homes.get(request.prompt, self._loads.index(min(self._loads)))
                self._settle(request, engine)
            self._loads[engine] += _cost(request)
            self.shares[engine].append(self._num_requests)
            self.requests[self._num_requests] = request
            self._num_requests += 1
            added.setdefault(engine, []).append(request)
        return added

    def _settle_all(self) -> None:
        self.has_added, self._num_requests = True, len(self.requests)
        for engine, share in enumerate(self.shares):
            for number in share:
                self._settle(self.requests[number], engine)
            self._loads.append(sum(_cost(self.requests[number]) for number in share))
            for number in self.seen.intersection(share):
                self._complete(number, engine)

    def _settle(self, request: GenerationRequest, engine: int) -> None:
        self.homes[request.prompt] = engine
        if request.episode is not None:
            self.homes[request.episode] = engine

    def _complete(self, number: int, engine: int) -> None:
        request = self.requests.pop(number)
        self._loads[engine] -= _cost(request)
        # Only an episode has requests that follow: all samples of another prompt come at once.
        if request.episode is None:
            self.homes.pop(request.prompt, None)

    def news(self, engine: int, arrivals: Arrivals) -> list[tuple[int, Generation]]:
        """Return responses not seen before, with request numbers in the full batch."""
        # After a restart, an engine repeats requests. The first response counts, because it may already be in use.
        named = [(self.shares[engine][place], response) for place, response in arrivals.responses]
        new = [(number, response) for number, response in named if number not in self.seen]
        self.seen |= {number for number, _ in new}
        if self.has_added:
            for number, _ in new:
                self._complete(number, engine)
        return new

    def is_over(self, call: Listening, arrivals: Arrivals) -> bool:
        """Return whether these were the engine's last responses."""
        # The engine reports the last response it knows about. Requests added after the call was made are still open.
        return arrivals.is_last and call.num_requests == len(self.shares[call.engine])

    def share_again(self, engine: int) -> list[GenerationRequest]:
        """Return the requests with which an engine starts, or restarts."""
        # A restarted engine repeats the full batch, because rounding depends on the requests that run together. After
        # an `add`, the order of arrival is unknown, so repetition cannot be exact and only missing requests are
        # repeated.
        if self.has_added:
            self.shares[engine] = [number for number in self.shares[engine] if number not in self.seen]
        return [self.requests[number] for number in self.shares[engine]]


def _cost(request: GenerationRequest) -> int:
    return len(request.prompt_ids) + request.expected_tokens


def balanced_shares(requests: list[GenerationRequest], count: int) -> list[list[int]]:
    """Distribute requests so that each engine has about the same number of expected tokens.

    Returns ascending request numbers per engine. Samples for the same prompt stay together, so that only one engine
    prefills it. Prompts are assigned in order of decreasing cost to the least loaded engine (LPT, Graham 1969).
    """
    prompts: dict[object, list[int]] = {}
    for number, request in enumerate(requests):
        prompts.setdefault(request.prompt, []).append(number)
    costs = {prompt: sum(_cost(requests[number]) for number in numbers) for prompt, numbers in prompts.items()}
    shares: list[list[int]] = [[] for _ in range(count)]
    loads = [0] * count
    for prompt in sorted(prompts, key=lambda prompt: -costs[prompt]):
        engine = loads.index(min(loads))
        shares[engine] += prompts[prompt]
        loads[engine] += costs[prompt]
    return [sorted(share) for share in shares]


def same_shares(requests: list[GenerationRequest], before: SharedBatch) -> list[list[int]]:
    """Distribute requests so that each episode stays on the engine of the previous turn.

    Returns request numbers per engine. Episodes without a turn in `before` go to the engine with the fewest requests.
    """
    engine_of = dict(before.homes)
    for engine, share in enumerate(before.shares):
        # Only open requests are kept after an `add`: `homes` has the episodes of the others.
        engine_of |= {before.requests[place].episode: engine for place in share if place in before.requests}
    shares: list[list[int]] = [[] for _ in before.shares]
    for number, request in enumerate(requests):
        if request.episode not in engine_of:
            engine_of[request.episode] = min(range(len(shares)), key=lambda place: len(shares[place]))
        shares[engine_of[request.episode]].append(number)
    return shares
