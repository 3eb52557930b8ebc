"""Online training loop: sample, score, evaluate, update, push weights.

All heavy components are passed in, so tests run the loop in milliseconds with fakes. Algorithms differ by their
estimator (algorithms/estimators/). Roles send work to ranks and engines.
"""

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Protocol, TypeVar

from rlhf_cli.algorithms.kl import next_kl_coef
from rlhf_cli.algorithms.objective import next_weights
from rlhf_cli.config.policy import PolicyConfig
from rlhf_cli.config.scoring import RewardConfig
from rlhf_cli.errors import ProcessDied, RunError
from rlhf_cli.rewards.parts import stop_if_all_failed, stop_if_too_many_failed
from rlhf_cli.rewards.records import Score
from rlhf_cli.tracking.phases import PhaseTimer
from rlhf_cli.trainers.offline.loop import Finished, is_due, too_many_skipped
from rlhf_cli.trainers.online.batch import learning_samples, plan_over_samples, with_observations
from rlhf_cli.trainers.online.forward import fill_in_outputs
from rlhf_cli.trainers.online.interfaces import Actor, RewardModel, Roles, RunTracker, Sampled
from rlhf_cli.trainers.online.metrics import (
    clip_metrics,
    clipped_flat,
    controlled,
    failure_metrics,
    greedy_metrics,
    length_metrics,
    mean_of_steps,
    rollout_metrics,
    source_metrics,
    zero_std_metrics,
)
from rlhf_cli.trainers.online.prompt_source import RolloutSource
from rlhf_cli.trainers.online.rollout import SampledGroups, add_model_scores
from rlhf_cli.trainers.online.sample_rows import iteration_rows
from rlhf_cli.trainers.online.samples import Rollout, samples_of, scores_of
from rlhf_cli.trainers.online.schedule import Schedule, staleness_metrics
from rlhf_cli.trainers.online.state import LoopState, OnlineSettings
from rlhf_cli.trainers.online.step_scoring import step_metrics
from rlhf_cli.trainers.online.update_plan import UpdatePlan, plan_updates


@dataclass(frozen=True)
class OnlineHooks:
    """Callbacks of the loop, in addition to the roles.

    - `updates`: called before each update with its batch, None without sampled responses, and the state.
    """

    tracker: RunTracker
    save_checkpoint: Callable[[LoopState], None]
    should_stop: Callable[[], bool]
    evaluate: Callable[[int, bool], None] = lambda iteration, is_last: None
    evaluation_is_due: Callable[[int, bool], bool] = lambda iteration, is_last: False
    updates: Callable[["ScoredBatch | None", LoopState], None] = lambda batch, state: None


_BatchT = TypeVar("_BatchT")


class Iterations(Protocol[_BatchT]):
    """The two halves of an iteration."""

    def collect(self, state: LoopState, timer: PhaseTimer) -> _BatchT | None:
        """Return the next batch, None if no data remains. Does not change weights."""

    def learn(self, batch: _BatchT, state: LoopState, timer: PhaseTimer) -> tuple[LoopState, dict[str, float]]:
        """Return the state after the iteration, and its metrics."""
        ...

    def is_used_up(self, state: LoopState) -> bool:
        """Return whether no data remains; called after each iteration."""
        ...

    def leave_engines(self) -> None:
        """Give up sampling after an error, possibly in the middle of a round."""


def train_online(
    roles: Roles[Actor],
    source: RolloutSource,
    *,
    state: LoopState,
    total_iterations: int,
    save_steps: int,
    hooks: OnlineHooks,
) -> Finished:
    """Train a policy on scored responses, like `run_iterations`.

    With dynamic sampling, training ends early if no prompts remain, or if the remaining prompts have no learning
    signal.
    """
    settings = source.settings
    with Schedule(source, roles.lent_actor, total_iterations=total_iterations) as schedule:
        return run_iterations(
            _PolicyGradient(roles, settings, schedule, hooks),
            state=state,
            total_iterations=total_iterations,
            save_steps=save_steps,
            max_skipped_steps=settings.optim.max_skipped_steps,
            hooks=_with_idle_engines(hooks, schedule),
        )


def _with_idle_engines(hooks: OnlineHooks, schedule: Schedule) -> OnlineHooks:
    """Let evaluations wait until engines that sample between iterations are idle."""

    def evaluate(iteration: int, is_last: bool) -> None:
        if hooks.evaluation_is_due(iteration, is_last):
            hooks.tracker.phase("generate")
            schedule.rest()
            hooks.tracker.phase(None)
        hooks.evaluate(iteration, is_last)

    return replace(hooks, evaluate=evaluate)


def run_iterations(
    iterations: Iterations[_BatchT],
    *,
    state: LoopState,
    total_iterations: int,
    save_steps: int,
    max_skipped_steps: int,
    hooks: OnlineHooks,
) -> Finished:
    """Train from the iteration after `state` to the last, or until `hooks.should_stop` returns True.

    The last iteration is number `total_iterations`.

    Raises:
        RunError: an evaluation or an iteration's rewards failed; the state before it is saved. Or too many consecutive
        optimizer steps or iterations were skipped; the state after the iteration is saved, because other steps may have
        changed weights, and models, controllers and prompts are consistent only at its end.
    """
    checkpoints = _Checkpoints(iterations.leave_engines, hooks, saved=state.iteration)
    is_last = state.iteration >= total_iterations or iterations.is_used_up(state)
    hooks.evaluate(state.iteration, is_last)
    while not is_last:
        timer = PhaseTimer(on_change=hooks.tracker.phase)
        with checkpoints.saved_on_failure(state):
            batch = iterations.collect(state, timer)
        after, metrics = None, dict[str, float]()
        if batch is not None:
            after, metrics = iterations.learn(batch, state, timer)
            batch = None  # frees the arrays in the object store
            gc.collect(1)  # the driver's collector runs rarely, and cycles may hold images and tokens
        # With dynamic sampling the end is known only after the iteration.
        is_last = after is None or after.iteration == total_iterations or iterations.is_used_up(after)
        state = after or state
        with checkpoints.saved_on_failure(state):
            if reason := too_many_skipped(metrics, max_skipped_steps) or _nothing_trained(
                state, max_skipped_steps, is_last=is_last
            ):
                raise RunError(f"{reason}; iteration {state.iteration} is saved, resume with --load_checkpoint")
            hooks.evaluate(state.iteration, is_last)
        stop = hooks.should_stop() and not is_last
        if stop or (save_steps > 0 and (is_last or is_due(state.iteration, save_steps, total_iterations))):
            checkpoints.save(state)
        if stop:
            return Finished(state.iteration, interrupted=True)
    return Finished(state.iteration, interrupted=False)


def _nothing_trained(state: LoopState, limit: int, *, is_last: bool) -> str | None:
    """Return an error message if too many consecutive iterations, or all of the run, had no response to train on; else
    None.
    """
    if state.skipped_in_a_row <= limit and not (is_last and state.skipped == state.iteration > 0):
        return None
    return (
        f"the last {state.skipped_in_a_row} iterations had no response to train on (--max_skipped_steps {limit}): "
        "raise max_new_tokens if responses are truncated, and choose prompts that the model solves sometimes"
    )


class _Checkpoints:
    """Saves the loop's state once per iteration; `saved` is the last checkpoint's iteration."""

    def __init__(self, leave_engines: Callable[[], None], hooks: OnlineHooks, *, saved: int) -> None:
        self._leave_engines = leave_engines
        self._hooks = hooks
        self._saved = saved

    def save(self, state: LoopState) -> None:
        """Save the state unless this iteration has a checkpoint."""
        if state.iteration != self._saved:
            self._hooks.save_checkpoint(state)
            self._saved = state.iteration

    @contextmanager
    def saved_on_failure(self, state: LoopState) -> Iterator[None]:
        """Save the state if the block fails, except after a process died."""
        try:
            yield
        except RunError as error:
            # After a death, ranks may be stuck in a collective, and saving would wait for them forever.
            if state.iteration != self._saved and not isinstance(error, ProcessDied):
                self._leave_engines()
                self.save(state)
                self._hooks.tracker.message(f"Saved iteration {state.iteration}; resume with --load_checkpoint")
            raise


@dataclass(frozen=True)
class ScoredBatch:
    """Training data of an iteration: scored responses, plus greedy baselines if the estimator uses them.

    - `state`: the loop's state without the batch.
    - `sampled`, `trainable`: all responses in the groups; those with a valid score.
    - `scores`: all scores of the iteration, including filtered groups.
    """

    groups: SampledGroups
    state: LoopState
    sampled: Rollout
    trainable: Rollout
    greedy: Rollout | None
    scores: list[Score]

    def is_empty(self, policy: PolicyConfig) -> bool:
        """Return whether no response can be trained on: all are truncated and masked, or dynamic sampling kept none."""
        return not self.trainable.trained_B(policy).any()


def collect_batch(
    roles: Roles[Sampled], settings: OnlineSettings, schedule: Schedule, state: LoopState, timer: PhaseTimer
) -> ScoredBatch | None:
    """Return sampled and scored responses; None if no data remains."""
    taken = schedule.take(state, timer)
    if taken is None:
        return_weights(roles, state.iteration)  # for the final evaluation
        return None
    batch, after = taken
    with schedule.ended_on_failure(), timer("reward"):
        sampled, greedy = Rollout(samples_of(batch.groups)), Rollout(samples_of(batch.greedy))
        if roles.reward_model is not None and len(sampled):
            # Score both in one call, so that the model is loaded only once.
            sampled, greedy = _with_model_scores(roles.reward_model, settings.reward, sampled, greedy)
        scores = [*sampled.scores, *greedy.scores, *scores_of(samples_of(batch.filtered))]
        stop_if_too_many_failed(scores, settings.reward.reward_max_failures)
        trainable = sampled.scored()
        if settings.estimator.greedy:
            greedy = greedy.scored()
            trainable = trainable.in_groups_of(greedy)
        if len(sampled) and not len(trainable):
            stop_if_all_failed([score for score in scores if score.value is None], iteration=state.iteration + 1)
        if roles.steps is not None and len(trainable):
            trainable.step_rewards = roles.steps.rewards(trainable.samples)
    return ScoredBatch(batch, after, sampled, trainable, greedy if settings.estimator.greedy else None, scores)


def _with_model_scores(
    model: RewardModel, reward: RewardConfig, sampled: Rollout, greedy: Rollout
) -> tuple[Rollout, Rollout]:
    """Add reward model scores, computed in one batch for both."""
    samples = add_model_scores(model, reward, [*sampled.samples, *greedy.samples])
    return Rollout(samples[: len(sampled)]), Rollout(samples[len(sampled) :])


@dataclass(frozen=True)
class _PolicyGradient:
    """Trains a policy on the advantages of scored responses."""

    roles: Roles[Actor]
    settings: OnlineSettings
    schedule: Schedule
    hooks: OnlineHooks

    def collect(self, state: LoopState, timer: PhaseTimer) -> ScoredBatch | None:
        """Return sampled and scored responses; None if the last prompts left nothing to train on."""
        return collect_batch(self.roles, self.settings, self.schedule, state, timer)

    def learn(self, batch: ScoredBatch, state: LoopState, timer: PhaseTimer) -> tuple[LoopState, dict[str, float]]:
        """Return (state, metrics) after the rest of an iteration, from log-probs to the weight push.

        The order of sleep and wake-up minimizes peak memory on shared GPUs.
        """
        roles, settings, schedule, tracker = self.roles, self.settings, self.schedule, self.hooks.tracker
        iteration, rollout = state.iteration + 1, batch.trainable
        is_skipped = batch.is_empty(settings.policy)
        if is_skipped:
            metrics, updates = dict[str, float](), list[dict[str, float]]()
            if len(batch.sampled):  # otherwise the source has reported it
                tracker.message(
                    f"Iteration {iteration} is skipped: all scored responses were truncated and excluded by "
                    "mask_truncated; raise max_new_tokens"
                )
            roles.actor.wake_weights()  # as after an update: engines need weights after sleeping
        else:
            self.hooks.updates(batch, state)
            metrics, updates = self._update_models(batch, state, timer)
        waited, found = schedule.wait(batch.state, timer, version=iteration)
        with schedule.engines(timer):
            if settings.staleness:
                roles.actor.wake_weights()  # a push to a restarted engine has put it to sleep
            metrics |= found | push_weights(roles, iteration, timer)
            if roles.move_reference is not None and settings.reference_moves(iteration):
                with timer("transfer"):
                    roles.move_reference()
        metrics |= batch_metrics(batch, settings.reward)
        if settings.staleness and len(rollout):
            metrics |= staleness_metrics(rollout, iteration=iteration)
        after = _next_state(settings, metrics, updates, state=waited, num_sequences=len(rollout))
        if is_skipped:
            after = replace(after, skipped=state.skipped + 1, skipped_in_a_row=state.skipped_in_a_row + 1)
        if after.skipped:
            metrics["skipped_iterations"] = float(after.skipped)
        tracker.log(iteration, metrics | controlled(settings, state, metrics), timer.take())
        tracker.samples(iteration, iteration_rows(batch.sampled.samples, rollout, settings, by_sample=roles.by_sample))
        return after, metrics

    def _update_models(
        self, batch: ScoredBatch, state: LoopState, timer: PhaseTimer
    ) -> tuple[dict[str, float], list[dict[str, float]]]:
        """Run the forward passes and updates of both models. Returns the metrics of the iteration and those of each
        optimizer step of the actor, whose weights stay on the GPU because they are pushed next.
        """
        roles, settings = self.roles, self.settings
        iteration, rollout = state.iteration + 1, batch.trainable
        _report_clipping(settings, rollout, self.hooks.tracker, iteration=iteration)
        plan = _plan(settings, rollout, iteration=iteration, num_sampled=len(batch.sampled))
        # Carried-over and asynchronous batches were sampled by older weights, so ratios need the current policy's
        # log-probs.
        on_policy = plan.on_policy and not batch.groups.num_carried and not settings.staleness
        with timer("forward"):
            fill_in_outputs(roles, settings, rollout, needs_old=not on_policy)
        with timer("advantage"):
            # All forward passes precede the update, because ratios and returns need the old weights.
            samples, metrics = learning_samples(rollout, batch.greedy, settings, kl_coef=state.kl_coef)
        with timer("train"):
            plan = plan_over_samples(plan, rollout, settings.policy)
            if roles.critic is not None:
                # The experts are those of the actor's layers.
                of_critic = [replace(sample, routed_experts=None) for sample in samples]
                metrics |= mean_of_steps(roles.critic.update(of_critic, plan.critic), prefix="critic/")
            if not plan.actor:
                roles.actor.wake_weights()
                return metrics, []
            samples = with_observations(samples, settings.policy)  # only here, because the critic has no values of them
            of_actor = roles.actor.update(samples, plan.actor, on_policy=on_policy, weights=state.weights(settings))
        return metrics | mean_of_steps(of_actor), of_actor

    def is_used_up(self, state: LoopState) -> bool:
        """Return whether no prompts remain."""
        return self.schedule.is_used_up(state)

    def leave_engines(self) -> None:
        """Give up sampling after an error."""
        self.schedule.leave()


def push_weights(roles: Roles[Sampled], iteration: int, timer: PhaseTimer) -> dict[str, float]:
    """Push weights to the engines after an update, even if unchanged: engines lose weights when they sleep."""
    with timer("transfer"):
        metrics = roles.engines.receive_weights(iteration)
        roles.actor.sleep()
    return metrics


def batch_metrics(batch: ScoredBatch, reward: RewardConfig) -> dict[str, float]:
    """Return the metrics of the iteration's responses; without a reward, no score metrics."""
    sampled = batch.sampled
    num_tokens = {"num_tokens": float(sum(len(sequence) for sequence in batch.trainable.sequences))}
    if not len(sampled):  # dynamic sampling kept no group
        return batch.groups.metrics | num_tokens
    if not reward.is_given:
        return length_metrics(sampled.responses) | num_tokens
    metrics = rollout_metrics(sampled.responses, sampled.scores) | greedy_metrics(batch.greedy)
    metrics |= batch.groups.metrics | zero_std_metrics(sampled.scores, sampled.groups)
    if batch.trainable.step_rewards is not None:
        metrics |= step_metrics(batch.trainable.step_rewards)
    metrics |= source_metrics(sampled.samples) | failure_metrics(batch.scores)
    return metrics | clip_metrics(sampled.scores, reward.reward_clip_range) | num_tokens


def _report_clipping(settings: OnlineSettings, rollout: Rollout, tracker: RunTracker, *, iteration: int) -> None:
    """Report if --reward_clip_range removes the learning signal because all compared scores become equal."""
    clip_range = settings.reward.reward_clip_range
    groups = rollout.groups if settings.estimator.min_group > 1 else [0] * len(rollout)
    values = rollout.scores_B.tolist()
    if clip_range is not None and clipped_flat(values, groups, clip_range):
        tracker.message(
            f"Iteration {iteration}: --reward_clip_range {clip_range[0]:g} {clip_range[1]:g} makes all compared "
            f"scores equal (unclipped: {min(values):g} to {max(values):g}), which removes the learning signal: "
            "widen or remove it"
        )


def _plan(settings: OnlineSettings, rollout: Rollout, *, iteration: int, num_sampled: int) -> UpdatePlan:
    """Plan the optimizer steps over trained responses. Groups stay together if the estimator compares responses."""
    trained_B = rollout.trained_B(settings.policy)
    groups_B = rollout.groups_B[trained_B].numpy() if settings.estimator.min_group > 1 else None
    return plan_updates(
        int(trained_B.sum()),
        settings.batch,
        settings.critic,
        iteration=iteration,
        groups_B=groups_B,
        num_sampled=num_sampled,
    )


def return_weights(roles: Roles[Sampled], version: int) -> None:
    """Push the actor's weights again: engines may have lost them while asleep."""
    roles.actor.wake_weights()
    roles.engines.receive_weights(version)
    roles.actor.sleep()


def _next_state(
    settings: OnlineSettings,
    metrics: dict[str, float],
    updates: Sequence[dict[str, float]],
    *,
    state: LoopState,
    num_sequences: int,
) -> LoopState:
    """Return the state after an iteration, with controllers updated like those on the actor's ranks."""
    policy, weights, kl_coef = settings.policy, state.weights(settings), state.kl_coef
    for step in updates:
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
        source=state.source,
        ahead=state.ahead,
        skipped=state.skipped,
    )
