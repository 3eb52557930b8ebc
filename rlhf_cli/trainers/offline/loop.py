"""Offline training loop: batches of items -> packed micro-batches -> optimizer steps.

The loop is independent of the objective. Each rank runs it over the same item order, and processes its share of each
step.
"""

import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Generic, Protocol

import numpy as np
import torch
from torch import nn

from rlhf_cli.algorithms.aggregation import Metrics, StepTotals
from rlhf_cli.algorithms.answer_statistics import wilson_interval
from rlhf_cli.config.train import BatchConfig
from rlhf_cli.data.loading import Item, LoadedData
from rlhf_cli.data.packing.packs import plan_packs
from rlhf_cli.data.packing.splitting import split_members
from rlhf_cli.data.sampling import StepBatches
from rlhf_cli.errors import RunError
from rlhf_cli.tracking.phases import PhaseTimer

Objective = Callable[[nn.Module, Any, StepTotals], tuple[torch.Tensor, Metrics]]
Prepare = Callable[[Any, list[Any]], list[Any]]
"""(engine, this rank's micro-batches) -> the micro-batches with data that the objective requires beforehand, such as
reference log-probs. Called on all ranks in each step.
"""


class ItemData(Protocol):
    """Training items by index."""

    @property
    def lengths(self) -> np.ndarray:
        """Tokens per item in a pack."""

    @property
    def num_trained(self) -> np.ndarray:
        """Trained tokens per item."""

    @property
    def patches(self) -> np.ndarray | None:
        """Image patches per item, None for text models."""

    def collate(self, indices: Sequence[int]) -> object:
        """Pack the items into a micro-batch; an idle one for no items."""


@dataclass(frozen=True)
class LoadedItems(ABC, Generic[Item]):
    """A command's items, with their dataset. `lengths` are the dataset's unless a pack holds other tokens."""

    data: LoadedData[Item]

    @property
    def lengths(self) -> np.ndarray:
        return self.data.columns["length"]

    @property
    def num_trained(self) -> np.ndarray:
        return self.data.columns["num_trained"]

    @property
    def patches(self) -> np.ndarray | None:
        return self.data.patches

    @abstractmethod
    def collate(self, indices: Sequence[int]) -> object:
        """Pack the items into a micro-batch."""


class Engine(Protocol):
    """One rank of a model in training. `token_limit` is set after it ran out of memory."""

    token_limit: int | None

    def train_step(
        self, micro_batches: Sequence[object], compute_loss: Any, *, smaller: Callable[[int], Sequence[object]]
    ) -> dict[str, float]: ...

    def evaluate(self, micro_batches: Iterable[object], compute_loss: object) -> dict[str, float]: ...


class StepTracker(Protocol):
    """Tracker interface used by the loop."""

    @property
    def phase(self) -> Callable[[str | None], None]: ...

    def log(self, step: int, metrics: dict[str, float], phases: dict[str, float]) -> None: ...

    def evaluation(self, step: int, metrics: dict[str, float]) -> None: ...


@dataclass(frozen=True)
class Share:
    """This process's share of each step.

    `rank` and `num_ranks` count groups of processes that compute the same micro-batches together. With
    `ranks_per_sequence`, the token limit per micro-batch is multiplied by it.
    """

    rank: int
    num_ranks: int
    batch: BatchConfig
    quadratic_cost: float
    ranks_per_sequence: int = 1

    def deal(self, data: ItemData, indices: np.ndarray, max_tokens: int | None = None) -> list[list[int]]:
        """Return item indices for each of this rank's micro-batches, split again to `max_tokens` if it is set."""
        plan = plan_packs(
            data.lengths[indices].tolist(),
            patches=None if data.patches is None else data.patches[indices],
            max_tokens=self.batch.max_tokens * self.ranks_per_sequence,
            num_ranks=self.num_ranks,
            max_sequences=self.batch.micro_train_batch_size,
            quadratic_cost=self.quadratic_cost,
        )
        dealt = [[int(indices[i]) for i in members] for members in plan[self.rank]]
        parts = [split_members(members, data.lengths[members].tolist(), max_tokens=max_tokens) for members in dealt]
        return list(itertools.chain.from_iterable(parts))

    def micro_batches(
        self, data: ItemData, indices: np.ndarray, max_tokens: int | None = None
    ) -> tuple[list[Any], StepTotals]:
        """Return this rank's packed micro-batches, and the totals over all ranks."""
        packs = [data.collate(members) for members in self.deal(data, indices, max_tokens)]
        # Count trained tokens over all ranks, since the loss of each micro-batch is divided by the total.
        num_tokens = int(data.num_trained[indices].sum())
        return packs, StepTotals(num_tokens=num_tokens, num_sequences=len(indices))


@dataclass(frozen=True)
class Schedule:
    """Step counts for training, saving and evaluation."""

    start_step: int
    total_steps: int
    save_steps: int
    eval_steps: int
    max_skipped_steps: int
    stop_eval_loss: float | None = None


@dataclass(frozen=True)
class OfflineHooks:
    """Callbacks of the loop, in addition to engine and objective."""

    tracker: StepTracker
    save_checkpoint: Callable[[int], None]
    should_stop: Callable[[], bool]
    prepare: Prepare | None = None
    after_step: Callable[[object, int], None] | None = None
    finish_metrics: Callable[[dict[str, float]], dict[str, float]] = dict


@dataclass(frozen=True)
class Finished:
    """Outcome of the loop."""

    step: int
    interrupted: bool
    evaluated: dict[str, float] = field(default_factory=dict)
    """Metrics from the last evaluation."""


def train(
    engine: Engine,
    objective: Objective,
    *,
    data: ItemData,
    eval_data: ItemData | None,
    share: Share,
    schedule: Schedule,
    hooks: OfflineHooks,
) -> Finished:
    """Train from `schedule.start_step` to the end, or until `hooks.should_stop` returns True.

    Resuming a finished run only evaluates and saves again.

    Raises:
        RunError: too many consecutive steps were skipped. The state is saved first: skipped steps changed nothing, and
        the next steps use other items.
    """
    batches = StepBatches(
        len(data.lengths), batch_size=share.batch.train_batch_size, epochs=share.batch.max_epochs, seed=share.batch.seed
    )
    evaluated: dict[str, float] = {}
    # The last evaluation of a finished run is not checkpointed, so repeat it.
    if schedule.start_step == schedule.total_steps and eval_data is not None:
        evaluated = evaluate(engine, objective, data=eval_data, share=share, hooks=hooks)
    for step in range(schedule.start_step + 1, schedule.total_steps + 1):
        timer = PhaseTimer(on_change=hooks.tracker.phase)
        with timer("data"):
            micro_batches, totals = share.micro_batches(data, batches[step - 1], engine.token_limit)
            totals = replace(totals, step=step)
        # Run this on all ranks, even those without items: `prepare` may contain collectives.
        if hooks.prepare is not None:
            with timer("forward"):
                micro_batches = hooks.prepare(engine, micro_batches)
        with timer("train"):
            smaller = partial(_smaller, engine, data=data, indices=batches[step - 1], share=share, hooks=hooks)
            found = engine.train_step(micro_batches, bind(objective, totals), smaller=smaller)
            metrics = hooks.finish_metrics(found)
            # A moving reference follows the weights after each step, and a checkpoint must include the result.
            if hooks.after_step is not None:
                hooks.after_step(engine, step)
        counts = {"num_tokens": float(totals.num_tokens), "num_sequences": float(totals.num_sequences)}
        hooks.tracker.log(step, metrics | counts, timer.take())
        # Save first: the optimizer state is valid, and a restart should not repeat the steps since the last checkpoint.
        if reason := too_many_skipped(metrics, schedule.max_skipped_steps):
            hooks.save_checkpoint(step)
            raise RunError(f"{reason}; step {step} is saved, resume with --load_checkpoint")
        if eval_data is not None and is_due(step, schedule.eval_steps, schedule.total_steps):
            evaluated = evaluate(engine, objective, data=eval_data, share=share, hooks=hooks)
            hooks.tracker.evaluation(step, evaluated)
            if schedule.stop_eval_loss is not None and evaluated["loss"] <= schedule.stop_eval_loss:
                return Finished(step, interrupted=False, evaluated=evaluated)
        # Agreement on the stop signal is a collective, so ask in every step on all ranks.
        stop = hooks.should_stop() and step < schedule.total_steps
        if stop or (is_due(step, schedule.save_steps, schedule.total_steps) and schedule.save_steps > 0):
            hooks.save_checkpoint(step)
        if stop:
            return Finished(step, interrupted=True)
    return Finished(schedule.total_steps, interrupted=False, evaluated=evaluated)


def evaluate(
    engine: Engine, objective: Objective, *, data: ItemData, share: Share, hooks: OfflineHooks
) -> dict[str, float]:
    """Return the objective's global mean metrics over all evaluation items, with a 95% interval for `accuracy`.

    Packs one training batch at a time, so that memory does not grow with the dataset. The interval, `accuracy_low` to
    `accuracy_high`, treats items as independent.
    """
    prepare = hooks.prepare or (lambda engine, micro_batches: micro_batches)
    num_items, size = len(data.lengths), share.batch.train_batch_size
    totals = StepTotals(num_tokens=int(data.num_trained.sum()), num_sequences=num_items)
    # Chunks have the size of a training step, which is known to fit in memory after preparation.
    chunks = (np.arange(start, min(start + size, num_items)) for start in range(0, num_items, size))
    packed = (share.micro_batches(data, chunk, engine.token_limit)[0] for chunk in chunks)
    micro_batches = (pack for packs in packed for pack in prepare(engine, packs))
    metrics = hooks.finish_metrics(engine.evaluate(micro_batches, bind(objective, totals)))
    if "accuracy" not in metrics:
        return metrics
    low, high = wilson_interval(metrics["accuracy"], num_items)
    return metrics | {"accuracy_low": low, "accuracy_high": high}


def _smaller(
    engine: Engine, max_tokens: int, *, data: ItemData, indices: np.ndarray, share: Share, hooks: OfflineHooks
) -> list[Any]:
    """Return a step's micro-batches with fewer tokens, prepared again."""
    micro_batches, _ = share.micro_batches(data, indices, max_tokens)
    return micro_batches if hooks.prepare is None else hooks.prepare(engine, micro_batches)


def bind(objective: Objective, totals: StepTotals) -> Callable[[nn.Module, object], tuple[torch.Tensor, Metrics]]:
    """Bind the step's totals to the objective."""
    return lambda model, micro_batch: objective(model, micro_batch, totals)


def too_many_skipped(metrics: Mapping[str, float], limit: int) -> str | None:
    """Return an error message if a role skipped more than `limit` consecutive optimizer steps, else None."""
    # Both names are checked because online roles report separate counts.
    most = max(metrics.get(f"{role}skipped_in_a_row", 0.0) for role in ("", "critic/"))
    if most <= limit:
        return None
    return (
        f"loss or gradient was not finite in {most:.0f} optimizer steps in a row (--max_skipped_steps {limit}): check "
        "the data, or restart with a lower learning rate"
    )


def is_due(step: int, every: int, last: int) -> bool:
    """Return whether a periodic action (-1: only at the end) is due after this step."""
    return step == last or (every > 0 and step % every == 0)
