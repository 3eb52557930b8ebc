"""The one online loop: sample, score, evaluate, update, push weights.

Everything heavy arrives built, so the loop runs in milliseconds with fakes. What differs between algorithms is in
their table row (algorithms.table); how work reaches ranks and engines is the roles' business.
"""

import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from rlhf_cli.algorithms.kl import next_kl_coef
from rlhf_cli.algorithms.table import Algorithm
from rlhf_cli.config.online import OnlineRewardConfig, PolicyConfig, RolloutConfig
from rlhf_cli.config.train import BatchConfig
from rlhf_cli.data import packing
from rlhf_cli.data.prompts import Prompt
from rlhf_cli.data.rollouts import Generation, GenerationRequest, SamplingParams, scattered_seed
from rlhf_cli.data.samples import Sample
from rlhf_cli.data.sampling import StepBatches
from rlhf_cli.errors import RunError
from rlhf_cli.rewards.model_scores import with_model_scores
from rlhf_cli.rewards.records import Score, ScoreRequest
from rlhf_cli.tracking.phases import PhaseTimer
from rlhf_cli.trainers.loop import Finished, is_due
from rlhf_cli.trainers.rl_batch import (
    Evaluated,
    Rollouts,
    as_sequence,
    learning_samples,
    rollout_metrics,
    sample_rows,
    score_requests,
    scored_rollouts,
)


class Sleeper(Protocol):
    """Something that shares an accelerator and takes turns on it; a role with one to itself does nothing here."""

    def wake(self) -> None: ...

    def sleep(self) -> None: ...


class Reference(Sleeper, Protocol):
    """The frozen policy that the KL divergence is measured from."""

    def logprobs(self, sequences: Sequence[packing.Sequence]) -> list[np.ndarray]: ...


class Actor(Reference, Protocol):
    """The policy in training."""

    def sleep_optimizer(self) -> None:
        """Keep the weights alone on the accelerator."""

    def update(
        self, samples: Sequence[Sample], steps: Sequence[np.ndarray], *, on_policy: bool
    ) -> list[dict[str, float]]: ...


class Critic(Sleeper, Protocol):
    """The value model in training."""

    def values(self, sequences: Sequence[packing.Sequence]) -> list[np.ndarray]: ...

    def update(self, samples: Sequence[Sample], steps: Sequence[np.ndarray]) -> list[dict[str, float]]: ...


class RewardModel(Sleeper, Protocol):
    """The frozen model that scores whole responses."""

    def scores(self, sequences: Sequence[packing.Sequence]) -> list[float]: ...


class Engines(Protocol):
    """All rollout engines."""

    def generate(self, requests: list[GenerationRequest], sampling: SamplingParams) -> list[Generation]: ...

    def wake_cache(self) -> None:
        """Be ready to generate, after the weights are there."""

    def sleep(self) -> None: ...

    def receive_weights(self, version: int) -> dict[str, float]:
        """Take the actor's present weights; metrics of the transfer."""


class Scoring(Protocol):
    """What turns responses into scores."""

    def score(self, requests: list[ScoreRequest]) -> list[Score]: ...


class RunTracker(Protocol):
    """What the loop reports to."""

    def log(self, step: int, metrics: dict[str, float], phases: dict[str, float]) -> None: ...

    def samples(self, step: int, rows: list[dict[str, Any]]) -> None: ...

    @property
    def phase(self) -> Callable[[str | None], None]: ...


@dataclass(frozen=True)
class Roles:
    """Everything heavy that takes part."""

    actor: Actor
    critic: Critic | None
    reference: Reference | None
    reward_model: RewardModel | None
    engines: Engines
    scorer: Scoring


@dataclass(frozen=True)
class OnlineSettings:
    """The settings the loop itself reads."""

    algorithm: Algorithm
    rollout: RolloutConfig
    reward: OnlineRewardConfig
    policy: PolicyConfig
    batch: BatchConfig

    @property
    def sampling(self) -> SamplingParams:
        """How responses are sampled for training."""
        rollout = self.rollout
        return SamplingParams(rollout.max_new_tokens, temperature=rollout.temperature, top_p=rollout.top_p)


@dataclass(frozen=True)
class LoopState:
    """What the loop carries from one iteration to the next besides the models."""

    iteration: int
    kl_coef: float


@dataclass(frozen=True)
class OnlineHooks:
    """What the loop calls besides the roles."""

    tracker: RunTracker
    save_checkpoint: Callable[[LoopState], None]
    should_stop: Callable[[], bool]


def prompt_batches(num_prompts: int, settings: OnlineSettings) -> StepBatches:
    """Indices of the prompts of every iteration."""
    rollout = settings.rollout
    return StepBatches(
        num_prompts, batch_size=rollout.rollout_batch_size, epochs=rollout.num_episodes, seed=settings.batch.seed
    )


def train_online(
    roles: Roles,
    settings: OnlineSettings,
    *,
    prompts: Sequence[Prompt],
    decode: Callable[[Sequence[int]], str],
    state: LoopState,
    total_iterations: int,
    save_steps: int,
    hooks: OnlineHooks,
) -> Finished:
    """Train from the iteration after `state` to the last, or until `hooks.should_stop` says so."""
    batches = prompt_batches(len(prompts), settings)
    while state.iteration < total_iterations:
        chosen = [prompts[i] for i in batches[state.iteration]]
        state = _iterate(roles, settings, prompts=chosen, decode=decode, state=state, tracker=hooks.tracker)
        is_last = state.iteration == total_iterations
        stop = hooks.should_stop() and not is_last
        if stop or (save_steps > 0 and is_due(state.iteration, save_steps, total_iterations)):
            hooks.save_checkpoint(state)
        if stop:
            return Finished(state.iteration, interrupted=True)
    return Finished(state.iteration, interrupted=False)


def _iterate(
    roles: Roles,
    settings: OnlineSettings,
    *,
    prompts: Sequence[Prompt],
    decode: Callable[[Sequence[int]], str],
    state: LoopState,
    tracker: RunTracker,
) -> LoopState:
    """One iteration; the order of sleeping and waking keeps the memory peak of shared accelerators low."""
    iteration = state.iteration + 1
    timer = PhaseTimer(on_change=tracker.phase)
    asked = [prompt for prompt in prompts for _ in range(settings.rollout.n_samples_per_prompt)]
    with timer("generate"):
        roles.engines.wake_cache()
        requests = [
            GenerationRequest(prompt.prompt_ids, request_seed(settings, iteration, number))
            for number, prompt in enumerate(asked)
        ]
        generations = roles.engines.generate(requests, settings.sampling)
        roles.engines.sleep()
    with timer("reward"):
        questions = score_requests(asked, generations, decode)
        scores = _scores(roles, settings.reward, asked=asked, generations=generations, questions=questions)
        rollouts = scored_rollouts(asked, generations, scores)
        if not len(rollouts):
            raise RunError(f"iteration {iteration}: every reward failed ({scores[0].detail}), nothing can be learned")
    steps = update_steps(len(rollouts), settings.batch, iteration=iteration)
    on_policy = len(steps) == 1
    with timer("forward"):
        evaluated = _evaluate(roles, rollouts, needs_old=not on_policy)
    with timer("advantage"):
        samples, metrics = learning_samples(
            rollouts,
            evaluated,
            algorithm=settings.algorithm,
            policy=settings.policy,
            reward=settings.reward,
            kl_coef=state.kl_coef,
        )
    with timer("train"):
        metrics |= _update(roles, samples, steps, on_policy=on_policy)
    with timer("transfer"):
        roles.actor.sleep_optimizer()
        metrics |= roles.engines.receive_weights(iteration)
        roles.actor.sleep()
    metrics |= rollout_metrics(generations, scores)
    metrics["num_tokens"] = float(sum(len(sequence) for sequence in rollouts.sequences))
    tracker.log(iteration, metrics, timer.take())
    tracker.samples(iteration, sample_rows(questions, generations, scores))
    return LoopState(iteration, _next_kl_coef(settings, metrics, state=state, num_sequences=len(rollouts)))


def _scores(
    roles: Roles,
    reward: OnlineRewardConfig,
    *,
    asked: Sequence[Prompt],
    generations: Sequence[Generation],
    questions: list[ScoreRequest],
) -> list[Score]:
    """The score of each response from all rewards; the reward model reads up to its last token, also of cut ones."""
    scores = roles.scorer.score(questions)
    if roles.reward_model is None:
        return scores
    pairs = zip(asked, generations, strict=True)
    sequences = [as_sequence(prompt.prompt_ids, generation.token_ids) for prompt, generation in pairs]
    with awake(roles.reward_model):
        values = roles.reward_model.scores(sequences)
    return with_model_scores(scores, values, weight=reward.reward_model_weight, max_failures=reward.reward_max_failures)


def _evaluate(roles: Roles, rollouts: Rollouts, *, needs_old: bool) -> Evaluated:
    """Log-probs and values under the models as they are before the update."""
    ref = old = values = None
    if roles.reference is not None:
        with awake(roles.reference):
            ref = roles.reference.logprobs(rollouts.sequences)
    if needs_old or ref is not None:
        with awake(roles.actor):
            old = roles.actor.logprobs(rollouts.sequences)
    if roles.critic is not None:
        with awake(roles.critic):
            values = roles.critic.values(rollouts.sequences)
    return Evaluated(old_logprobs=old, ref_logprobs=ref, values=values)


def _update(
    roles: Roles, samples: Sequence[Sample], steps: Sequence[np.ndarray], *, on_policy: bool
) -> dict[str, float]:
    """Metrics of both updates; the actor stays awake, for its weights go to the engines next."""
    metrics: dict[str, float] = {}
    if roles.critic is not None:
        with awake(roles.critic):
            metrics |= _mean(roles.critic.update(samples, steps), prefix="critic/")
    roles.actor.wake()
    return metrics | _mean(roles.actor.update(samples, steps, on_policy=on_policy), prefix="")


@contextmanager
def awake(role: Sleeper) -> Iterator[None]:
    """Hold a role on its accelerator for the block.

    After a failure it is left alone: ranks that wait for one that died would never come to answer.
    """
    role.wake()
    yield
    role.sleep()


def _mean(steps: Sequence[dict[str, float]], *, prefix: str) -> dict[str, float]:
    """Metrics over the optimizer steps of an iteration: means, and maxima of names that end in `_max`."""
    names = steps[0].keys()
    merge = {name: np.max if name.endswith("_max") else np.mean for name in names}
    return {prefix + name: float(merge[name]([step[name] for step in steps])) for name in names}


def _next_kl_coef(
    settings: OnlineSettings, metrics: dict[str, float], *, state: LoopState, num_sequences: int
) -> float:
    if "kl" not in metrics:
        return state.kl_coef
    policy = settings.policy
    return next_kl_coef(
        state.kl_coef,
        kl=metrics["kl"],
        target=policy.kl_target,
        horizon=policy.kl_horizon,
        num_sequences=num_sequences,
    )


def request_seed(settings: OnlineSettings, iteration: int, number: int) -> int:
    """The seed of one request; requests are counted through the run."""
    per_iteration = settings.rollout.rollout_batch_size * settings.rollout.n_samples_per_prompt
    return scattered_seed(settings.batch.seed, iteration * per_iteration + number)


def update_steps(num_samples: int, batch: BatchConfig, *, iteration: int) -> list[np.ndarray]:
    """Sample indices of every optimizer step of an iteration, each epoch in an order of its own."""
    steps = StepBatches(
        num_samples,
        batch_size=batch.train_batch_size,
        epochs=batch.max_epochs,
        seed=zlib.crc32(f"{batch.seed}/{iteration}".encode()),
    )
    return list(steps)
