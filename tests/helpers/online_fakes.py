"""Online loop with fake models, engines, rewards and tracker, which record their calls."""

from collections.abc import Callable, Sequence
from typing import Any, Literal

import numpy as np
from online_settings import reference_terms

from rlhf_cli.algorithms.estimators.gae import ActorCriticPolicyConfig
from rlhf_cli.algorithms.estimators.table import ESTIMATORS
from rlhf_cli.algorithms.objective import LossWeights
from rlhf_cli.config.model import ReferenceConfig
from rlhf_cli.config.policy import PolicyConfig
from rlhf_cli.config.roles import CriticConfig
from rlhf_cli.config.rollout import RolloutConfig
from rlhf_cli.config.scoring import RewardConfig
from rlhf_cli.config.train import BatchConfig, OptimConfig
from rlhf_cli.data.packing import packs as packing
from rlhf_cli.data.prompts import Prompt
from rlhf_cli.data.rollouts import Generation, GenerationRequest, SamplingParams
from rlhf_cli.rewards.records import Score, ScoreRequest
from rlhf_cli.trainers.offline.loop import Finished
from rlhf_cli.trainers.online.interfaces import Roles
from rlhf_cli.trainers.online.lent_actor import LentActor
from rlhf_cli.trainers.online.loop import OnlineHooks, train_online
from rlhf_cli.trainers.online.prompt_source import RolloutSource
from rlhf_cli.trainers.online.samples import Sample
from rlhf_cli.trainers.online.state import LoopState, OnlineSettings, first_state

NUM_PROMPTS, BATCH, SAMPLES_EACH = 6, 3, 2
PROMPTS = [Prompt([20 + i, 30 + i], f"prompt {i}: ", str(i), "data.jsonl", i) for i in range(NUM_PROMPTS)]
WITHOUT_REFERENCE, WITH_REFERENCE = ActorCriticPolicyConfig(init_kl_coef=0.0), ActorCriticPolicyConfig(init_kl_coef=0.1)
ONE_STEP = BatchConfig(train_batch_size=BATCH * SAMPLES_EACH)
FAILED = Score(None, "failed", "grader broke", failure="raised")
EXACT = RewardConfig(reward_funcs=["exact"], reward_max_failures=1.0)


class FakeModel:
    """Fake model for any role: records calls, and returns numbers that depend only on the tokens."""

    def __init__(self, name: str, journal: list[str], *, level: float = 0.0) -> None:
        self.name, self.journal, self.level = name, journal, level
        self.updates: list[tuple[list[packing.TokenSequence], list[list[int]]]] = []
        self.on_policy: list[bool] = []
        self.weights: list[LossWeights | None] = []
        self.found: dict[str, float] = {}  # additional metrics per update step
        self.error: Exception | None = None

    def _note(self, what: str) -> None:
        self.journal.append(f"{self.name}.{what}")

    def wake_weights(self) -> None:
        self._note("wake_weights")

    def sleep(self) -> None:
        self._note("sleep")

    def move(self) -> None:
        self._note("move")

    def logprobs(self, sequences: Sequence[packing.TokenSequence]) -> list[np.ndarray]:
        self._note("logprobs")
        return [np.full(sequence.num_trained, self.level, np.float32) for sequence in sequences]

    def values(self, sequences: Sequence[packing.TokenSequence]) -> list[np.ndarray]:
        self._note("values")
        return [np.arange(sequence.num_trained, dtype=np.float32) / 10 for sequence in sequences]

    def scores(self, sequences: Sequence[packing.TokenSequence]) -> list[float]:
        self._note("scores")
        return [float(sequence.token_ids[-1]) for sequence in sequences]

    def update(
        self,
        samples: Sequence[packing.TokenSequence],
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


class FakeSteps:
    """Finds a step at each token, with a tenth of its ID as reward."""

    def __init__(self, journal: list[str]) -> None:
        self.journal = journal

    def rewards(self, samples: Sequence[Sample]) -> list[np.ndarray]:
        self.journal.append("steps.rewards")
        return [np.array(sample.response.token_ids, np.float32) / 10 for sample in samples]


class FakeEngines:
    """Answers requests with tokens sampled from the seed, one to `longest`."""

    def __init__(self, journal: list[str]) -> None:
        self.journal = journal
        self.requests: list[list[GenerationRequest]] = []
        self.sampling: list[SamplingParams] = []
        self.arrives: Callable[[int, Generation], float] = lambda number, response: number  # the lowest comes first
        self.limits: list[int] = []
        self.longest = 4
        self._left: list[tuple[int, Generation]] = []
        self.version = 0

    def begin(self, requests: list[GenerationRequest], sampling: SamplingParams) -> None:
        self.journal.append("engines.generate")
        self.requests.append(requests)
        self.sampling.append(sampling)
        self._left = sorted(enumerate(map(self._answer, requests)), key=lambda one: self.arrives(*one))

    @property
    def is_generating(self) -> bool:
        return bool(self._left)

    async def collect(self, timeout: float | None = None) -> list[tuple[int, Generation]]:
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
    """Scores a response by its length; `fails` selects responses that cannot be scored."""

    def __init__(self, journal: list[str], fails: Callable[[int], bool]) -> None:
        self.journal, self.fails = journal, fails
        self.asked: list[list[ScoreRequest]] = []
        self.num_open = 0  # sessions

    def session(self) -> "FakeSession":
        return FakeSession(self)

    def judge(self, request: ScoreRequest) -> Score:
        return Score(float(len(request.response)), "scored")


class FakeSession:
    """Scores are ready immediately."""

    def __init__(self, scorer: FakeScorer) -> None:
        self.scorer = scorer
        self.requests: list[ScoreRequest] = []
        self.reported = 0

    def __enter__(self) -> "FakeSession":
        self.scorer.num_open += 1
        return self

    def __exit__(self, *failure: object) -> None:
        self.scorer.num_open -= 1

    def add(self, requests: Sequence[ScoreRequest]) -> range:
        self.requests += requests
        return range(len(self.requests) - len(requests), len(self.requests))

    def ready(self) -> list[tuple[int, Score]]:
        first, self.reported = self.reported, len(self.requests)
        return [(number, self.scorer.judge(self.requests[number])) for number in range(first, self.reported)]

    async def finish(self, *, is_all: bool = False) -> dict[int, Score]:
        scorer, numbers = self.scorer, sorted(range(len(self.requests)), key=self._order)
        scorer.journal.append("scorer.score")
        scorer.asked.append([self.requests[number] for number in numbers])
        found = {
            number: FAILED if scorer.fails(place) else scorer.judge(self.requests[number])
            for place, number in enumerate(numbers)
        }
        return found

    def _order(self, number: int) -> tuple[bool, int, int]:
        """Order by prompt, then sample; greedy responses come last."""
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
    """A run with fakes. A stop is requested during iteration `stop_after`."""

    def __init__(
        self,
        *,
        policy: PolicyConfig = WITHOUT_REFERENCE,
        batch: BatchConfig = ONE_STEP,
        episodes: int = 2,
        fails: Callable[[int], bool] = lambda index: False,
        stop_after: int | None = None,
        reward: RewardConfig = EXACT,
        algorithm: str = "ppo",
        **more: Any,
    ) -> None:
        self.journal: list[str] = []
        self.prompts = PROMPTS
        self.actor = FakeModel("actor", self.journal, level=-1.0)
        self.critic = FakeModel("critic", self.journal)
        self.has_critic = ESTIMATORS[algorithm].critic
        self.reference = FakeModel("ref", self.journal, level=-1.25) if policy.init_kl_coef else None
        self.reward_model = FakeModel("reward", self.journal) if reward.reward_pretrain else None
        self.teacher = FakeModel("teacher", self.journal, level=-0.75) if more.get("distill_coef") else None
        self.steps = FakeSteps(self.journal) if "step_weight" in more else None
        self.engines = FakeEngines(self.journal)
        self.scorer = FakeScorer(self.journal, fails)
        self.tracker = FakeTracker()
        self.saved: list[LoopState] = []
        self.settings = OnlineSettings(
            estimator=ESTIMATORS[algorithm],
            rollout=RolloutConfig(
                rollout_batch_size=BATCH, n_samples_per_prompt=SAMPLES_EACH, num_episodes=episodes, max_new_tokens=4
            ),
            reward=reward,
            policy=policy,
            batch=batch,
            kl_terms=reference_terms(policy),
            **({"critic": CriticConfig(), "reference": ReferenceConfig(), "optim": OptimConfig()} | more),
        )
        self.stop_after = stop_after
        self.evaluate: Callable[[int, bool], None] = lambda iteration, is_last: None
        self.evaluation_is_due: Callable[[int, bool], bool] = lambda iteration, is_last: False
        self.lent_actor = LentActor()

    def roles(self) -> Roles:
        return Roles(
            actor=self.actor,
            engines=self.engines,
            scorer=self.scorer,
            critic=self.critic if self.has_critic else None,
            frozen_policies={
                role: model for role, model in (("ref", self.reference), ("teacher", self.teacher)) if model
            },
            reward_model=self.reward_model,
            move_reference=self._move_reference,
            steps=self.steps,
            lent_actor=self.lent_actor,
        )

    def _move_reference(self) -> None:
        assert self.reference is not None
        self.reference.move()

    def __call__(self, *, state: LoopState | None = None, total_iterations: int = 4, save_steps: int = -1) -> Finished:
        self.lent_actor = LentActor()  # that of a finished run refuses loans
        return train_online(
            self.roles(),
            RolloutSource(
                self.engines,
                self.scorer,
                self.settings,
                self.prompts,
                lambda token_ids: "".join(map(str, token_ids)),
                self.tracker.message,
            ),
            state=state or first_state(self.settings.policy),
            total_iterations=total_iterations,
            save_steps=save_steps,
            hooks=OnlineHooks(
                self.tracker,
                self.saved.append,
                lambda: self.stop_after is not None and len(self.tracker.logged) >= self.stop_after,
                self.evaluate,
                self.evaluation_is_due,
            ),
        )
