"""Asynchronous sampling with fake models, engines and rewards: versions, repeats, resumes, failures, ends."""

import dataclasses
import math
import threading
from collections.abc import Callable
from typing import Any

import pytest
from online_fakes import (
    BATCH,
    EXACT,
    NUM_PROMPTS,
    PROMPTS,
    SAMPLES_EACH,
    WITHOUT_REFERENCE,
    FakeEngines,
    FakeModel,
    Run,
)
from saved_loops import through_files

from rlhf_cli.algorithms.estimators.gae import ActorCriticPolicyConfig
from rlhf_cli.config.rollout import DynamicSamplingConfig
from rlhf_cli.data.rollouts import Generation, GenerationRequest, SamplingParams
from rlhf_cli.errors import ProcessDied, RunError
from rlhf_cli.rewards.records import Score, ScoreRequest
from rlhf_cli.trainers.offline.loop import Finished
from rlhf_cli.trainers.online.schedule import sampling_seconds
from rlhf_cli.trainers.online.state import LoopState

WAIT = 30.0  # timeout of a test in seconds


class WatchedEngines(FakeEngines):
    """Records the weight version of each batch; responses depend on it."""

    def __init__(self, journal: list[str]) -> None:
        super().__init__(journal)
        self.versions: list[int] = []
        self.begun: Callable[[], None] = lambda: None
        self.held: threading.Event | None = None  # no response is returned before it is set
        self.threads: set[str] = set()  # that sample

    def begin(self, requests: list[GenerationRequest], sampling: SamplingParams) -> None:
        self.versions.append(self.version)
        self.threads.add(threading.current_thread().name)
        super().begin(requests, sampling)
        self.begun()

    async def collect(self, timeout: float | None = None) -> list[tuple[int, Generation]]:
        if self.held is not None and not self.held.wait(timeout):
            return []
        return await super().collect(timeout)

    def _answer(self, request: GenerationRequest) -> Generation:
        found = super()._answer(request)
        return Generation(
            [(token + self.version) % 9 for token in found.token_ids],
            found.logprobs,
            found.finish_reason,
            found.weight_version,
        )


def run(staleness: int, **settings: Any) -> Run:
    made = Run(staleness=staleness, **settings)
    made.engines = WatchedEngines(made.journal)
    return made


def watched(made: Run) -> WatchedEngines:
    assert isinstance(made.engines, WatchedEngines)
    return made.engines


def logged(made: Run) -> list[tuple[int, dict[str, float]]]:
    """Return the reproducible metrics of each iteration."""
    return [
        (step, {name: value for name, value in metrics.items() if not name.startswith("perf/")})
        for step, metrics in made.tracker.logged
    ]


def trained(made: Run) -> list[list[list[int]]]:
    """Return the tokens of each sample of each update."""
    return [[sample.token_ids.tolist() for sample in samples] for samples, _ in made.actor.updates]


def goes_on(state: LoopState, made: Run, **given: Any) -> Finished:
    """Train from a state, with the weights that engines receive on a resume."""
    made.engines.version = state.iteration
    return made(state=state, **given)


def threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("sampling")]


@pytest.mark.parametrize("staleness", [0, 1, 2, 3])
def test_the_number_of_a_batch_decides_about_the_weights_that_sample_it(staleness):
    made = run(staleness)
    assert made() == Finished(4, interrupted=False)
    assert watched(made).versions == [max(0, number - 1 - staleness) for number in (1, 2, 3, 4)]
    assert watched(made).threads == {"sampling" if staleness else threading.current_thread().name}
    own = [[request.prompt_ids for request in batch] for batch in made.engines.requests]
    whole = run(0)
    whole()
    assert own == [[request.prompt_ids for request in batch] for batch in whole.engines.requests]
    assert not threads()
    if staleness:
        found = [(metrics["staleness/mean"], metrics["staleness/max"]) for _, metrics in made.tracker.logged]
        assert found == [(min(staleness, number - 1),) * 2 for number in (1, 2, 3, 4)]
    else:
        assert not [name for _, metrics in made.tracker.logged for name in metrics if name.startswith("staleness")]


@pytest.mark.parametrize("is_dynamic", [False, True])
def test_an_iteration_without_a_response_to_train_on_is_skipped_beside_the_sampling(is_dynamic):
    policy = ActorCriticPolicyConfig(init_kl_coef=0.0, mask_truncated=not is_dynamic)
    settings = {"dynamic_filtering": True, "dynamic_max_rounds": 1, "dynamic_oversample": 0.0}
    dynamic = DynamicSamplingConfig(**settings) if is_dynamic else None  # type: ignore[arg-type]
    made = run(1, policy=policy, algorithm="rloo", dynamic=dynamic, episodes=8)
    answer, judge = made.engines._answer, made.scorer.judge

    def is_second() -> bool:
        return len(made.engines.requests) == 2

    made.engines._answer = lambda request: dataclasses.replace(  # type: ignore[method-assign]
        answer(request), finish_reason="length" if is_second() else "stop"
    )
    made.scorer.judge = lambda request: Score(1.0, "scored") if is_second() else judge(request)  # type: ignore[method-assign]
    made(total_iterations=4)
    assert [number for number, _ in made.tracker.logged] == [1, 2, 3, 4]
    assert [metrics.get("skipped_iterations") for _, metrics in made.tracker.logged] == [None, 1.0, 1.0, 1.0]
    assert "loss" not in made.tracker.logged[1][1]
    assert len(made.actor.updates) == 3
    assert not threads()


def test_batches_are_sampled_while_the_models_train():
    made, begun = run(1), threading.Semaphore(0)
    watched(made).begun = begun.release
    update = made.actor.update

    def trains(*given: Any, **named: Any) -> Any:
        number = len(made.actor.updates)
        if number == 0:
            assert begun.acquire(timeout=WAIT)  # the batch of this iteration
        if number < 3:  # nothing is sampled during the last iteration
            assert begun.acquire(timeout=WAIT)
        return update(*given, **named)

    made.actor.update = trains  # type: ignore[method-assign]
    made()
    assert len(made.actor.updates) == 4
    times = [sorted(name for name in metrics if name.startswith("perf/")) for _, metrics in made.tracker.logged]
    assert times == [["perf/engines_idle_seconds", "perf/sampling_seconds", "perf/sampling_wait_seconds"]] * 4


def test_a_push_waits_for_the_batch_in_flight_and_old_policies_are_corrected():
    made = run(1)
    made()
    pushes = [number for number, entry in enumerate(made.journal) if entry.startswith("engines.receive")]
    begun = [number for number, entry in enumerate(made.journal) if entry == "engines.generate"]
    scored = [number for number, entry in enumerate(made.journal) if entry == "scorer.score"]
    assert begun[0] < scored[0] < begun[1] < scored[1] < pushes[0] < begun[2] < scored[2] < pushes[1] < begun[3]
    assert made.actor.on_policy == [False] * 4
    assert all("old_logprobs" in sample.columns for samples, _ in made.actor.updates for sample in samples)


@pytest.mark.parametrize("staleness", [1, 2])
@pytest.mark.parametrize("algorithm", ["ppo", "remax"])
def test_a_run_that_goes_on_after_any_iteration_equals_the_run_that_never_stopped(staleness, algorithm, tmp_path):
    whole = run(staleness, algorithm=algorithm, policy=WITHOUT_REFERENCE)
    whole(save_steps=1)
    assert [len(state.ahead) for state in whole.saved] == [min(staleness, 4 - number) for number in (1, 2, 3, 4)]
    for state in whole.saved[:-1]:
        again = run(staleness, algorithm=algorithm)
        goes_on(through_files(state, tmp_path / f"{state.iteration}", PROMPTS, whole.settings), again)
        assert trained(again) == trained(whole)[state.iteration :]
        assert logged(again) == logged(whole)[state.iteration :]
        assert again.tracker.rows == whole.tracker.rows[state.iteration :]


def test_a_stop_keeps_the_batches_that_wait_for_training(tmp_path):
    whole, stopped = run(1), run(1, stop_after=2)
    whole()
    assert stopped() == Finished(2, interrupted=True)
    again = run(1)
    assert goes_on(through_files(stopped.saved[-1], tmp_path / "s", PROMPTS, stopped.settings), again) == Finished(
        4, interrupted=False
    )
    assert trained(stopped) + trained(again) == trained(whole)
    assert not threads()


@pytest.mark.parametrize("error", [RunError("too many rewards failed"), ProcessDied("engine 0 died")])
def test_an_error_of_the_sampling_comes_when_the_iteration_beside_it_is_whole_and_saved(error):
    made = run(1)

    def fails(index: int) -> bool:
        if len(watched(made).versions) == 3:  # batch 3 is sampled while iteration 2 trains
            raise error
        return False

    made.scorer.fails = fails
    with pytest.raises(RunError) as raised:
        made()
    assert raised.value is error
    assert [step for step, _ in made.tracker.logged] == [1, 2]
    assert made.journal[-1] == ("actor.sleep" if isinstance(error, ProcessDied) else "engines.sleep")
    assert not threads()
    if isinstance(error, ProcessDied):
        assert not made.saved
        return
    (state,) = made.saved
    assert (state.iteration, state.source.iteration, state.ahead) == (2, 2, ())
    again = run(1)
    assert goes_on(state, again) == Finished(4, interrupted=False)
    assert watched(again).versions == [2, 2]  # batch 3 used older weights, which are gone


@pytest.mark.parametrize(("max_failures", "message"), [(0.5, "6 of 6 rewards failed"), (1.0, "every reward failed")])
def test_a_batch_without_scores_does_not_get_into_a_checkpoint(max_failures, message, tmp_path):
    made = run(1, reward=EXACT.model_copy(update={"reward_max_failures": max_failures}))
    made.scorer.fails = lambda index: len(watched(made).versions) == 3  # while iteration 2 trains
    with pytest.raises(RunError, match=message):
        made()
    (state,) = made.saved
    assert (state.iteration, state.ahead) == (2, ())
    again = run(1)
    assert goes_on(through_files(state, tmp_path / "s", PROMPTS, made.settings), again) == Finished(
        4, interrupted=False
    )


@pytest.mark.parametrize("place", ["training", "reward model"])
def test_an_error_beside_the_sampling_ends_it(place):
    whole, broken, error = run(1), run(1), RunError("a rank failed")
    whole(total_iterations=3, save_steps=1)
    begun = threading.Event()
    watched(broken).begun, watched(broken).held = begun.set, threading.Event()  # its responses never arrive

    def fails(*given: Any, **named: Any) -> Any:
        assert begun.wait(WAIT)
        raise error

    if place == "training":
        broken.actor.update = fails  # type: ignore[method-assign]
    else:
        broken.reward_model = FakeModel("reward", broken.journal)
        broken.reward_model.scores = fails  # type: ignore[method-assign]
    with pytest.raises(RunError) as raised:
        goes_on(whole.saved[0], broken)
    assert raised.value is error
    assert not threads()
    assert not broken.scorer.num_open
    assert not broken.saved  # the state before the iteration is that of a checkpoint


def test_an_interrupt_while_the_run_waits_for_a_batch_ends_its_sampling():
    made, begun, never = run(1), threading.Semaphore(0), threading.Event()
    watched(made).begun = begun.release

    def is_interrupted(name: str | None) -> None:
        if name == "train":
            watched(made).held = never
        if name == "generate" and watched(made).held is never:
            assert begun.acquire(timeout=WAIT)  # the first batch
            assert begun.acquire(timeout=WAIT)  # the batch whose responses never arrive
            raise KeyboardInterrupt

    made.tracker.phase = is_interrupted  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        made()
    assert not threads()


def test_after_a_failed_reward_model_the_state_before_the_iteration_has_its_batch_yet(tmp_path):
    whole, broken = run(1), run(1, reward=EXACT.model_copy(update={"reward_pretrain": "m"}))
    whole()
    assert broken.reward_model is not None
    scores = broken.reward_model.scores

    def fails_once(sequences: Any) -> list[float]:
        if len(broken.tracker.logged) == 2:
            raise RunError("the reward model is gone")
        return scores(sequences)

    broken.reward_model.scores = fails_once  # type: ignore[method-assign]
    with pytest.raises(RunError, match="gone"):
        broken()
    (state,) = broken.saved
    assert (state.iteration, len(state.ahead), broken.journal[-1]) == (2, 1, "engines.sleep")
    again = run(1)
    goes_on(through_files(state, tmp_path / "s", PROMPTS, broken.settings), again)
    assert trained(again) == trained(whole)[2:]


def even(request: ScoreRequest) -> Score:
    """Score 1 if the sum of the digits is even."""
    return Score(1.0, "correct") if sum(map(int, request.response)) % 2 == 0 else Score(0.0, "wrong")


def filtered(staleness: int, **settings: Any) -> Run:
    dynamic = DynamicSamplingConfig(dynamic_filtering=True, dynamic_oversample=3.0, dynamic_max_rounds=8)
    made = run(staleness, algorithm="rloo", policy=WITHOUT_REFERENCE, dynamic=dynamic, episodes=8, **settings)
    made.scorer.judge = even  # type: ignore[method-assign]
    made.engines.longest = 60
    return made


def test_replaced_prompts_are_neither_lost_nor_trained_on_twice(tmp_path):
    made = filtered(1)
    made(total_iterations=16, save_steps=1)
    last = made.saved[-1]
    assert (last.source.num_taken, list(last.ahead), list(last.source.surplus)) == (NUM_PROMPTS * 8, [], [])
    asked = {request.group for requests in made.scorer.asked for request in requests}
    assert asked == {str(place) for place in range(NUM_PROMPTS * 8)}
    waiting = [group[0].group for state in made.saved for rollout in state.ahead for group in rollout.groups]
    assert len(set(waiting)) == len(waiting) == sum(len(samples) for samples, _ in made.actor.updates[1:]) / 2
    full = [samples for samples, _ in made.actor.updates if len(samples) == BATCH * SAMPLES_EACH]
    assert len(full) >= len(made.actor.updates) - 1
    carrying = [state for state in made.saved if state.source.surplus and state.ahead]
    assert carrying
    for state in carrying:
        again = filtered(1)
        goes_on(
            through_files(state, tmp_path / f"{state.iteration}", PROMPTS, made.settings), again, total_iterations=16
        )
        assert trained(again) == trained(made)[state.iteration :]
        assert logged(again) == logged(made)[state.iteration :]


def test_the_seconds_of_sampling_are_those_between_two_times():
    spans = [(1.0, 3.0), (4.0, 8.0), (9.0, math.inf)]  # the last batch is in flight
    assert sampling_seconds(spans, 0.0, 10.0) == 7.0
    assert sampling_seconds(spans, 2.0, 5.0) == 2.0
    assert sampling_seconds(spans, 8.0, 9.0) == 0.0
    assert sampling_seconds([], 0.0, 10.0) == 0.0
