"""Generalized knowledge distillation on sampled and fixed responses (GKD, arXiv 2306.13649).

Shares loop, engines and checkpoints with the other online algorithms; only the iteration differs. The student's ranks
host the teacher, so that neither distributions nor hidden states are transferred.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from rlhf_cli.data.packing.packs import TokenSequence
from rlhf_cli.data.sampling import SEED_MASK, StepBatches
from rlhf_cli.tracking.phases import PhaseTimer
from rlhf_cli.trainers.offline.loop import Finished
from rlhf_cli.trainers.online.interfaces import Roles, Student
from rlhf_cli.trainers.online.loop import (
    Iterations,
    OnlineHooks,
    ScoredBatch,
    batch_metrics,
    collect_batch,
    mean_of_steps,
    push_weights,
    run_iterations,
)
from rlhf_cli.trainers.online.prompt_source import RolloutSource
from rlhf_cli.trainers.online.sample_rows import iteration_rows
from rlhf_cli.trainers.online.schedule import Schedule
from rlhf_cli.trainers.online.state import LoopState, OnlineSettings
from rlhf_cli.trainers.online.update_plan import plan_updates

OWN_RESPONSES = "own_responses"
_DRAW = 0x676B64  # "gkd": separates the seeds of draws and row orders


@dataclass(frozen=True)
class Mixture:
    """Randomly selects sampled responses or fixed sequences per iteration, as in algorithm 1.

    `fixed` is empty with `lmbda` 1. All choices depend only on seed and iteration, so resuming needs no state.
    """

    lmbda: float
    fixed: Sequence[TokenSequence]
    batch_size: int
    seed: int

    def is_own(self, iteration: int) -> bool:
        """Return whether the student samples this iteration's responses, counted from 0."""
        # A separate stream per iteration, so that a resumed run makes the same choices.
        draw = np.random.default_rng([self.seed & SEED_MASK, iteration, _DRAW]).random()
        return bool(draw < self.lmbda)

    def fixed_batch(self, iteration: int) -> list[TokenSequence]:
        """Return this iteration's fixed sequences. The order restarts when all were used."""
        # Random access by iteration: `epochs` only needs to be large enough.
        order = StepBatches(len(self.fixed), batch_size=self.batch_size, epochs=iteration + 1, seed=self.seed)
        return [self.fixed[int(index)] for index in order[iteration]]


_Batch = ScoredBatch | list[TokenSequence]
"""Sampled responses, or fixed sequences."""


def train_student(
    roles: Roles[Student],
    mixture: Mixture,
    source: RolloutSource,
    *,
    state: LoopState,
    total_iterations: int,
    save_steps: int,
    hooks: OnlineHooks,
) -> Finished:
    """Train a student on teacher distributions, like `run_iterations`. Rewards are only logged."""
    settings = source.settings
    with Schedule(source, roles.lent_actor, total_iterations=total_iterations) as schedule:
        iterations: Iterations[_Batch] = _Distilling(roles, settings, mixture, schedule, hooks)
        return run_iterations(
            iterations,
            state=state,
            total_iterations=total_iterations,
            save_steps=save_steps,
            max_skipped_steps=settings.optim.max_skipped_steps,
            hooks=hooks,
        )


@dataclass(frozen=True)
class _Distilling:
    """Trains a student on a teacher's distributions."""

    roles: Roles[Student]
    settings: OnlineSettings
    mixture: Mixture
    schedule: Schedule
    hooks: OnlineHooks

    def collect(self, state: LoopState, timer: PhaseTimer) -> _Batch | None:
        """Return the next iteration's data."""
        if self.mixture.is_own(state.iteration):
            return collect_batch(self.roles, self.settings, self.schedule, state, timer)
        self.roles.engines.sleep()  # free their memory: this iteration samples nothing
        return self.mixture.fixed_batch(state.iteration)

    def learn(self, batch: _Batch, state: LoopState, timer: PhaseTimer) -> tuple[LoopState, dict[str, float]]:
        """Return (state, metrics) after the iteration, including the weight push."""
        iteration, settings = state.iteration + 1, self.settings
        own = batch if isinstance(batch, ScoredBatch) else None
        tokens = settings.teacher_tokens
        sequences = batch.sampled.taught_sequences(tokens) if isinstance(batch, ScoredBatch) else batch
        self.hooks.updates(own, state)
        plan = plan_updates(len(sequences), settings.batch, settings.critic, iteration=iteration)
        with timer("train"):
            metrics = mean_of_steps(self.roles.actor.learn(sequences, plan.actor))
        metrics |= push_weights(self.roles, iteration, timer)
        metrics |= {} if own is None else batch_metrics(own, settings.reward)
        metrics |= {OWN_RESPONSES: float(own is not None), "num_tokens": float(sum(map(len, sequences)))}
        self.hooks.tracker.log(iteration, metrics, timer.take())
        if own is None:  # skip the iteration's prompts
            # The source counts iterations to select prompts and seeds, so advance it without sampling.
            return replace(state, iteration=iteration, source=replace(state.source, iteration=iteration)), metrics
        rows = iteration_rows(own.sampled.samples, own.trainable, settings, by_sample=self.roles.by_sample)
        self.hooks.tracker.samples(iteration, rows)
        return replace(state, iteration=iteration, source=own.state.source), metrics

    def is_used_up(self, state: LoopState) -> bool:
        """Return whether no prompts remain."""
        return self.schedule.is_used_up(state)

    def leave_engines(self) -> None:
        """Give up sampling after an error."""
        self.schedule.leave()
