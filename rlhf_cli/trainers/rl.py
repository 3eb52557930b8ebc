"""The one online loop: sample, score, evaluate, update, push weights.

Everything heavy arrives built, so the loop runs in milliseconds with fakes. What differs between algorithms is in
their table row (algorithms.table); how work reaches ranks and engines is the roles' business.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np

from rlhf_cli.algorithms.entropy import EntropyState
from rlhf_cli.algorithms.kl import next_kl_coef
from rlhf_cli.algorithms.objective import LossWeights, next_weights
from rlhf_cli.algorithms.table import Algorithm
from rlhf_cli.config.online import OnlineRewardConfig, RolloutConfig
from rlhf_cli.config.policy import ActorCriticPolicyConfig, PolicyConfig
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
    greedy_metrics,
    learning_samples,
    rollout_metrics,
    sample_rows,
    score_requests,
    scored_rollouts,
    split_last_values,
    with_greedy,
    with_last_states,
)
from rlhf_cli.trainers.update_plan import UpdatePlan, plan_updates


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
        self, samples: Sequence[Sample], steps: Sequence[np.ndarray], *, on_policy: bool, weights: LossWeights
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

    @property
    def needs_old(self) -> bool:
        """Whether the policy's own log-probs are needed whatever the steps are: for the KL divergence in the reward."""
        return self.policy.init_kl_coef > 0 and not self.policy.use_kl_loss

    @property
    def bootstraps(self) -> bool:
        """Whether the critic is asked what the states are worth in which responses were cut."""
        return isinstance(self.policy, ActorCriticPolicyConfig) and self.policy.bootstrap_truncated


@dataclass(frozen=True)
class LoopState:
    """What the loop carries from one iteration to the next besides the models."""

    iteration: int
    kl_coef: float
    entropy_coef: float
    entropy_applied: bool = True

    @property
    def weights(self) -> LossWeights:
        """What controllers weigh the terms of the actor's loss with."""
        return LossWeights(kl=self.kl_coef, entropy=EntropyState(self.entropy_coef, self.entropy_applied))


def first_state(policy: PolicyConfig) -> LoopState:
    """Where a run starts."""
    return LoopState(iteration=0, kl_coef=policy.init_kl_coef, entropy_coef=policy.entropy_loss_coef)


@dataclass(frozen=True)
class OnlineHooks:
    """What the loop calls besides the roles."""

    tracker: RunTracker
    save_checkpoint: Callable[[LoopState], None]
    should_stop: Callable[[], bool]
    evaluate: Callable[[int, bool], None] = lambda iteration, is_last: None


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
    hooks.evaluate(state.iteration, state.iteration >= total_iterations)
    while state.iteration < total_iterations:
        chosen = [prompts[i] for i in batches[state.iteration]]
        state = _iterate(roles, settings, prompts=chosen, decode=decode, state=state, tracker=hooks.tracker)
        is_last = state.iteration == total_iterations
        hooks.evaluate(state.iteration, is_last)
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
    iteration, policy = state.iteration + 1, settings.policy
    timer = PhaseTimer(on_change=tracker.phase)
    with timer("generate"):
        asked, generations = _generate(roles, settings, prompts=prompts, iteration=iteration)
    with timer("reward"):
        questions = score_requests(asked, generations, decode)
        scores = _scores(roles, settings.reward, asked=asked, generations=generations, questions=questions)
        sampled = len(prompts) * settings.rollout.n_samples_per_prompt
        rollouts, greedy = _scored(settings, asked, generations, scores, sampled=sampled, iteration=iteration)
    plan = _plan(settings, rollouts, iteration=iteration)
    with timer("forward"):
        evaluated = _evaluate(roles, settings, rollouts, needs_old=not plan.on_policy or settings.needs_old)
    with timer("advantage"):
        samples, metrics = learning_samples(
            rollouts,
            evaluated,
            greedy=greedy,
            algorithm=settings.algorithm,
            policy=policy,
            reward=settings.reward,
            kl_coef=state.kl_coef,
            max_new_tokens=settings.rollout.max_new_tokens,
        )
    with timer("train"):
        updates = _update(roles, samples, plan, weights=state.weights)
        metrics |= updates.metrics
    if plan.actor:
        with timer("transfer"):
            roles.actor.sleep_optimizer()
            metrics |= roles.engines.receive_weights(iteration)
            roles.actor.sleep()
    metrics |= rollout_metrics(generations[:sampled], scores[:sampled]) | greedy_metrics(greedy)
    metrics["num_tokens"] = float(sum(len(sequence) for sequence in rollouts.sequences))
    after = _next_state(settings, metrics, updates, state=state, num_sequences=len(rollouts))
    tracker.log(iteration, metrics | controlled(policy, state, metrics), timer.take())
    tracker.samples(iteration, sample_rows(questions[:sampled], generations[:sampled], scores[:sampled]))
    return after


def _plan(settings: OnlineSettings, rollouts: Rollouts, *, iteration: int) -> UpdatePlan:
    """The optimizer steps over the responses that are trained on; groups stay whole where they are compared."""
    trained_B = rollouts.trained_B(settings.policy)
    groups_B = rollouts.groups_B[trained_B].numpy() if settings.algorithm.min_group > 1 else None
    return plan_updates(int(trained_B.sum()), settings.batch, iteration=iteration, groups_B=groups_B)


def _generate(
    roles: Roles, settings: OnlineSettings, *, prompts: Sequence[Prompt], iteration: int
) -> tuple[list[Prompt], list[Generation]]:
    """(prompt of each response, responses): the sampled ones, neighbours where the prompt is the same; behind them a
    greedy one for each prompt, where the algorithm compares with it."""
    asked = [prompt for prompt in prompts for _ in range(settings.rollout.n_samples_per_prompt)]
    requests = [
        GenerationRequest(prompt.prompt_ids, request_seed(settings, iteration, number))
        for number, prompt in enumerate(asked)
    ]
    roles.engines.wake_cache()
    generations = roles.engines.generate(requests, settings.sampling)
    if settings.algorithm.greedy:
        likeliest = [GenerationRequest(prompt.prompt_ids, seed=0) for prompt in prompts]
        generations = generations + roles.engines.generate(likeliest, replace(settings.sampling, greedy=True))
        asked += prompts
    roles.engines.sleep()
    return asked, generations


def _scored(
    settings: OnlineSettings,
    asked: Sequence[Prompt],
    generations: Sequence[Generation],
    scores: Sequence[Score],
    *,
    sampled: int,
    iteration: int,
) -> tuple[Rollouts, Rollouts | None]:
    """(those of the first `sampled` responses that can be learned from, the greedy ones they are compared with).

    RunError if there is nothing to learn from.
    """
    rollouts, greedy = scored_rollouts(asked[:sampled], generations[:sampled], scores[:sampled]), None
    if settings.algorithm.greedy:
        greedy = scored_rollouts(asked[sampled:], generations[sampled:], scores[sampled:])
        rollouts = with_greedy(rollouts, greedy)
    if not len(rollouts):
        reason = next(score.detail for score in scores if score.value is None)
        raise RunError(f"iteration {iteration}: every reward failed ({reason}), nothing can be learned")
    if not rollouts.trained_B(settings.policy).any():
        raise RunError(
            f"iteration {iteration}: every response was cut and mask_truncated leaves those out, nothing can be "
            "learned: raise max_new_tokens"
        )
    return rollouts, greedy


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


def _evaluate(roles: Roles, settings: OnlineSettings, rollouts: Rollouts, *, needs_old: bool) -> Evaluated:
    """Log-probs and values under the models as they are before the update."""
    ref = old = values = bootstrap_B = None
    if roles.reference is not None:
        with awake(roles.reference):
            ref = roles.reference.logprobs(rollouts.sequences)
    if needs_old:
        with awake(roles.actor):
            old = roles.actor.logprobs(rollouts.sequences)
    if roles.critic is not None:
        with awake(roles.critic):
            values = roles.critic.values(with_last_states(rollouts) if settings.bootstraps else rollouts.sequences)
        if settings.bootstraps:
            values, bootstrap_B = split_last_values(values, rollouts.truncated_B)
    return Evaluated(old_logprobs=old, ref_logprobs=ref, values=values, bootstrap_B=bootstrap_B)


@dataclass(frozen=True)
class _Updates:
    """What both updates reported: metrics over the iteration, and of the actor by optimizer step."""

    metrics: dict[str, float]
    of_actor: list[dict[str, float]]


def _update(roles: Roles, samples: Sequence[Sample], plan: UpdatePlan, *, weights: LossWeights) -> _Updates:
    """Both updates; an actor that was trained stays awake, for its weights go to the engines next."""
    metrics: dict[str, float] = {}
    if roles.critic is not None:
        with awake(roles.critic):
            metrics |= _mean(roles.critic.update(samples, plan.critic), prefix="critic/")
    if not plan.actor:
        return _Updates(metrics, [])
    roles.actor.wake()
    of_actor = roles.actor.update(samples, plan.actor, on_policy=plan.on_policy, weights=weights)
    return _Updates(metrics | _mean(of_actor, prefix=""), of_actor)


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


def _next_state(
    settings: OnlineSettings, metrics: dict[str, float], updates: _Updates, *, state: LoopState, num_sequences: int
) -> LoopState:
    """What controllers make of an iteration; the actor's ranks have followed its steps alike."""
    policy, weights, kl_coef = settings.policy, state.weights, state.kl_coef
    for step in updates.of_actor:
        weights = next_weights(weights, step, settings=policy)
    if "kl" in metrics:
        kl_coef = next_kl_coef(
            kl_coef,
            kl=metrics["kl"],
            target=policy.kl_target,
            horizon=policy.kl_horizon,
            num_sequences=num_sequences,
        )
    return LoopState(state.iteration + 1, kl_coef, weights.entropy.coef, weights.entropy.applied)


def controlled(policy: PolicyConfig, state: LoopState, metrics: dict[str, float]) -> dict[str, float]:
    """The weights that an iteration began with, as metrics, where something weighs them."""
    kl = {"kl_coef": state.kl_coef} if "kl" in metrics else {}
    return kl if policy.entropy_target is None else kl | {"entropy_coef": state.weights.entropy.weight}


def request_seed(settings: OnlineSettings, iteration: int, number: int) -> int:
    """The seed of one request; requests are counted through the run."""
    per_iteration = settings.rollout.rollout_batch_size * settings.rollout.n_samples_per_prompt
    return scattered_seed(settings.batch.seed, iteration * per_iteration + number)
