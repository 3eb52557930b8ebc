"""Turns that start as soon as their environments have answered give the same episodes as turns in lockstep."""

import asyncio
import json
import random
import zlib
from collections.abc import Callable

import pytest
from episode_fakes import SEPARATOR, FakeEnvironments, episode_engines

from rlhf_cli.agents.records import Action, Calls, Finish, Reply
from rlhf_cli.data.formats.conversations import Message, plain_message
from rlhf_cli.data.rollouts import Generation, GenerationRequest, SamplingParams
from rlhf_cli.trainers.online.rollout import generate

SAMPLING = SamplingParams(5)
LETTERS = "abcnx"
"""Turn texts: `c` calls the tool, `n` an unknown tool, and `x` cannot be parsed (FakeDialogue)."""


class SeededEngines:
    """Samples tokens that depend only on prompt and seed; returns at most one turn at a time, in arbitrary order."""

    def __init__(self, order: random.Random) -> None:
        self._order = order
        self._sampling = SamplingParams(0)
        self._count = 0
        self.open: list[tuple[int, GenerationRequest]] = []
        self.num_begun = 0
        self.begun_beside: list[int] = []
        self.cuts: list[int] = []
        self.only_first_turns = False

    def begin(self, requests: list[GenerationRequest], sampling: SamplingParams) -> None:
        assert not self.open, "a batch begins while another one is generated"
        self.num_begun, self._count, self._sampling = self.num_begun + 1, 0, sampling
        self.add(requests)

    def add(self, requests: list[GenerationRequest]) -> None:
        self.begun_beside.append(len(self.open))
        self.open += enumerate(requests, start=self._count)
        self._count += len(requests)

    @property
    def is_generating(self) -> bool:
        return bool(self.open)

    async def collect(self, timeout: float | None = None) -> list[tuple[int, Generation]]:
        ready = [one for one in self.open if not self.only_first_turns or SEPARATOR not in one[1].prompt_ids]
        if timeout is not None and (not ready or self._order.random() < 0.7):
            return []
        number, request = ready[self._order.randrange(len(ready))]
        self.open.remove((number, request))
        return [(number, self._sampled(request))]

    def _sampled(self, request: GenerationRequest) -> Generation:
        draw = random.Random(zlib.crc32(bytes(request.prompt_ids)) + request.seed)
        length = draw.randint(1, 6)
        text = "".join(draw.choices(LETTERS, k=length))[: request.limit(self._sampling)]
        logprobs = [draw.uniform(-3, 0) for _ in text]
        return Generation([*map(ord, text)], logprobs, "stop" if len(text) == length else "length", 3)

    def cut(self, max_tokens: int) -> None:
        self.cuts.append(max_tokens)
        self.open = [] if max_tokens == 0 else self.open

    def sleep(self) -> None: ...


class LateEnvironments(FakeEnvironments):
    """Replies in arbitrary order or not yet; `held` episodes do not reply."""

    def __init__(self, answer: Callable[[int, int, Action], Reply], order: random.Random, *, tools: bool) -> None:
        super().__init__(answer, tools=tools)
        self._order = order
        self.held: set[int] = set()

    def _reply(self) -> None:
        ready = [one for one in self._waiting if one[0] not in self.held]
        if not ready or self._order.random() < 0.5:
            asyncio.get_running_loop().call_later(0.001, self._reply)
            return
        chosen = self._order.choice(ready)
        self._waiting.remove(chosen)
        self._waiting.insert(0, chosen)
        super()._reply()


def requests_of(count: int) -> list[GenerationRequest]:
    row = json.dumps({"prompt": "p", "columns": {}, "messages": [plain_message(Message("user", "p"))]})
    return [GenerationRequest([40 + number, 63], number, row=row, environment_seed=number) for number in range(count)]


def tool(episode: int, turn: int, action: Action) -> Reply:
    """A tool whose results depend on episode and turn; every seventh episode fails at its second turn."""
    if isinstance(action, Calls):
        if turn == 2 and episode % 7 == 3:
            return Reply(failure="ran out of time (1 s)")
        return Reply(tuple(f"{episode}" for _ in action.calls), 0.25 * turn, is_done=turn == 5)
    return Reply((), float(episode) if isinstance(action, Finish) else 0.0)


def game(episode: int, turn: int, action: Action) -> Reply:
    return Reply((str(turn),) if turn else (), float(turn * episode), is_done=turn == 4)


def play(
    answer: Callable[[int, int, Action], Reply], *, in_step: bool, order: int, max_len: int = 60, cut: int | None = None
) -> tuple[dict[int, Generation], SeededEngines, LateEnvironments]:
    rng = random.Random(order)
    engines, environments = SeededEngines(rng), LateEnvironments(answer, rng, tools=answer is tool)
    episodes = episode_engines(engines, environments, max_turns=6, max_len=max_len, in_step=in_step)

    async def with_cut() -> dict[int, Generation]:
        episodes.begin(requests_of(24), SAMPLING)
        if cut is not None:
            episodes.cut(cut)
        found: dict[int, Generation] = {}
        while episodes.is_generating:
            found |= await episodes.collect()
        return found

    return asyncio.run(with_cut()), engines, environments


@pytest.mark.parametrize("answer", [tool, game])
@pytest.mark.parametrize("max_len", [60, 16])
def test_free_turns_give_the_episodes_of_turns_in_step_in_any_order_of_arrival(answer, max_len):
    in_step, engines, _ = play(answer, in_step=True, order=0, max_len=max_len)
    assert engines.num_begun > 1
    assert len({len(one.turns) for one in in_step.values()}) > 1
    for order in range(5):
        free, engines, environments = play(answer, in_step=False, order=order, max_len=max_len)
        assert free == in_step
        assert engines.num_begun == 1
        assert max(engines.begun_beside) > 1
        assert not environments.open


def test_broken_environments_and_limits_are_among_these_episodes():
    found, _, _ = play(tool, in_step=False, order=1)
    facts = [one.episode for one in found.values() if one.episode is not None]
    assert {fact.failure for fact in facts} == {None, "ran out of time (1 s)"}
    assert {one.finish_reason for one in found.values()} == {"stop", "length"}
    assert sum(fact.num_malformed for fact in facts) > 5


def test_no_episode_waits_for_a_slow_environment():
    rng = random.Random(0)
    engines, environments = SeededEngines(rng), LateEnvironments(game, rng, tools=False)
    episodes = episode_engines(engines, environments, max_turns=9, max_len=90, in_step=False)
    environments.held = {2}

    async def held_and_freed() -> None:
        episodes.begin(requests_of(5), SAMPLING)
        found: dict[int, Generation] = {}
        while len(found) < 4:
            found |= await episodes.collect(0.05)
        assert sorted(found) == [0, 1, 3, 4]
        assert not engines.is_generating
        environments.held = set()
        while episodes.is_generating:
            found |= await episodes.collect()
        assert len(found[2].turns) >= 1

    asyncio.run(held_and_freed())


@pytest.mark.parametrize("place", [2, 12])
def test_a_cut_gives_up_longer_episodes_at_once_and_changes_no_other(place):
    whole, _, _ = play(game, in_step=True, order=0)
    limit = sorted(len(one.token_ids) for one in whole.values())[place]
    found, engines, environments = play(game, in_step=False, order=2, cut=limit)
    assert found == {number: one for number, one in whole.items() if len(one.token_ids) <= limit}
    assert place < len(found) < len(whole)
    assert not environments.open
    assert not engines.is_generating


def test_a_cut_of_all_episodes_drains_the_turns_that_are_sampled_yet():
    rng = random.Random(0)
    engines, environments = SeededEngines(rng), LateEnvironments(game, rng, tools=False)
    episodes = episode_engines(engines, environments, max_turns=9, max_len=90, in_step=False)

    async def cut_in_the_middle() -> list[Generation]:
        engines.only_first_turns = True  # or all could end before three are in their second turn
        episodes.begin(requests_of(6), SAMPLING)
        while sum(SEPARATOR in request.prompt_ids for _, request in engines.open) < 3:
            await episodes.collect(0.0001)
        engines.only_first_turns = False
        environments.held = set(range(6))
        episodes.cut(0)
        while episodes.is_generating:
            await episodes.collect()
        await asyncio.sleep(0)  # dropped episodes end
        assert engines.cuts[-1:] == [0]
        assert not engines.is_generating
        assert not environments.open
        return await generate(episodes, requests_of(1), SAMPLING)

    (found,) = asyncio.run(cut_in_the_middle())
    assert found.turns
