"""A batch as its engines share it: the requests of each engine, and the calls that will bring responses."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from rlhf_cli.backends.rollout.engine import Arrivals
from rlhf_cli.data.rollouts import Generation, GenerationRequest, SamplingParams


@dataclass(frozen=True, slots=True)
class Listening:
    """A call that brings responses of an engine, made when the engine had been asked for so many requests."""

    engine: int
    num_requests: int


@dataclass
class SharedBatch:
    """The work of the engines: shares are numbers of requests by engine, `calls` those that will bring responses.

    `begun` names the engines' batches, as their hosts know them.
    """

    requests: list[GenerationRequest]
    sampling: SamplingParams
    shares: list[list[int]]
    calls: dict[object, Listening] = field(default_factory=dict)
    begun: dict[int, int] = field(default_factory=dict)
    max_tokens: int | None = None
    seen: set[int] = field(default_factory=set)
    has_added: bool = False
    _homes: dict[object, int] = field(default_factory=dict)  # the engine of a prompt and of an episode
    _loads: list[int] = field(default_factory=list)  # tokens of each engine's open requests

    @property
    def heard(self) -> set[int]:
        """The engines that will bring responses."""
        return {call.engine for call in self.calls.values()}

    def forget(self, engines: set[int]) -> set[int]:
        """Forget the batches of engines that died; return the engines that have to begin their share again.

        One that had finished begins with what is added to it.
        """
        unfinished = engines & self.heard
        self.calls = {call: listening for call, listening in self.calls.items() if listening.engine not in engines}
        self.begun = {engine: batch for engine, batch in self.begun.items() if engine not in engines}
        return unfinished

    def add(self, requests: Sequence[GenerationRequest]) -> dict[int, list[GenerationRequest]]:
        """Add requests to the shares; return them by engine.

        The next turn of an episode, and another sample of a prompt, go to the engine that has read the beginning. A new
        prompt goes to the engine that has the least to do.
        """
        if not self.has_added:
            self._settle_all()
        found: dict[int, list[GenerationRequest]] = {}
        for request in requests:
            engine = self._homes.get(request.episode)
            if engine is None:
                engine = self._homes.get(request.prompt, self._loads.index(min(self._loads)))
                self._settle(request, engine)
            self._loads[engine] += _cost(request)
            self.shares[engine].append(len(self.requests))
            self.requests.append(request)
            found.setdefault(engine, []).append(request)
        return found

    def _settle_all(self) -> None:
        self.has_added = True
        for engine, share in enumerate(self.shares):
            for number in share:
                self._settle(self.requests[number], engine)
            self._loads.append(sum(_cost(self.requests[number]) for number in share if number not in self.seen))

    def _settle(self, request: GenerationRequest, engine: int) -> None:
        self._homes[request.prompt] = engine
        if request.episode is not None:
            self._homes[request.episode] = engine

    def news(self, engine: int, arrivals: Arrivals) -> list[tuple[int, Generation]]:
        """Return the new responses, under the numbers of the whole batch."""
        named = [(self.shares[engine][place], response) for place, response in arrivals.responses]
        new = [(number, response) for number, response in named if number not in self.seen]
        self.seen |= {number for number, _ in new}
        if self.has_added:
            self._loads[engine] -= sum(_cost(self.requests[number]) for number, _ in new)
        return new

    def is_over(self, call: Listening, arrivals: Arrivals) -> bool:
        """Return whether these were the last responses: more may have been asked for since the call was made."""
        return arrivals.is_last and call.num_requests == len(self.shares[call.engine])

    def share_again(self, engine: int) -> list[GenerationRequest]:
        """Return the requests that an engine gets when it begins, or begins again.

        A batch is repeated as a whole, for rounding depends on what is beside a request. Parts that were added came in
        an order that nobody knows: of such a batch the engine gets what is missing.
        """
        if self.has_added:
            self.shares[engine] = [number for number in self.shares[engine] if number not in self.seen]
        return [self.requests[number] for number in self.shares[engine]]


def _cost(request: GenerationRequest) -> int:
    return len(request.prompt_ids) + request.expected_tokens


def balanced_shares(requests: list[GenerationRequest], count: int) -> list[list[int]]:
    """Return the numbers of the requests of each engine, ascending: about as many expected tokens for each.

    The samples of a prompt stay together, so that an engine reads it once. Prompts are dealt by their cost, highest
    first, each to the engine with the least so far (longest processing time first, Graham 1969).
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
    """Return the numbers of the requests of each engine: each goes where the turn before of its episode was, and an
    episode without a turn in that batch to the engine with the fewest requests.
    """
    engine_of = {
        before.requests[place].episode: engine for engine, share in enumerate(before.shares) for place in share
    }
    shares: list[list[int]] = [[] for _ in before.shares]
    for number, request in enumerate(requests):
        if request.episode not in engine_of:
            engine_of[request.episode] = min(range(len(shares)), key=lambda place: len(shares[place]))
        shares[engine_of[request.episode]].append(number)
    return shares
