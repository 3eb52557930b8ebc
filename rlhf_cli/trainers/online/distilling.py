"""Distillation on the student's own responses, and on fixed ones in a share of the iterations (GKD, arXiv 2306.13649).

The loop, its engines and its checkpoints are those of the other online algorithms; an iteration differs. The teacher
lives in the student's ranks, so that neither distributions nor hidden states travel.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from rlhf_cli.data.packing.packs import TokenSequence
from rlhf_cli.data.prompts import Prompt
from rlhf_cli.data.sampling import SEED_MASK, StepBatches
from rlhf_cli.tracking.phases import PhaseTimer
from rlhf_cli.trainers.offline.loop import Finished
from rlhf_cli.trainers.online.interfaces import Roles, RunTracker, Student
from rlhf_cli.trainers.online.lookahead import Lookahead
from rlhf_cli.trainers.online.loop import (
    Iterations,
    OnlineHooks,
    ScoredBatch,
    batch_metrics,
    mean_of_steps,
    push_weights,
    run_iterations,
    scored_batch,
)
from rlhf_cli.trainers.online.metrics import iteration_rows
from rlhf_cli.trainers.online.prompt_source import RolloutSource
from rlhf_cli.trainers.online.state import LoopState, OnlineSettings
from rlhf_cli.trainers.online.update_plan import plan_updates

OWN_RESPONSES = "own_responses"
_DRAW = 0x676B64  # "gkd": draws and orders of rows have different seeds


@dataclass(frozen=True)
class Mixture:
    """Whether an iteration learns on own responses or on fixed sequences, by a draw of its own, as in algorithm 1.

    `fixed` is empty at a share of 1. Everything is a function of seed and iteration, so a resumed run needs no state.
    """

    lmbda: float
    fixed: Sequence[TokenSequence]
    batch_size: int
    seed: int

    def is_own(self, iteration: int) -> bool:
        """Return whether the student writes the responses of this iteration, counted from 0."""
        draw = np.random.default_rng([self.seed & SEED_MASK, iteration, _DRAW]).random()
        return bool(draw < self.lmbda)

    def fixed_batch(self, iteration: int) -> list[TokenSequence]:
        """Return the fixed sequences at the place of this iteration in their order, which begins anew at its end."""
        order = StepBatches(len(self.fixed), batch_size=self.batch_size, epochs=iteration + 1, seed=self.seed)
        return [self.fixed[int(index)] for index in order[iteration]]


Batch = ScoredBatch | list[TokenSequence]
"""Own responses, or fixed sequences."""


@dataclass(frozen=True)
class Distilling:
    """Trains a student on a teacher's distributions; rewards are measured alone."""

    roles: Roles[Student]
    settings: OnlineSettings
    mixture: Mixture

    def __call__(
        self,
        *,
        prompts: Sequence[Prompt],
        decode: Callable[[Sequence[int]], str],
        state: LoopState,
        total_iterations: int,
        save_steps: int,
        hooks: OnlineHooks,
    ) -> Finished:
        """Train as `run_iterations`."""
        roles, tracker = self.roles, hooks.tracker
        source = RolloutSource(roles.engines, roles.scorer, self.settings, prompts, decode, tell=tracker.message)
        with Lookahead(source, roles.engines, roles.turns, lag=0, total_iterations=total_iterations) as lookahead:
            iterations = Iterations[Batch](
                lambda state, timer: self._collect(lookahead, state, timer),
                lambda batch, state, timer: self._learn(batch, state, tracker, timer),
                lookahead.is_used_up,
                lookahead.leave,
            )
            return run_iterations(
                iterations,
                state=state,
                total_iterations=total_iterations,
                save_steps=save_steps,
                max_skipped_steps=self.settings.optim.max_skipped_steps,
                hooks=hooks,
            )

    def _collect(self, lookahead: Lookahead, state: LoopState, timer: PhaseTimer) -> Batch | None:
        """Return what the next iteration learns from."""
        if self.mixture.is_own(state.iteration):
            return scored_batch(self.roles, self.settings, lookahead, state, timer)
        self.roles.engines.sleep()  # they hold weights for responses that this iteration does not need
        return self.mixture.fixed_batch(state.iteration)

    def _learn(
        self, batch: Batch, state: LoopState, tracker: RunTracker, timer: PhaseTimer
    ) -> tuple[LoopState, dict[str, float]]:
        """Return (state, metrics) after the rest of an iteration, up to the engines' new weights."""
        iteration, settings = state.iteration + 1, self.settings
        own = batch if isinstance(batch, ScoredBatch) else None
        sequences = batch.sampled.sequences if isinstance(batch, ScoredBatch) else batch
        plan = plan_updates(len(sequences), settings.batch, iteration=iteration)
        with timer("train"):
            self.roles.actor.wake()
            metrics = mean_of_steps(self.roles.actor.learn(sequences, plan.actor))
        metrics |= push_weights(self.roles, iteration, timer)
        metrics |= {} if own is None else batch_metrics(own, settings.reward)
        metrics |= {OWN_RESPONSES: float(own is not None), "num_tokens": float(sum(map(len, sequences)))}
        tracker.log(iteration, metrics, timer.take())
        if own is None:  # the prompts of the iteration are passed over
            return replace(state, iteration=iteration, source=replace(state.source, iteration=iteration)), metrics
        tracker.samples(iteration, iteration_rows(own.sampled, own.trainable, has_reward=settings.reward.is_given))
        return replace(state, iteration=iteration, source=own.taken.source), metrics
