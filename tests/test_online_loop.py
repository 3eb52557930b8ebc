"""The online loop with fakes: who is called when and with what, and what a resumed run repeats."""

import dataclasses
import json
from collections.abc import Callable, Sequence
from typing import Any, Literal

import numpy as np
import pytest

from rlhf_cli.algorithms.entropy import EntropyState
from rlhf_cli.algorithms.objective import LossWeights
from rlhf_cli.algorithms.table import ALGORITHMS
from rlhf_cli.config.model import MovingReferenceConfig
from rlhf_cli.config.online import ActorCriticBatchConfig, OnlineRewardConfig, RolloutConfig
from rlhf_cli.config.policy import ActorCriticPolicyConfig, PolicyConfig
from rlhf_cli.config.train import BatchConfig, OptimConfig
from rlhf_cli.data import packing
from rlhf_cli.data.prompts import Prompt
from rlhf_cli.data.rollouts import Generation, GenerationRequest, SamplingParams
from rlhf_cli.data.samples import Sample
from rlhf_cli.errors import ProcessDied, RunError
from rlhf_cli.rewards.records import Score, ScoreRequest
from rlhf_cli.trainers.loop import Finished
from rlhf_cli.trainers.rl import OnlineHooks, Roles, train_online
from rlhf_cli.trainers.rl_rollout import request_seed
from rlhf_cli.trainers.rl_state import LoopState, OnlineSettings, first_state
from rlhf_cli.trainers.update_plan import StepCounts, count_steps

NUM_PROMPTS, BATCH, SAMPLES_EACH = 6, 3, 2
WITHOUT_REFERENCE, WITH_REFERENCE = ActorCriticPolicyConfig(init_kl_coef=0.0), ActorCriticPolicyConfig(init_kl_coef=0.1)
ONE_STEP = BatchConfig(train_batch_size=BATCH * SAMPLES_EACH)
TWO_STEPS = BatchConfig(train_batch_size=BATCH * SAMPLES_EACH, max_epochs=2)
FAILED = Score(None, "failed", "grader broke", failure="raised")
EXACT = OnlineRewardConfig(reward_funcs=["exact"], reward_max_failures=1.0)
WITH_REWARD_MODEL = OnlineRewardConfig(reward_funcs=["exact"], reward_pretrain="rm", reward_model_weight=0.5)


class FakeModel:
    """A model of any role: writes down its calls and answers with numbers that depend on the tokens alone."""

    def __init__(self, name: str, journal: list[str], *, level: float = 0.0) -> None:
        self.name, self.journal, self.level = name, journal, level
        self.updates: list[tuple[list[Sample], list[list[int]]]] = []
        self.on_policy: list[bool] = []
        self.weights: list[LossWeights | None] = []
        self.found: dict[str, float] = {}  # what each step of an update reports besides
        self.error: Exception | None = None

    def _note(self, what: str) -> None:
        self.journal.append(f"{self.name}.{what}")

    def wake(self) -> None:
        self._note("wake")

    def sleep(self) -> None:
        self._note("sleep")

    def sleep_optimizer(self) -> None:
        self._note("sleep_optimizer")

    def move(self) -> None:
        self._note("move")

    def logprobs(self, sequences: Sequence[packing.Sequence]) -> list[np.ndarray]:
        self._note("logprobs")
        return [np.full(sequence.num_trained, self.level, np.float32) for sequence in sequences]

    def values(self, sequences: Sequence[packing.Sequence]) -> list[np.ndarray]:
        self._note("values")
        return [np.arange(sequence.num_trained, dtype=np.float32) / 10 for sequence in sequences]

    def scores(self, sequences: Sequence[packing.Sequence]) -> list[float]:
        self._note("scores")
        return [float(sequence.token_ids[-1]) for sequence in sequences]

    def update(
        self,
        samples: Sequence[Sample],
        steps: Sequence[np.ndarray],
        *,
        on_policy: bool = False,
        weights: LossWeights | None = None,
    ) -> list[dict[str, float]]:
        self._note("update")
        if self.error is not None:
            raise self.error
        self.updates.append((list(samples), [step.tolist() for step in steps]))
        self.on_policy.append(on_policy)
        self.weights.append(weights)
        found = {"entropy": 0.1} | self.found
        return [{"loss": float(number), "ratio_max": 10.0 - number} | found for number in range(len(steps))]


class FakeEngines:
    """Answers a request with tokens drawn from its seed, one to `longest`."""

    def __init__(self, journal: list[str]) -> None:
        self.journal = journal
        self.requests: list[list[GenerationRequest]] = []
        self.sampling: list[SamplingParams] = []
        self.arrives: Callable[[int, Generation], float] = lambda number, response: number  # first what is least
        self.limits: list[int] = []
        self.longest = 4
        self._left: list[tuple[int, Generation]] = []
        self.version = 0

    def generate(self, requests: list[GenerationRequest], sampling: SamplingParams) -> list[Generation]:
        self.begin(requests, sampling)
        return [response for _, response in sorted((self._left.pop(0) for _ in requests), key=lambda one: one[0])]

    def begin(self, requests: list[GenerationRequest], sampling: SamplingParams) -> None:
        self.journal.append("engines.generate")
        self.requests.append(requests)
        self.sampling.append(sampling)
        self._left = sorted(enumerate(map(self._answer, requests)), key=lambda one: self.arrives(*one))

    @property
    def is_generating(self) -> bool:
        return bool(self._left)

    def collect(self, timeout: float | None = None) -> list[tuple[int, Generation]]:
        return [self._left.pop(0)]

    def cut(self, max_tokens: int) -> None:
        self.limits.append(max_tokens)
        self._left = [one for one in self._left if len(one[1].token_ids) <= max_tokens]

    def _answer(self, request: GenerationRequest) -> Generation:
        rng = np.random.default_rng(request.seed)
        length = int(rng.integers(1, self.longest + 1))
        reason: Literal["stop", "length"] = "length" if length == self.longest else "stop"
        return Generation(rng.integers(0, 9, length).tolist(), [-0.5] * length, reason, self.version)

    def wake_cache(self) -> None:
        self.journal.append("engines.wake_cache")

    def sleep(self) -> None:
        self.journal.append("engines.sleep")

    def receive_weights(self, version: int) -> dict[str, float]:
        self.journal.append(f"engines.receive_weights {version}")
        self.version = version
        return {"weight_version": float(version)}


class FakeScorer:
    """A response is worth its length; `fails` says which of an iteration's responses cannot be scored."""

    def __init__(self, journal: list[str], fails: Callable[[int], bool]) -> None:
        self.journal, self.fails = journal, fails
        self.asked: list[list[ScoreRequest]] = []

    def score(self, requests: list[ScoreRequest]) -> list[Score]:
        session = self.session()
        session.add(requests)
        found = session.finish()
        return [found[number] for number in range(len(requests))]

    def session(self) -> "FakeSession":
        return FakeSession(self)

    def judge(self, request: ScoreRequest) -> Score:
        return Score(float(len(request.response)), "scored")


class FakeSession:
    """Scores are ready as soon as they are asked for."""

    def __init__(self, scorer: FakeScorer) -> None:
        self.scorer = scorer
        self.requests: list[ScoreRequest] = []
        self.reported = 0

    def __enter__(self) -> "FakeSession":
        return self

    def __exit__(self, *failure: object) -> None: ...

    def add(self, requests: Sequence[ScoreRequest]) -> range:
        self.requests += requests
        return range(len(self.requests) - len(requests), len(self.requests))

    def ready(self) -> list[tuple[int, Score]]:
        first, self.reported = self.reported, len(self.requests)
        return [(number, self.scorer.judge(self.requests[number])) for number in range(first, self.reported)]

    def finish(self, *, is_all: bool = False) -> dict[int, Score]:
        scorer, numbers = self.scorer, sorted(range(len(self.requests)), key=self._order)
        scorer.journal.append("scorer.score")
        scorer.asked.append([self.requests[number] for number in numbers])
        found = {
            number: FAILED if scorer.fails(place) else scorer.judge(self.requests[number])
            for place, number in enumerate(numbers)
        }
        return found

    def _order(self, number: int) -> tuple[bool, int, int]:
        """Of prompts, then of samples; greedy responses come last."""
        place, _, greedy = self.requests[number].group.partition(" ")
        return bool(greedy), int(place), self.requests[number].sample


class FakeTracker:
    def __init__(self) -> None:
        self.logged: list[tuple[int, dict[str, float]]] = []
        self.rows: list[tuple[int, list[dict[str, Any]]]] = []
        self.phases: list[str | None] = []
        self.messages: list[str] = []

    def log(self, step: int, metrics: dict[str, float], phases: dict[str, float]) -> None:
        self.logged.append((step, metrics))

    def samples(self, step: int, rows: list[dict[str, Any]]) -> None:
        self.rows.append((step, rows))

    def phase(self, name: str | None) -> None:
        self.phases.append(name)

    def message(self, text: str) -> None:
        self.messages.append(text)


class Run:
    """One run with fakes; `stop_after` is the iteration during which a stop is asked for."""

    def __init__(
        self,
        *,
        policy: PolicyConfig = WITHOUT_REFERENCE,
        batch: BatchConfig = ONE_STEP,
        episodes: int = 2,
        fails: Callable[[int], bool] = lambda index: False,
        stop_after: int | None = None,
        reward: OnlineRewardConfig = EXACT,
        algorithm: str = "ppo",
        **more: Any,
    ) -> None:
        self.journal: list[str] = []
        self.actor = FakeModel("actor", self.journal, level=-1.0)
        self.critic = FakeModel("critic", self.journal)
        self.has_critic = ALGORITHMS[algorithm].critic
        self.reference = FakeModel("ref", self.journal, level=-1.25) if policy.init_kl_coef else None
        self.reward_model = FakeModel("reward", self.journal) if reward.reward_pretrain else None
        self.engines = FakeEngines(self.journal)
        self.scorer = FakeScorer(self.journal, fails)
        self.tracker = FakeTracker()
        self.saved: list[LoopState] = []
        self.settings = OnlineSettings(
            algorithm=ALGORITHMS[algorithm],
            rollout=RolloutConfig(
                rollout_batch_size=BATCH, n_samples_per_prompt=SAMPLES_EACH, num_episodes=episodes, max_new_tokens=4
            ),
            reward=reward,
            policy=policy,
            batch=batch,
            **({"reference": MovingReferenceConfig(), "optim": OptimConfig()} | more),
        )
        self.stop_after = stop_after
        self.evaluate: Callable[[int, bool], None] = lambda iteration, is_last: None

    def roles(self) -> Roles:
        return Roles(
            self.actor,
            self.critic if self.has_critic else None,
            self.reference,
            self.reward_model,
            self.engines,
            self.scorer,
            self.reference,
        )

    def __call__(self, *, state: LoopState | None = None, total_iterations: int = 4, save_steps: int = -1) -> Finished:
        return train_online(
            self.roles(),
            self.settings,
            prompts=[Prompt([20 + i, 30 + i], f"prompt {i}: ", str(i), "data.jsonl", i) for i in range(NUM_PROMPTS)],
            decode=lambda token_ids: "".join(map(str, token_ids)),
            state=state or first_state(self.settings.policy),
            total_iterations=total_iterations,
            save_steps=save_steps,
            hooks=OnlineHooks(
                self.tracker,
                self.saved.append,
                lambda: self.stop_after is not None and len(self.tracker.logged) >= self.stop_after,
                self.evaluate,
            ),
        )


def test_one_role_after_the_other_is_awake():
    run = Run(policy=WITH_REFERENCE, batch=TWO_STEPS)
    run(total_iterations=1)
    assert run.journal == [
        *("engines.wake_cache", "engines.generate", "engines.sleep"),
        "scorer.score",
        *("ref.wake", "ref.logprobs", "ref.sleep"),
        *("actor.wake", "actor.logprobs", "actor.sleep"),
        *("critic.wake", "critic.values", "critic.sleep"),
        *("critic.wake", "critic.update", "critic.sleep"),
        # The weights alone stay until the engines have them.
        *("actor.wake", "actor.update", "actor.sleep_optimizer", "engines.receive_weights 1", "actor.sleep"),
    ]


def test_a_reward_model_is_awake_between_the_other_rewards_and_the_first_forward_pass():
    run = Run(reward=WITH_REWARD_MODEL)
    run(total_iterations=1)
    assert run.journal[2:7] == ["engines.sleep", "scorer.score", "reward.wake", "reward.scores", "reward.sleep"]
    assert run.journal[7] == "critic.wake"


def test_a_reward_model_adds_its_weighted_score_of_prompt_and_response_and_is_logged_apart():
    run = Run(reward=WITH_REWARD_MODEL)
    run(total_iterations=1)
    metrics, rows = run.tracker.logged[0][1], run.tracker.rows[0][1]
    last_tokens = [float(row["response"][-1]) for row in rows]  # the fake decoder writes one digit a token
    assert [row["reward/reward_model"] for row in rows] == last_tokens
    lengths = [row["length"] for row in rows]
    assert [row["reward"] for row in rows] == [n + 0.5 * last for n, last in zip(lengths, last_tokens, strict=True)]
    assert metrics["reward/reward_model"] == pytest.approx(np.mean(last_tokens))
    samples, _ = run.critic.updates[0]  # gamma and lambda are 1, so a return is the score
    assert [sample.columns["returns"][-1] for sample in samples] == [row["reward"] for row in rows]


def test_phases_follow_each_other_and_do_not_overlap():
    run = Run()
    run(total_iterations=1)
    names = ["generate", "reward", "reward", "forward", "advantage", "train", "transfer"]
    assert run.tracker.phases == [name for phase in names for name in (phase, None)]


@pytest.mark.parametrize(
    ("policy", "batch", "computed", "on_policy"),
    [
        (WITHOUT_REFERENCE, ONE_STEP, False, True),
        (WITHOUT_REFERENCE, TWO_STEPS, True, False),
        (WITHOUT_REFERENCE, BatchConfig(train_batch_size=3), True, False),
        (WITH_REFERENCE, ONE_STEP, True, True),  # the KL divergence needs them
    ],
)
def test_old_logprobs_are_computed_only_where_they_count(policy, batch, computed, on_policy):
    run = Run(policy=policy, batch=batch)
    run(total_iterations=1)
    assert ("actor.logprobs" in run.journal) == computed
    assert run.actor.on_policy == [on_policy]
    samples, _ = run.actor.updates[0]
    assert all(("old_logprobs" in sample.columns) == computed for sample in samples)


def test_exactly_the_sampled_tokens_are_trained_with_the_samplers_logprobs():
    run = Run()
    run(total_iterations=1)
    answers = [run.engines._answer(request) for request in run.engines.requests[0]]
    samples, _ = run.actor.updates[0]
    for request, answer, sample in zip(run.engines.requests[0], answers, samples, strict=True):
        assert sample.sequence.token_ids.tolist() == request.prompt_ids + answer.token_ids
        assert sample.sequence.loss_mask.tolist() == [False] * 2 + [True] * len(answer.token_ids)
        assert sample.columns["rollout_logprobs"].tolist() == answer.logprobs


def test_rewards_see_the_decoded_text_of_prompt_and_response():
    run = Run()
    run(total_iterations=1)
    request, answer = run.engines.requests[0][0], run.tracker.rows[0][1][0]
    number = request.prompt_ids[0] - 20
    assert run.scorer.asked[0][0].query == f"prompt {number}: {answer['response']}"
    assert (run.scorer.asked[0][0].label, answer["reward"]) == (str(number), len(answer["response"]))


def test_sampling_follows_the_settings():
    run = Run()
    run(total_iterations=1)
    assert run.engines.sampling == [SamplingParams(max_new_tokens=4, temperature=1.0, top_p=1.0)]


def test_every_prompt_is_asked_once_an_episode_and_its_samples_are_neighbours():
    run = Run()
    run()
    prompts = [[request.prompt_ids[0] - 20 for request in requests] for requests in run.engines.requests]
    assert all(numbers[0::2] == numbers[1::2] for numbers in prompts)
    assert sorted(prompts[0] + prompts[1]) == sorted(prompts[2] + prompts[3]) == sorted([*range(NUM_PROMPTS)] * 2)
    assert prompts[:2] != prompts[2:]  # the second episode has an order of its own


def test_failed_rewards_are_left_out_of_both_updates():
    run = Run(fails=lambda index: index in (1, 4))
    run(total_iterations=1)
    kept = [request.prompt_ids for i, request in enumerate(run.engines.requests[0]) if i not in (1, 4)]
    for model in (run.actor, run.critic):
        samples, steps = model.updates[0]
        assert [sample.sequence.token_ids[:2].tolist() for sample in samples] == kept
        assert sorted(steps[0]) == [0, 1, 2, 3]
    metrics, rows = run.tracker.logged[0][1], run.tracker.rows[0][1]
    assert metrics["reward_failed"] == pytest.approx(2 / 6)
    assert metrics["reward"] == pytest.approx(np.mean([row["reward"] for row in rows if row["reward"] is not None]))
    assert [row["verdict"] for row in rows].count("failed") == 2


def test_failures_of_graders_and_of_the_reward_model_count_together():
    def run(limit: float) -> Run:
        reward = WITH_REWARD_MODEL.model_copy(update={"reward_max_failures": limit})
        made = Run(reward=reward, fails=lambda index: index in (0, 1))
        assert made.reward_model is not None
        made.reward_model.scores = lambda sequences: [1.0, np.nan, np.nan, 1.0, 1.0, 1.0]  # type: ignore[method-assign]
        return made

    enough = run(0.5)
    enough(total_iterations=1)
    metrics = enough.tracker.logged[0][1]
    assert (metrics["reward/failed_raised"], metrics["reward/failed_bad_result"]) == (2.0, 1.0)
    assert metrics["reward_failed"] == 0.5
    with pytest.raises(
        RunError, match=r"^3 of 6 rewards failed, more than --reward_max_failures 0\.49 allows: grader b"
    ):
        run(0.49)(total_iterations=1)


def test_an_iteration_whose_rewards_all_failed_ends_the_run_before_anything_is_trained():
    run = Run(fails=lambda index: True)
    with pytest.raises(RunError, match=r"iteration 1: every reward failed \(grader broke\)"):
        run()
    assert run.journal[-1] == "scorer.score"


def test_what_was_trained_before_an_iteration_without_rewards_is_saved():
    run = Run()
    run.scorer.fails = lambda index: len(run.tracker.logged) == 2
    with pytest.raises(RunError, match=r"iteration 3: every reward failed"):
        run()
    assert [state.iteration for state in run.saved] == [2]
    assert run.tracker.messages == ["Saved iteration 2: --load_checkpoint continues there"]
    run.scorer.fails = lambda index: False
    run(state=run.saved[0])
    whole = Run()
    whole()
    assert run.tracker.rows == whole.tracker.rows


@pytest.mark.parametrize("role", ["actor", "critic"])
def test_too_many_skipped_steps_end_the_run_after_their_iteration_which_is_saved(role):
    run = Run(batch=TWO_STEPS, optim=OptimConfig(max_skipped_steps=2))
    run.evaluate = lambda iteration, is_last: run.journal.append(f"evaluate {iteration}")
    getattr(run, role).found = {"skipped_in_a_row": 2.0}
    run(total_iterations=1)  # as many as are allowed
    getattr(run, role).found = {"skipped_in_a_row": 3.0}
    message = r"in 3 optimizer steps in a row \(--max_skipped_steps 2\).* --load_checkpoint goes on after iteration 2"
    with pytest.raises(RunError, match=message):
        run(state=LoopState(1, 0.0, 0.0))
    assert [state.iteration for state in run.saved] == [2]
    assert [step for step, _ in run.tracker.logged] == [1, 2]
    assert run.journal[-3:] == ["engines.receive_weights 2", "actor.sleep", "engines.sleep"]


def test_nothing_is_saved_twice_or_of_roles_that_died():
    for save_steps, error in ((1, RunError("too many rewards failed")), (-1, ProcessDied("engine 0 died"))):
        run = Run()
        run.scorer.fails = raise_later(run.tracker, error)
        with pytest.raises(RunError, match=error.args[0]):
            run(save_steps=save_steps)
        assert len(run.saved) == (2 if save_steps == 1 else 0)


def raise_later(tracker: FakeTracker, error: RunError) -> Callable[[int], bool]:
    """A grader that ends the run in its third iteration."""

    def fails(index: int) -> bool:
        if len(tracker.logged) == 2:
            raise error
        return False

    return fails


def test_the_adaptive_coefficient_follows_the_measured_divergence():
    run = Run(policy=ActorCriticPolicyConfig(init_kl_coef=0.1, kl_target=0.5, kl_horizon=100))
    run(total_iterations=2, save_steps=1)
    # The actor is at -1 and the reference at -1.25: 0.25 nats a token, summed over each response.
    lengths = [row["length"] for row in run.tracker.rows[0][1]]
    kl = 0.25 * float(np.mean(lengths))
    assert run.tracker.logged[0][1]["kl"] == pytest.approx(kl)
    error = min(max(kl / 0.5 - 1, -0.2), 0.2)
    assert error != 0
    assert run.saved[0].kl_coef == pytest.approx(0.1 * (1 + error * 6 / 100))
    assert [metrics["kl_coef"] for _, metrics in run.tracker.logged] == pytest.approx([0.1, run.saved[0].kl_coef])


def test_a_coefficient_without_target_is_fixed():
    run = Run(policy=WITH_REFERENCE)
    run(save_steps=1)
    assert {state.kl_coef for state in run.saved} == {0.1}


def test_the_weight_of_the_entropy_follows_every_step_and_goes_on_after_a_resume():
    policy = ActorCriticPolicyConfig(init_kl_coef=0.0, entropy_target=0.2, entropy_delta=1e-3)
    run = Run(policy=policy, batch=TWO_STEPS)
    run(total_iterations=2, save_steps=1)  # the fake actor always measures 0.1 nats
    assert [metrics["entropy_coef"] for _, metrics in run.tracker.logged] == pytest.approx([0.0, 2e-3])
    assert [weights.entropy.coef for weights in run.actor.weights if weights] == pytest.approx([0.0, 2e-3])
    again = Run(policy=policy, batch=TWO_STEPS)
    again(state=LoopState(**json.loads(json.dumps(run.saved[0].plain()))), total_iterations=2)
    assert again.actor.weights == run.actor.weights[1:]
    above = Run(policy=policy, batch=ONE_STEP)
    above.actor.found = {"entropy": 0.3}
    above(total_iterations=1, save_steps=1)
    assert above.saved[0].weights.entropy == EntropyState(0.0, applied=False)


@pytest.mark.parametrize("batch", [ONE_STEP, TWO_STEPS])
def test_a_divergence_in_the_loss_is_measured_there_and_steers_the_coefficient(batch):
    policy = PolicyConfig(init_kl_coef=0.1, use_kl_loss=True, kl_estimator="k3", kl_target=0.5, kl_horizon=100)
    run = Run(policy=policy, batch=batch, algorithm="rloo")
    run.actor.found = {"kl": 5.0}
    run(total_iterations=1, save_steps=1)
    # The reference is asked; the actor itself only where its anchor is needed.
    assert ("actor.logprobs" in run.journal) == (batch is TWO_STEPS)
    samples, _ = run.actor.updates[0]
    assert all((sample.columns["ref_logprobs"] == -1.25).all() for sample in samples)
    assert [weights.kl for weights in run.actor.weights if weights] == [0.1]
    assert run.saved[0].kl_coef == pytest.approx(0.1 * (1 + 0.2 * 6 / 100))
    assert run.tracker.logged[0][1]["kl_coef"] == 0.1
    # Rewards are the lengths, whose difference to the other response of the prompt is all that is left.
    lengths = [row["length"] for row in run.tracker.rows[0][1]]
    leads = [lengths[i] - lengths[i ^ 1] for i in range(6)]
    assert [sample.columns["advantages"][0] for sample in samples] == leads


def test_without_a_critic_none_is_asked_for_anything():
    run = Run(algorithm="rloo")
    run(total_iterations=1)
    assert run.journal == [
        *("engines.wake_cache", "engines.generate", "engines.sleep", "scorer.score"),
        *("actor.wake", "actor.update", "actor.sleep_optimizer", "engines.receive_weights 1", "actor.sleep"),
    ]
    assert run.actor.on_policy == [True]


def test_greedy_responses_are_scored_with_the_others_and_not_trained_on():
    run = Run(algorithm="remax", reward=WITH_REWARD_MODEL)
    run(total_iterations=1)
    assert run.journal[:4] == ["engines.wake_cache", "engines.generate", "engines.generate", "engines.sleep"]
    assert [sampling.greedy for sampling in run.engines.sampling] == [False, True]
    sampled, greedy = run.engines.requests
    assert [request.prompt_ids for request in greedy] == [request.prompt_ids for request in sampled[::2]]
    (asked,) = run.scorer.asked
    assert [request.group_size for request in asked] == [SAMPLES_EACH] * 6 + [1] * 3
    assert len({request.group for request in asked}) == 3 + 3  # a greedy response is compared with no other
    samples, steps = run.actor.updates[0]
    assert [sample.sequence.token_ids[:2].tolist() for sample in samples] == [r.prompt_ids for r in sampled]
    assert sorted(index for step in steps for index in step) == [0, 1, 2, 3, 4, 5]
    metrics, rows = run.tracker.logged[0][1], run.tracker.rows[0][1]
    assert len(rows) == 6
    answers = [run.engines._answer(request) for request in greedy]
    baselines = [len(answer.token_ids) + 0.5 * answer.token_ids[-1] for answer in answers]
    assert metrics["greedy_reward"] == pytest.approx(np.mean(baselines))
    assert metrics["reward"] == pytest.approx(np.mean([row["reward"] for row in rows]))
    expected = [row["reward"] - baselines[i // 2] for i, row in enumerate(rows)]
    assert [sample.columns["advantages"][0] for sample in samples] == pytest.approx(expected)


def test_responses_to_a_prompt_whose_greedy_one_has_no_score_are_left_out():
    run = Run(algorithm="remax", fails=lambda index: index == 7)  # the greedy response to the second prompt
    run(total_iterations=1)
    samples, _ = run.actor.updates[0]
    kept = [request.prompt_ids for i, request in enumerate(run.engines.requests[0]) if i not in (2, 3)]
    assert [sample.sequence.token_ids[:2].tolist() for sample in samples] == kept
    with pytest.raises(RunError, match=r"every reward failed \(grader broke\)"):
        Run(algorithm="remax", fails=lambda index: index >= 6)()


def test_cut_responses_are_left_out_of_both_updates_where_that_is_asked_for():
    run = Run(policy=ActorCriticPolicyConfig(init_kl_coef=0.0, mask_truncated=True))
    run(total_iterations=1)
    rows = run.tracker.rows[0][1]
    whole = [row["length"] for row in rows if row["finish_reason"] == "stop"]
    assert 0 < len(whole) < 6
    for model in (run.actor, run.critic):
        samples, steps = model.updates[0]
        assert [sample.sequence.num_trained for sample in samples] == whole
        assert sorted(steps[0]) == list(range(len(whole)))
    assert run.tracker.logged[0][1]["reward"] == pytest.approx(np.mean([row["reward"] for row in rows]))


def test_an_iteration_whose_responses_were_all_cut_says_what_to_change():
    run = Run(policy=ActorCriticPolicyConfig(init_kl_coef=0.0, mask_truncated=True))
    answer = run.engines._answer
    run.engines._answer = lambda request: dataclasses.replace(answer(request), finish_reason="length")  # type: ignore[method-assign]
    with pytest.raises(RunError, match=r"every response was cut and mask_truncated leaves those out.*max_new_tokens"):
        run()


def test_metrics_of_several_steps_are_means_and_maxima():
    run = Run(batch=BatchConfig(train_batch_size=2))
    run(total_iterations=1)
    metrics = run.tracker.logged[0][1]
    assert (metrics["loss"], metrics["ratio_max"]) == (1.0, 10.0)  # of 0, 1, 2 and 10, 9, 8
    assert (metrics["critic/loss"], metrics["weight_version"]) == (1.0, 1.0)
    assert metrics["num_tokens"] == sum(len(sample.sequence) for sample in run.actor.updates[0][0])


def test_every_step_of_every_epoch_has_its_own_samples():
    run = Run(batch=BatchConfig(train_batch_size=2, max_epochs=3))
    run(total_iterations=2)
    orders = []
    for _, steps in run.actor.updates:
        assert [len(step) for step in steps] == [2] * 9
        epochs = [[*steps[i], *steps[i + 1], *steps[i + 2]] for i in (0, 3, 6)]
        assert all(sorted(epoch) == [0, 1, 2, 3, 4, 5] for epoch in epochs)
        orders += epochs
    assert len({tuple(order) for order in orders}) == 6
    assert [steps for _, steps in run.critic.updates] == [steps for _, steps in run.actor.updates]


def test_the_critic_has_as_many_steps_as_it_is_given_and_the_actor_keeps_its_own():
    run = Run(batch=ActorCriticBatchConfig(train_batch_size=6, max_epochs=2, critic_update_steps=4))
    run(total_iterations=1)
    (_, actor), (_, critic) = run.actor.updates[0], run.critic.updates[0]
    assert [len(step) for step in actor] == [6, 6]
    assert [len(step) for step in critic] == [2, 2, 1, 1] * 2  # of even size where the number divides
    assert [[i for step in half for i in step] for half in (critic[:4], critic[4:])] == actor


def test_more_steps_of_the_critic_than_responses_have_one_each():
    run = Run(batch=ActorCriticBatchConfig(train_batch_size=6, critic_update_steps=12), fails=lambda index: index < 2)
    run(total_iterations=1)
    assert [len(step) for step in run.critic.updates[0][1]] == [1, 1, 1, 1]


def test_the_critic_is_trained_alone_at_first_and_the_engines_get_the_same_weights_again():
    run = Run(batch=ActorCriticBatchConfig(train_batch_size=6, freezing_actor_steps=2))
    run(total_iterations=3)
    assert (len(run.critic.updates), len(run.actor.updates)) == (3, 1)
    assert [call for call in run.journal if call.startswith("engines.receive")] == [
        f"engines.receive_weights {iteration}" for iteration in (1, 2, 3)
    ]  # those that slept have lost the weights they had
    assert "loss" not in run.tracker.logged[0][1]
    assert "critic/loss" in run.tracker.logged[0][1]


def test_steps_of_a_whole_run_are_counted_for_both():
    batch = ActorCriticBatchConfig(train_batch_size=128 * 64, critic_update_steps=12, freezing_actor_steps=3)
    assert count_steps(128 * 64, batch, iterations=10) == StepCounts(actor=7, critic=120)
    assert count_steps(128 * 64, batch, iterations=3).actor == 0
    assert count_steps(10, BatchConfig(train_batch_size=4, max_epochs=2), iterations=5) == StepCounts(30, 30)


def test_the_reference_moves_when_it_is_due_and_the_actor_rests():
    run = Run(policy=WITH_REFERENCE, reference=MovingReferenceConfig(ref_sync_steps=2), episodes=3)
    run(total_iterations=5)
    moves = [number for number, call in enumerate(run.journal) if call == "ref.move"]
    assert [run.journal[number - 3 : number + 2] for number in moves] == [
        [f"engines.receive_weights {iteration}", "actor.sleep", "ref.wake", "ref.move", "ref.sleep"]
        for iteration in (2, 4)
    ]


def test_the_critic_is_asked_for_the_last_state_of_cut_responses_alone():
    plain, run = Run(), Run(policy=ActorCriticPolicyConfig(init_kl_coef=0.0, bootstrap_truncated=True))
    plain(total_iterations=1)
    run(total_iterations=1)
    cut = [row["finish_reason"] == "length" for row in run.tracker.rows[0][1]]
    assert any(cut)
    assert not all(cut)
    for is_cut, before, sample in zip(cut, plain.critic.updates[0][0], run.critic.updates[0][0], strict=True):
        # The fake critic says 0, .1, .2, .3 and, of the state after four tokens, .4; gamma and lambda are 1.
        more = 0.4 if is_cut else 0.0
        assert sample.columns["returns"].tolist() == pytest.approx((before.columns["returns"] + more).tolist())
        assert sample.sequence.num_trained == len(sample.columns["old_values"])


def test_a_prompt_is_expected_to_get_responses_as_long_as_last_time_or_as_those_of_its_source():
    run = Run(stop_after=3)
    run()
    asked = [
        [(request.prompt_ids[0] - 20, request.expected_tokens) for request in batch] for batch in run.engines.requests
    ]
    lengths = [[row["length"] for row in rows] for _, rows in run.tracker.rows]
    own = {
        prompt: round(np.mean(lengths[i][j : j + 2]))
        for i in (0, 1)
        for j, (prompt, _) in enumerate(asked[i])
        if j % 2 == 0
    }
    assert {expected for _, expected in asked[0]} == {0}
    assert {expected for _, expected in asked[1]} == {round(np.mean(lengths[0]))}  # never asked before
    assert asked[2] == [(prompt, own[prompt]) for prompt, _ in asked[2]]
    assert len(set(own.values())) > 1
    assert sum(len(of_source) for of_source in run.saved[-1].prompt_lengths.values()) == NUM_PROMPTS


def test_a_run_of_one_episode_keeps_no_lengths_of_prompts():
    run = Run(episodes=1, stop_after=1)
    run()
    assert run.saved[-1].lengths
    assert not run.saved[-1].prompt_lengths


def test_no_two_requests_of_a_run_share_a_seed():
    seeds = {request_seed(42, place, sample, num_samples=8) for place in range(200 * 128) for sample in range(8)}
    assert len(seeds) == 200 * 1024
    assert min(seeds) >= 0
    assert max(seeds) < 2**31


def test_runs_of_other_seeds_ask_with_other_seeds():
    first, second = Run(), Run(batch=BatchConfig(train_batch_size=6, seed=43))
    first(total_iterations=1)
    second(total_iterations=1)
    seeds = [{request.seed for request in run.engines.requests[0]} for run in (first, second)]
    assert not seeds[0] & seeds[1]


def test_a_stop_saves_after_the_iteration_and_ends():
    run = Run(stop_after=2)
    assert run() == Finished(2, interrupted=True)
    assert [state.iteration for state in run.saved] == [2]
    assert run.journal[-1] == "actor.sleep"


def test_a_stop_in_the_last_iteration_is_the_end():
    run = Run(stop_after=4)
    assert run() == Finished(4, interrupted=False)
    assert run.saved == []


def test_a_stop_in_an_iteration_that_is_saved_anyway_saves_once():
    run = Run(stop_after=2)
    run(save_steps=2)
    assert [state.iteration for state in run.saved] == [2]


@pytest.mark.parametrize(("save_steps", "saved"), [(-1, []), (1, [1, 2, 3, 4]), (3, [3, 4]), (9, [4])])
def test_checkpoints_are_written_when_due_and_at_the_end(save_steps, saved):
    run = Run()
    run(save_steps=save_steps)
    assert [state.iteration for state in run.saved] == saved


@pytest.mark.parametrize("policy", [WITHOUT_REFERENCE, ActorCriticPolicyConfig(init_kl_coef=0.1, kl_target=0.5)])
def test_a_resumed_run_repeats_requests_steps_and_coefficients(policy):
    whole, first = Run(policy=policy, batch=TWO_STEPS), Run(policy=policy, batch=TWO_STEPS, stop_after=2)
    whole()
    first()
    state = LoopState(**json.loads(json.dumps(first.saved[-1].plain())))  # as it goes through a checkpoint
    second = Run(policy=policy, batch=TWO_STEPS)
    second(state=state)
    assert first.engines.requests + second.engines.requests == whole.engines.requests
    assert [steps for run in (first, second) for _, steps in run.actor.updates] == [
        steps for _, steps in whole.actor.updates
    ]
    both = first.tracker.logged + second.tracker.logged
    assert both == whole.tracker.logged
    assert second.journal[-2] == "engines.receive_weights 4"


def test_a_finished_run_that_is_resumed_does_nothing():
    run = Run()
    assert run(state=LoopState(4, 0.0, 0.0)) == Finished(4, interrupted=False)
    assert run.journal == []


def test_after_a_failure_no_role_is_asked_for_anything():
    """Ranks that wait for one that died would never answer, and the run would hang instead of ending."""
    run = Run()
    run.critic.error = RunError("critic rank 0 died")
    with pytest.raises(RunError, match="critic rank 0 died"):
        run()
    assert run.journal[-1] == "critic.update"
