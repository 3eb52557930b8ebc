"""Partial rollouts in which the next batch joins the running one, with fake models, rewards and engines with slots."""

import asyncio
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from online_fakes import BATCH, PROMPTS, SAMPLES_EACH, WITHOUT_REFERENCE, Run
from saved_loops import through_files
from test_partial_rollouts import EnginesInFlight, threads, trained

from rlhf_cli.config.rollout import DynamicSamplingConfig
from rlhf_cli.data.rollouts import Generation, GenerationRequest, SamplingParams, joined_runs, oldest
from rlhf_cli.errors import ProcessDied, RunError
from rlhf_cli.trainers.offline.loop import Finished
from rlhf_cli.trainers.online.joined_engines import JoinedEngines
from rlhf_cli.trainers.online.schedule import Schedule

SLOTS = 4


class SlotEngines(EnginesInFlight):
    """Samples a token of at most `SLOTS` responses per look. Requests wait in line for a slot.

    Tokens depend only on the seed; each has the version of the weights at its look.
    """

    def __init__(self, journal: list[str]) -> None:
        super().__init__(journal)
        self.longest = 12
        self.busy: list[int] = []  # slots in use, per look
        self.is_held: Callable[[], bool] = lambda: False  # whether a look gives nothing; asked in the sampling thread
        self._num_requests = 0
        self._line: list[tuple[int, Generation]] = []  # running ones first
        self._runs: dict[int, list[tuple[int, int]]] = {}

    def begin(self, requests: list[GenerationRequest], sampling: SamplingParams) -> None:
        assert not self._line, "the engines still generate"
        self._num_requests = 0
        self._queue(requests)

    def _queue(self, requests: list[GenerationRequest]) -> None:
        with self._alone():
            self.versions.append(self.version)
            self.requests.append(requests)
            self._line += enumerate(map(self._answer, requests), start=self._num_requests)
            self._num_requests += len(requests)

    @property
    def is_generating(self) -> bool:
        return bool(self._line)

    async def collect(self, timeout: float | None = None) -> list[tuple[int, Generation]]:
        with self._alone():
            if self.is_held():
                time.sleep(0.001)
                return []
            self.busy.append(len(self._line[:SLOTS]))
            found = []
            for number, response in self._line[:SLOTS]:
                runs = self._runs.setdefault(number, [])
                runs.append((self.version, 1))
                if len(runs) == len(response.token_ids):
                    del self._runs[number]
                    joined = joined_runs(runs)
                    found.append((number, replace(response, weight_version=oldest(runs), version_runs=joined)))
            numbers = {number for number, _ in found}
            self._line = [one for one in self._line if one[0] not in numbers]
            return found

    def cut(self, max_tokens: int) -> None:
        self.limits.append(max_tokens)
        self._line, self._runs = [], {}


class JoiningEngines(SlotEngines):
    """Engines with slots that accept requests during a batch."""

    def __init__(self, journal: list[str]) -> None:
        super().__init__(journal)
        self.num_joined = 0  # batches that came while others were in flight

    def add(self, requests: list[GenerationRequest]) -> None:
        self.num_joined += bool(self._line)
        self._queue(requests)


def run(staleness: int = 1, *, engines: type[SlotEngines] = JoiningEngines, episodes: int = 5, **settings: Any) -> Run:
    made = Run(staleness=staleness, partial_rollout=True, episodes=episodes, **settings)
    made.engines = engines(made.journal)
    return made


def engines_of(made: Run) -> JoiningEngines:
    assert isinstance(made.engines, JoiningEngines)
    return made.engines


@pytest.mark.parametrize("staleness", [1, 2, 3])
def test_no_token_is_older_than_the_bound_and_every_prompt_is_trained_once(staleness):
    made, whole = run(staleness), run(engines=SlotEngines)
    engines = engines_of(made)
    engines.is_held = lambda: len(engines.requests) < staleness + 1
    assert made(total_iterations=10) == Finished(10, interrupted=False)
    whole(total_iterations=10)
    assert trained(made) == trained(whole)
    assert engines.num_joined >= staleness
    assert (
        len(engines.requests)
        == len({request.seed for batch in engines.requests for request in batch}) / (BATCH * SAMPLES_EACH)
        == 10
    )
    assert all(version >= number - staleness for number, version in enumerate(engines.versions))
    assert max(metrics["staleness/max"] for _, metrics in made.tracker.logged) <= staleness
    assert not threads()
    assert not made.scorer.num_open


@pytest.mark.parametrize("staleness", [1, 2])
def test_a_run_that_goes_on_from_any_checkpoint_loses_no_prompt_and_trains_none_twice(staleness, tmp_path):
    whole = run(staleness, policy=WITHOUT_REFERENCE)
    whole(save_steps=1, total_iterations=8)
    assert len(whole.saved) == 8
    for state in whole.saved[:-1]:
        again = run(staleness)
        again.engines.version = state.iteration
        again(state=through_files(state, tmp_path / f"{state.iteration}", PROMPTS, whole.settings), total_iterations=8)
        assert trained(again) == trained(whole)[state.iteration :]


@pytest.mark.parametrize("staleness", [1, 2])
def test_no_slot_is_idle_while_a_batch_may_begin(staleness, monkeypatch):
    made, begin = run(staleness), Schedule._begin
    engines, allowed, idle = engines_of(made), [0, 0, 0], list[int]()

    def begins(self: Schedule, *given: Any, num_trained: int) -> None:
        begin(self, *given, num_trained=num_trained)
        allowed[-1] = min(num_trained + 1 + staleness, 10)

    def is_held() -> bool:
        if len(engines.requests) < staleness + 1:
            return True
        # A batch sends its requests within two looks: the loop creates its task after one, and runs it after the next.
        if len(engines._line) < SLOTS and len(engines.requests) < allowed[0]:
            idle.append(len(engines._line))
        allowed[:-1] = allowed[1:]
        return False

    monkeypatch.setattr(Schedule, "_begin", begins)
    engines.is_held = is_held
    made(total_iterations=10)
    assert engines.busy
    assert not idle
    apart = run(staleness, engines=SlotEngines)
    apart(total_iterations=10)
    assert isinstance(apart.engines, SlotEngines)
    assert len(engines.busy) < len(apart.engines.busy)


def test_an_evaluation_waits_for_both_batches_in_flight_and_keeps_others_from_beginning():
    made, evaluates, found = run(2), threading.Event(), list[tuple[bool, int]]()
    engines = engines_of(made)
    # Batches 2 and 3 get no further than the end of the first one before the evaluation.
    engines.is_held = lambda: len(engines.requests) < 3 or (bool(made.scorer.asked) and not evaluates.is_set())

    def is_due(iteration: int, is_last: bool) -> bool:
        if iteration == 1:
            assert engines.is_generating
            evaluates.set()
        return iteration == 1

    def evaluate(iteration: int, is_last: bool) -> None:
        if iteration == 1:
            with engines._alone():
                found.append((engines.is_generating, len(engines.requests)))

    made.evaluate, made.evaluation_is_due = evaluate, is_due
    assert made(total_iterations=8) == Finished(8, interrupted=False)
    assert found == [(False, 3)]


@pytest.mark.parametrize("error", [RunError("too many rewards failed"), ProcessDied("engine 0 died")])
def test_an_error_of_a_batch_ends_those_that_have_joined_it(error):
    made = run(2)

    def fails(index: int) -> bool:
        if len(made.scorer.asked) == 3:
            raise error
        return False

    made.scorer.fails = fails
    with pytest.raises(RunError) as raised:
        made(total_iterations=8)
    assert raised.value is error
    (last, _) = made.tracker.logged[-1]
    assert last == len(made.actor.updates) <= 2
    assert [state.iteration for state in made.saved] == ([] if isinstance(error, ProcessDied) else [last])
    assert isinstance(error, ProcessDied) or not made.engines.is_generating
    assert not threads()
    assert not made.scorer.num_open


def test_an_interrupt_ends_all_batches_in_flight():
    made = run(2)
    engines = engines_of(made)
    engines.is_held = lambda: len(engines.requests) < 3 or bool(made.scorer.asked)

    def is_interrupted(*given: Any, **named: Any) -> Any:
        raise KeyboardInterrupt

    made.actor.update = is_interrupted  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        made(total_iterations=8)
    assert engines.is_generating
    assert not threads()
    assert not made.scorer.num_open


def test_batches_that_depend_on_the_one_before_do_not_join_it():
    dynamic = DynamicSamplingConfig(dynamic_filtering=True, dynamic_oversample=0.0, dynamic_max_rounds=1)
    for settings in ({"algorithm": "rloo", "dynamic": dynamic}, {"algorithm": "remax"}):
        made = run(2, policy=WITHOUT_REFERENCE, **settings)
        made(total_iterations=4)
        assert engines_of(made).num_joined == 0
    apart = Run(staleness=2, episodes=5)
    apart.engines = JoiningEngines(apart.journal)
    apart(total_iterations=4)
    assert engines_of(apart).num_joined == 0


def test_responses_of_a_batch_that_joined_are_kept_until_its_turn():
    inner = JoiningEngines([])
    inner._answer = lambda request: Generation([1] * request.seed, [0.0] * request.seed, "stop", 0)  # type: ignore[method-assign]
    engines, sampling = JoinedEngines(inner), SamplingParams(9)

    def requests(*lengths: int) -> list[GenerationRequest]:
        return [GenerationRequest([1], seed=length) for length in lengths]

    def numbers() -> list[list[int]]:
        found = []
        while engines.is_generating:
            found.append([number for number, _ in asyncio.run(engines.collect(0.1))])
        return found

    engines.begin(requests(1, 4), sampling)
    engines.join(requests(1, 5, 2), sampling)
    engines.join(requests(1), sampling)
    assert numbers() == [[0], [], [], [1]]
    engines.begin(requests(1, 5, 2), sampling)
    assert numbers() == [[0, 2], [1]]
    assert not inner.is_generating
    engines.join(requests(2), sampling)  # the third batch has arrived, and nobody has collected it
    engines.begin(requests(1), sampling)
    assert numbers() == [[0]]
    assert inner.num_joined == 2
    engines.begin(requests(2), sampling)
    assert numbers() == [[], [0]]
    inner._num_requests = 77
    engines.begin(requests(2), sampling)  # nothing is in flight: a batch of its own
    assert numbers() == [[], [0]]
    assert inner._num_requests == 1
