"""Weight updates during batches, with fake models, engines and rewards: versions, limits, resumes, ends."""

import asyncio
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from online_fakes import NUM_PROMPTS, PROMPTS, WITHOUT_REFERENCE, FakeEngines, FakeSession, Run
from saved_loops import through_files

from rlhf_cli.config.rollout import DynamicSamplingConfig
from rlhf_cli.data.rollouts import Generation, GenerationRequest, SamplingParams, joined_runs, oldest
from rlhf_cli.errors import ProcessDied, RunError
from rlhf_cli.rewards.records import Score, ScoreRequest
from rlhf_cli.trainers.offline.loop import Finished

WAIT = 30.0  # timeout of a test in seconds


class EnginesInFlight(FakeEngines):
    """Samples the first half of a response with the initial weights and the second half with the latest ones.

    The sampling thread calls `before_look` with the batch number before each poll. Tokens depend only on the seed.
    """

    def __init__(self, journal: list[str]) -> None:
        super().__init__(journal)
        self.versions: list[int] = []
        self.before_look: Callable[[int], None] = lambda number: None
        self.arrived: list[int] = []  # batches, in the order of their responses
        self.users: set[str] = set()  # threads that use the engines now

    def begin(self, requests: list[GenerationRequest], sampling: SamplingParams) -> None:
        with self._alone():
            self.versions.append(self.version)
            super().begin(requests, sampling)

    async def collect(self, timeout: float | None = None) -> list[tuple[int, Generation]]:
        assert timeout is not None, "a look without a limit keeps pushes waiting"
        with self._alone():
            self.before_look(len(self.versions))
            (number, found), *_ = await super().collect(timeout)
            self.arrived.append(len(self.versions))
            half = len(found.token_ids) // 2
            runs = [(found.weight_version, half), (self.version, len(found.token_ids) - half)]
            return [(number, replace(found, weight_version=oldest(runs), version_runs=joined_runs(runs)))]

    def receive_weights(self, version: int) -> dict[str, float]:
        with self._alone():
            return super().receive_weights(version)

    def _alone(self) -> Any:
        engines, name = self, threading.current_thread().name

        class Alone:
            def __enter__(self) -> None:
                assert not engines.users - {name}, "two threads use the engines"
                engines.users.add(name)

            def __exit__(self, *failure: object) -> None:
                engines.users.discard(name)

        return Alone()


def run(staleness: int = 1, **settings: Any) -> Run:
    made = Run(staleness=staleness, partial_rollout=True, **settings)
    made.engines = EnginesInFlight(made.journal)
    return made


def in_flight(made: Run) -> EnginesInFlight:
    assert isinstance(made.engines, EnginesInFlight)
    return made.engines


def trained(made: Run) -> list[list[list[int]]]:
    """Return the tokens of each sample of each update."""
    return [[sample.token_ids.tolist() for sample in samples] for samples, _ in made.actor.updates]


def threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("sampling")]


def looks_after_push(made: Run, *, of: int, awaited: int) -> None:
    """Start a batch before this version is sent, and deliver its responses afterwards."""
    engines, begun, pushed = in_flight(made), threading.Event(), threading.Event()
    receive, update = engines.receive_weights, made.actor.update

    def receives(version: int) -> dict[str, float]:
        found = receive(version)
        if version == awaited:
            pushed.set()
        return found

    async def collect(timeout: float | None = None) -> list[tuple[int, Generation]]:
        if len(engines.versions) == of and not pushed.is_set():
            begun.set()
            return []
        return await EnginesInFlight.collect(engines, timeout)

    def trains(*given: Any, **named: Any) -> Any:
        assert len(made.actor.updates) + 1 < awaited or begun.wait(WAIT)
        return update(*given, **named)

    made.actor.update = trains  # type: ignore[method-assign]
    engines.receive_weights = receives  # type: ignore[method-assign]
    engines.collect = collect  # type: ignore[method-assign]


def test_a_push_comes_in_the_middle_of_a_batch_whose_later_tokens_are_of_the_new_weights():
    made = run()
    looks_after_push(made, of=3, awaited=2)  # batch 3 starts during iteration 2
    assert made() == Finished(4, interrupted=False)
    metrics = dict(made.tracker.logged)
    assert metrics[3]["staleness/max"] == 1.0
    assert 0 < metrics[3]["staleness/mean"] < 1
    assert 0 < metrics[3]["staleness/mixed"] <= 1
    assert metrics[3]["rollout_k3_current"] == pytest.approx(0.5 - 1 + 2.718281828**-0.5, abs=1e-6)
    assert "staleness/mixed" not in metrics[1]
    assert not threads()


@pytest.mark.parametrize("staleness", [1, 2, 3])
def test_no_token_is_older_than_the_bound_and_every_prompt_is_trained_once(staleness):
    made, whole = run(staleness, episodes=5), Run(episodes=5)
    assert made(total_iterations=10) == Finished(10, interrupted=False)
    whole(total_iterations=10)
    assert trained(made) == trained(whole)
    assert all(version >= number - staleness for number, version in enumerate(in_flight(made).versions))
    assert max(metrics["staleness/max"] for _, metrics in made.tracker.logged) <= staleness
    assert made.actor.on_policy == [False] * 10


@pytest.mark.parametrize("staleness", [1, 2])
def test_a_run_that_goes_on_from_any_checkpoint_loses_no_prompt_and_trains_none_twice(staleness, tmp_path):
    whole = run(staleness, policy=WITHOUT_REFERENCE, episodes=4)
    whole(save_steps=1, total_iterations=8)
    assert len(whole.saved) == 8
    for state in whole.saved[:-1]:
        again = run(staleness, episodes=4)
        again.engines.version = state.iteration
        folder = tmp_path / f"{state.iteration}"
        again(state=through_files(state, folder, PROMPTS, whole.settings), total_iterations=8)
        assert trained(again) == trained(whole)[state.iteration :]


def test_an_evaluation_waits_for_the_batch_in_flight_and_keeps_others_from_beginning():
    made, evaluates, begun = run(2, episodes=4), threading.Event(), threading.Event()
    found: list[tuple[int, bool, int]] = []
    engines = in_flight(made)

    def is_due(iteration: int, is_last: bool) -> bool:
        if iteration == 1:
            assert begun.wait(WAIT)  # batch 3, which may start together with iteration 1
            evaluates.set()
        return iteration == 1

    async def collect(timeout: float | None = None) -> list[tuple[int, Generation]]:
        if len(engines.versions) == 3 and not evaluates.is_set():
            begun.set()
            return []
        return await EnginesInFlight.collect(engines, timeout)

    def evaluate(iteration: int, is_last: bool) -> None:
        if iteration == 1:
            with engines._alone():
                found.append((iteration, engines.is_generating, len(engines.versions)))

    engines.collect = collect  # type: ignore[method-assign]
    made.evaluate, made.evaluation_is_due = evaluate, is_due
    assert made(total_iterations=8) == Finished(8, interrupted=False)
    assert found == [(1, False, 3)]


def test_an_error_of_the_sampling_before_an_evaluation_leaves_engines_at_rest():
    made, failed = run(), threading.Event()
    engines = in_flight(made)

    async def collect(timeout: float | None = None) -> list[tuple[int, Generation]]:
        if len(engines.versions) == 2 and threading.current_thread().name.startswith("sampling"):
            failed.set()
            raise RunError("no room is left")
        return await EnginesInFlight.collect(engines, 0.0)

    def is_due(iteration: int, is_last: bool) -> bool:
        if iteration == 1:
            assert failed.wait(WAIT)
        return iteration == 1

    engines.collect = collect  # type: ignore[method-assign]
    made.evaluation_is_due = is_due
    made.evaluate = lambda iteration, is_last: found.append(engines.is_generating)
    found: list[bool] = []
    with pytest.raises(RunError, match="no room is left"):
        made(save_steps=1)
    assert found == [False, False]
    assert [state.iteration for state in made.saved] == [1]


def test_a_checkpoint_keeps_the_actor_from_an_engine_that_is_started_again():
    """A batch is running meanwhile."""
    made, looked, saving = run(2, episodes=4), threading.Event(), threading.Event()
    engines, order = in_flight(made), list[str]()

    async def collect(timeout: float | None = None) -> list[tuple[int, Generation]]:
        if len(engines.versions) == 3 and not engines.version:
            return []  # the batch continues after the weight update
        if len(engines.versions) == 3 and not looked.is_set():
            assert saving.wait(WAIT)
            looked.set()
            with made.lent_actor.borrowed():
                order.append("engine")
        return await EnginesInFlight.collect(engines, timeout)

    def saves(self: list[Any], state: Any) -> None:
        if state.iteration == 1:
            saving.set()
            assert looked.wait(WAIT)
            order.append("checkpoint")

    engines.collect = collect  # type: ignore[method-assign]
    made.saved = type("Saved", (list,), {"append": saves})()
    looks_of_batch(made, number=3)
    assert made(total_iterations=8, save_steps=1) == Finished(8, interrupted=False)
    assert order == ["checkpoint", "engine"]


def looks_of_batch(made: Run, *, number: int) -> None:
    """Block the update of the first iteration until a batch is polled."""
    engines, begun = in_flight(made), threading.Event()
    begin, update = engines.begin, made.actor.update

    def begins(requests: list[GenerationRequest], sampling: SamplingParams) -> None:
        begin(requests, sampling)
        if len(engines.versions) == number:
            begun.set()

    def trains(*given: Any, **named: Any) -> Any:
        assert made.actor.updates or begun.wait(WAIT)
        return update(*given, **named)

    engines.begin = begins  # type: ignore[method-assign]
    made.actor.update = trains  # type: ignore[method-assign]


def test_replaced_prompts_and_greedy_baselines_are_sampled_within_pushes(tmp_path):
    dynamic = DynamicSamplingConfig(dynamic_filtering=True, dynamic_oversample=3.0, dynamic_max_rounds=8)
    made = run(2, algorithm="rloo", policy=WITHOUT_REFERENCE, dynamic=dynamic, episodes=8)
    made.scorer.judge = even  # type: ignore[method-assign]
    in_flight(made).longest = 60
    made(total_iterations=16, save_steps=1)
    asked = {request.group for requests in made.scorer.asked for request in requests}
    assert asked == {str(place) for place in range(NUM_PROMPTS * 8)}
    greedy = run(1, algorithm="remax", policy=WITHOUT_REFERENCE, episodes=4)
    assert greedy(total_iterations=8) == Finished(8, interrupted=False)
    assert all("greedy_reward" in metrics for _, metrics in greedy.tracker.logged)


def even(request: ScoreRequest) -> Score:
    """Score 1 if the sum of the digits is even."""
    return Score(1.0, "correct") if sum(map(int, request.response)) % 2 == 0 else Score(0.0, "wrong")


def test_an_engine_that_needs_the_actor_and_a_push_do_not_wait_for_each_other():
    """The engine requests the actor during a poll, while the actor trains and then sends weights."""
    made, trains_now, asks = run(), threading.Event(), threading.Event()
    versions: list[int | None] = []

    def before_look(number: int) -> None:
        if number == 2 and not versions:
            assert trains_now.wait(WAIT)
            asks.set()
            with made.lent_actor.borrowed() as version:
                versions.append(version)

    in_flight(made).before_look = before_look
    update = made.actor.update

    def trains(*given: Any, **named: Any) -> Any:
        if not made.actor.updates:
            trains_now.set()
            assert asks.wait(WAIT)
            assert not versions
        return update(*given, **named)

    made.actor.update = trains  # type: ignore[method-assign]
    assert made() == Finished(4, interrupted=False)
    assert versions == [1]


@pytest.mark.parametrize("error", [RunError("too many rewards failed"), ProcessDied("engine 0 died")])
def test_an_error_of_the_sampling_ends_the_run_after_the_iteration_beside_it(error):
    made = run()

    def fails(index: int) -> bool:
        if len(in_flight(made).versions) == 3:
            raise error
        return False

    made.scorer.fails = fails
    with pytest.raises(RunError) as raised:
        made()
    assert raised.value is error
    assert [step for step, _ in made.tracker.logged] == [1, 2]
    assert [state.iteration for state in made.saved] == ([] if isinstance(error, ProcessDied) else [2])
    assert not threads()


def test_too_many_skipped_steps_end_the_sampling_before_the_checkpoint():
    made, begun = run(), threading.Semaphore(0)
    made.actor.found = {"skipped_in_a_row": 2.0}
    made.settings = replace(made.settings, optim=made.settings.optim.model_copy(update={"max_skipped_steps": 1}))

    async def never(timeout: float | None = None) -> list[tuple[int, Generation]]:
        if len(in_flight(made).versions) > 1:
            begun.release()
            return []
        return await EnginesInFlight.collect(in_flight(made), timeout)

    made.engines.collect = never  # type: ignore[method-assign]
    update = made.actor.update

    def trains(*given: Any, **named: Any) -> Any:
        assert begun.acquire(timeout=WAIT)
        return update(*given, **named)

    made.actor.update = trains  # type: ignore[method-assign]
    with pytest.raises(RunError, match="skipped"):
        made(save_steps=1)
    assert [state.iteration for state in made.saved] == [1]
    assert not threads()


ERRORS = {"fails": RunError("in an update"), "is interrupted": KeyboardInterrupt()}


def calls_first(arrives: Callable[..., None], made: Run, place: str) -> None:
    """Call a function in this place of the main thread."""
    update = made.actor.update
    if place in ("trains", *ERRORS):
        made.actor.update = lambda *given, **named: (arrives(), update(*given, **named))[1]  # type: ignore[func-returns-value, method-assign]
    elif place == "saves":
        made.saved = SimpleNamespace(append=arrives)  # type: ignore[assignment]
    elif place == "evaluates":
        made.evaluation_is_due = lambda iteration, is_last: (arrives(), iteration == 1)[1]  # type: ignore[func-returns-value]
    else:
        phase = {"pushes": "transfer", "waits for a batch": "generate"}[place]
        made.tracker.phase = lambda name: arrives() if name == phase else None  # type: ignore[method-assign]


@pytest.mark.parametrize("place", ["trains", "saves", "evaluates", "waits for a batch", "pushes", *ERRORS])
def test_an_engine_may_need_the_actor_whatever_the_main_thread_does(place):
    """The engine is restarted in the middle of batch 3, after iteration 1."""
    made, arrived, asks, versions = run(2, episodes=4), threading.Event(), threading.Event(), list[int | None]()
    engines = in_flight(made)

    async def collect(timeout: float | None = None) -> list[tuple[int, Generation]]:
        if len(engines.versions) == 3 and not arrived.is_set():
            return []
        if len(engines.versions) == 3 and not asks.is_set():
            asks.set()
            with made.lent_actor.borrowed() as version:
                versions.append(version)
        return await EnginesInFlight.collect(engines, timeout)

    def arrives(*given: Any, **named: Any) -> None:
        if made.tracker.logged and not arrived.is_set():
            arrived.set()
            # A push may hold the sampling before the engine asks.
            assert place == "pushes" or (asks.wait(WAIT) and not versions)
            if place in ERRORS:
                raise ERRORS[place]

    engines.collect = collect  # type: ignore[method-assign]
    calls_first(arrives, made, place)
    if place in ERRORS:
        with pytest.raises(type(ERRORS[place])):
            made(total_iterations=8)
    else:
        assert made(total_iterations=8, save_steps=1) == Finished(8, interrupted=False)
    assert versions == ([] if place in ERRORS else [1 if place == "evaluates" else 2])
    assert not threads()
    assert not made.scorer.num_open


def test_a_push_does_not_wait_for_rewards_and_the_next_look_waits_for_the_push():
    made, awaits, pushed = run(), threading.Event(), threading.Event()
    engines, receive, session, update = (
        in_flight(made),
        made.engines.receive_weights,
        made.scorer.session,
        made.actor.update,
    )

    def receives(version: int) -> dict[str, float]:
        looks = len(engines.arrived)
        found = receive(version)
        time.sleep(0.01)
        assert len(engines.arrived) == looks
        pushed.set()
        return found

    def slow_session() -> FakeSession:
        made_now, number = session(), len(engines.versions) + 1

        async def finish(*, is_all: bool = False) -> dict[int, Score]:
            if number == 2:
                awaits.set()
                while not pushed.is_set():
                    await asyncio.sleep(0.001)
            return await FakeSession.finish(made_now, is_all=is_all)

        made_now.finish = finish  # type: ignore[method-assign]
        return made_now

    def trains(*given: Any, **named: Any) -> Any:
        assert awaits.wait(WAIT)
        return update(*given, **named)

    made.scorer.session = slow_session  # type: ignore[method-assign]
    engines.receive_weights, made.actor.update = receives, trains  # type: ignore[method-assign]
    assert made() == Finished(4, interrupted=False)
