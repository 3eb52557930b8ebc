"""The one online loop: sample, score, evaluate, update, push weights.

Everything heavy arrives built, so the loop runs in milliseconds with fakes. Algorithms differ by their table row
(algorithms/table.py). The roles send work to ranks and engines.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import islice

import numpy as np

from rlhf_cli.algorithms.kl import next_kl_coef
from rlhf_cli.algorithms.objective import LossWeights, next_weights
from rlhf_cli.config.policy import PolicyConfig
from rlhf_cli.config.scoring import OnlineRewardConfig
from rlhf_cli.data.packing.samples import Sample
from rlhf_cli.data.prompts import Prompt
from rlhf_cli.errors import ProcessDied, RunError
from rlhf_cli.rewards.model_scores import with_model_scores
from rlhf_cli.rewards.parts import stop_if_too_many_failed
from rlhf_cli.rewards.records import Score
from rlhf_cli.tracking.phases import PhaseTimer
from rlhf_cli.trainers.offline.loop import Finished, is_due, too_many_skipped
from rlhf_cli.trainers.online.batch import (
    Evaluated,
    Rollouts,
    as_sequence,
    failure_metrics,
    greedy_metrics,
    learning_samples,
    rollout_metrics,
    sample_rows,
    scored_rollouts,
    source_metrics,
    split_last_values,
    with_greedy,
    with_last_states,
    zero_std_metrics,
)
from rlhf_cli.trainers.online.groups import ScoredResponses, flat
from rlhf_cli.trainers.online.interfaces import (
    RewardModel,
    Roles,
    RunTracker,
    Sleeper,
)
from rlhf_cli.trainers.online.prompt_source import RolloutSource
from rlhf_cli.trainers.online.rollout import Rollout, mean_lengths, prompt_lengths
from rlhf_cli.trainers.online.state import LoopState, OnlineSettings
from rlhf_cli.trainers.online.update_plan import UpdatePlan, plan_updates


@dataclass(frozen=True)
class OnlineHooks:
    """The functions that the loop calls besides the roles."""

    tracker: RunTracker
    save_checkpoint: Callable[[LoopState], None]
    should_stop: Callable[[], bool]
    evaluate: Callable[[int, bool], None] = lambda iteration, is_last: None


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
    """Train from the iteration after `state` to the last, or until `hooks.should_stop` returns True.

    The last iteration is number `total_iterations`. Under dynamic sampling training ends earlier if no prompt is left,
    or if the remaining prompts teach nothing.

    Raises:
        RunError: an iteration gives nothing to train on, or an evaluation or its rewards fail; the state before it is
            saved. Or too many optimizer steps in a row were skipped; then the state after the iteration is saved, as
            other steps may have changed weights, and models, controllers and prompts agree only at its end.
    """
    source = RolloutSource(roles.engines, roles.scorer, settings, prompts, decode, tell=hooks.tracker.message)
    is_last = state.iteration >= total_iterations or source.is_used_up(state)
    hooks.evaluate(state.iteration, is_last)
    saved = state.iteration

    @contextmanager
    def saved_on_failure() -> Iterator[None]:
        """Save the state if the block fails, unless a process has died."""
        try:
            yield
        except RunError as error:
            if state.iteration != saved and not isinstance(error, ProcessDied):
                roles.engines.sleep()  # it may have come in the middle of a round
                hooks.save_checkpoint(state)
                hooks.tracker.message(f"Saved iteration {state.iteration}: --load_checkpoint continues there")
            raise

    while not is_last:
        timer = PhaseTimer(on_change=hooks.tracker.phase)
        with saved_on_failure():
            experience = _experience(roles, settings, source, state, timer)
        after, metrics = None, dict[str, float]()
        if experience is not None:
            after, metrics = _learn(roles, settings, experience, state=state, tracker=hooks.tracker, timer=timer)
        is_last = after is None or after.iteration == total_iterations or source.is_used_up(after)
        state = after or state
        with saved_on_failure():
            if reason := too_many_skipped(metrics, settings.optim.max_skipped_steps):
                raise RunError(f"{reason}; --load_checkpoint goes on after iteration {state.iteration}, which is saved")
            hooks.evaluate(state.iteration, is_last)
        stop = hooks.should_stop() and not is_last
        is_due_now = save_steps > 0 and (is_last or is_due(state.iteration, save_steps, total_iterations))
        if (stop or is_due_now) and state.iteration != saved:
            hooks.save_checkpoint(state)
            saved = state.iteration
        if stop:
            return Finished(state.iteration, interrupted=True)
    return Finished(state.iteration, interrupted=False)


@dataclass(frozen=True)
class _Experience:
    """The iteration's training data: scored responses, plus greedy baselines if the algorithm uses them.

    `scores` are all scores of the iteration, also of groups that taught nothing.
    """

    rollout: Rollout
    sampled: ScoredResponses
    scores: list[Score]
    rollouts: Rollouts
    greedy: Rollouts | None


def _experience(
    roles: Roles, settings: OnlineSettings, source: RolloutSource, state: LoopState, timer: PhaseTimer
) -> _Experience | None:
    """Sampled and scored responses; None if the last prompts gave nothing to train on."""
    rollout = source.sample(state, timer)
    if rollout is None:
        return_weights(roles, state.iteration)  # for an evaluation at the end
        return None
    with timer("reward"):
        sampled, likeliest = (flat(groups) for groups in (rollout.groups, rollout.greedy))
        if roles.reward_model is not None:
            sampled, likeliest = _with_model_scores(roles.reward_model, settings.reward, sampled, likeliest)
        scores = sampled.scores + likeliest.scores + flat(rollout.filtered).scores
        stop_if_too_many_failed(scores, settings.reward.reward_max_failures)
        rollouts, greedy = _scored(settings, sampled, likeliest, iteration=state.iteration + 1)
    return _Experience(rollout, sampled, scores, rollouts, greedy)


def _learn(
    roles: Roles,
    settings: OnlineSettings,
    experience: _Experience,
    *,
    state: LoopState,
    tracker: RunTracker,
    timer: PhaseTimer,
) -> tuple[LoopState, dict[str, float]]:
    """(state, metrics) after the rest of an iteration, from log-probabilities to the engines' new weights.

    The order of sleeping and waking keeps the memory peak of shared accelerators low.
    """
    iteration, policy = state.iteration + 1, settings.policy
    rollout, sampled = experience.rollout, experience.sampled
    rollouts, greedy = experience.rollouts, experience.greedy
    plan = _plan(settings, rollouts, iteration=iteration)
    on_policy = plan.on_policy and not rollout.num_carried
    with timer("forward"):
        evaluated = _evaluate(roles, settings, rollouts, needs_old=not on_policy or settings.needs_old)
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
        updates = _update(roles, samples, plan, on_policy=on_policy, weights=state.weights)
        metrics |= updates.metrics
    with timer("transfer"):  # also of weights that have not changed: engines that slept have none
        roles.actor.sleep_optimizer()
        metrics |= roles.engines.receive_weights(iteration)
        roles.actor.sleep()
    if roles.moving_reference is not None and settings.reference_moves(iteration):
        with timer("transfer"), awake(roles.moving_reference):
            roles.moving_reference.move()
    metrics |= rollout_metrics(sampled.generations, sampled.scores) | greedy_metrics(greedy) | rollout.metrics
    metrics |= zero_std_metrics(sampled.scores, sampled.groups) | source_metrics(sampled.questions, sampled.scores)
    metrics |= failure_metrics(experience.scores)
    metrics["num_tokens"] = float(sum(len(sequence) for sequence in rollouts.sequences))
    after = _next_state(settings, metrics, updates, state=state, rollout=rollout, num_sequences=len(rollouts))
    tracker.log(iteration, metrics | controlled(policy, state, metrics), timer.take())
    tracker.samples(iteration, sample_rows(sampled.questions, sampled.generations, sampled.scores))
    return after, metrics


def _plan(settings: OnlineSettings, rollouts: Rollouts, *, iteration: int) -> UpdatePlan:
    """Return the optimizer steps over the trained responses; groups stay whole if their responses are compared."""
    trained_B = rollouts.trained_B(settings.policy)
    groups_B = rollouts.groups_B[trained_B].numpy() if settings.algorithm.min_group > 1 else None
    return plan_updates(int(trained_B.sum()), settings.batch, iteration=iteration, groups_B=groups_B)


def _scored(
    settings: OnlineSettings, sampled: ScoredResponses, likeliest: ScoredResponses, *, iteration: int
) -> tuple[Rollouts, Rollouts | None]:
    """Return the responses that can be trained on, and the greedy responses that they are compared with.

    Raises:
        RunError: no response can be trained on.
    """
    rollouts, greedy = (
        scored_rollouts(found.prompts, found.generations, found.scores, found.groups) for found in (sampled, likeliest)
    )
    if settings.algorithm.greedy:
        rollouts = with_greedy(rollouts, greedy)
    if not len(rollouts):
        reason = next(score.detail for score in sampled.scores + likeliest.scores if score.value is None)
        raise RunError(f"iteration {iteration}: every reward failed ({reason}), nothing can be learned")
    if not rollouts.trained_B(settings.policy).any():
        raise RunError(
            f"iteration {iteration}: every response was cut and mask_truncated leaves those out, nothing can be "
            "learned: raise max_new_tokens"
        )
    return rollouts, greedy if settings.algorithm.greedy else None


def _with_model_scores(
    model: RewardModel, reward: OnlineRewardConfig, *responses: ScoredResponses
) -> tuple[ScoredResponses, ...]:
    """Return the responses with the reward model's scores added; it reads up to the last token, also of cut ones."""
    pairs = [pair for found in responses for pair in zip(found.prompts, found.generations, strict=True)]
    with awake(model):
        values = model.scores([as_sequence(prompt.prompt_ids, generation.token_ids) for prompt, generation in pairs])
    scores = with_model_scores(
        [score for found in responses for score in found.scores],
        values,
        weight=reward.reward_model_weight,
    )
    rest = iter(scores)
    return tuple(replace(found, scores=list(islice(rest, len(found.scores)))) for found in responses)


def _evaluate(roles: Roles, settings: OnlineSettings, rollouts: Rollouts, *, needs_old: bool) -> Evaluated:
    """Return the log-probs and values under the models as they are before the update."""
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
    """The metrics of both updates: over the iteration, and of the actor by optimizer step."""

    metrics: dict[str, float]
    of_actor: list[dict[str, float]]


def _update(
    roles: Roles, samples: Sequence[Sample], plan: UpdatePlan, *, on_policy: bool, weights: LossWeights
) -> _Updates:
    """Both updates; the actor stays awake, for its weights go to the engines next."""
    metrics: dict[str, float] = {}
    if roles.critic is not None:
        with awake(roles.critic):
            metrics |= _mean(roles.critic.update(samples, plan.critic), prefix="critic/")
    roles.actor.wake()
    if not plan.actor:
        return _Updates(metrics, [])
    of_actor = roles.actor.update(samples, plan.actor, on_policy=on_policy, weights=weights)
    return _Updates(metrics | _mean(of_actor, prefix=""), of_actor)


def return_weights(roles: Roles, version: int) -> None:
    """Give the engines the actor's weights once more: engines that slept may have lost them."""
    roles.actor.wake()
    roles.actor.sleep_optimizer()
    roles.engines.receive_weights(version)
    roles.actor.sleep()


@contextmanager
def awake(role: Sleeper) -> Iterator[None]:
    """Hold a role on its accelerator for the block.

    After a failure it is left alone: ranks that wait for one that died would never come to answer.
    """
    role.wake()
    yield
    role.sleep()


def _mean(steps: Sequence[dict[str, float]], *, prefix: str) -> dict[str, float]:
    """Return the metrics over the optimizer steps of an iteration: means, and maxima of counts and of names that end in
    `_max`.
    """
    names = steps[0].keys()
    merge = {name: np.max if name.endswith("_max") or name.startswith("skipped_") else np.mean for name in names}
    return {prefix + name: float(merge[name]([step[name] for step in steps])) for name in names}


def _next_state(
    settings: OnlineSettings,
    metrics: dict[str, float],
    updates: _Updates,
    *,
    state: LoopState,
    rollout: Rollout,
    num_sequences: int,
) -> LoopState:
    """Return the state after an iteration, with its controllers moved as the actor's ranks have moved theirs."""
    policy, weights, kl_coef = settings.policy, state.weights, state.kl_coef
    is_asked_again = settings.rollout.num_episodes > 1
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
    return LoopState(
        state.iteration + 1,
        kl_coef,
        weights.entropy.coef,
        weights.entropy.applied,
        lengths={**state.lengths, **mean_lengths(rollout.groups)},
        prompt_lengths=prompt_lengths(state.prompt_lengths, rollout.groups) if is_asked_again else {},
        num_taken=rollout.num_taken,
        postponed=rollout.postponed,
        surplus=rollout.surplus,
    )


def controlled(policy: PolicyConfig, state: LoopState, metrics: dict[str, float]) -> dict[str, float]:
    """Return the weights of controlled loss terms at the start of an iteration, as metrics."""
    kl = {"kl_coef": state.kl_coef} if "kl" in metrics else {}
    return kl if policy.entropy_target is None else kl | {"entropy_coef": state.weights.entropy.weight}
