"""Direct preference optimization and variants: objective and data preparation."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn

from rlhf_cli.algorithms.aggregation import Metrics, StepTotals, sequence_mean
from rlhf_cli.algorithms.preference import (
    PairLogprobs,
    PreferenceSettings,
    aot_partners,
    implicit_rewards,
    mixed_loss,
    preference_losses,
    preference_metrics,
)
from rlhf_cli.data.packing.packs import MicroBatch
from rlhf_cli.trainers.offline.pairs import Gather, sequence_logprobs, trained_counts

REF, PARTNER, DELTA = "ref_logprobs", "aot_partner", "bco_delta"
"""Pair columns: reference log-probs of both responses, and step constants."""

Infer = Callable[[Any, list[Any]], list[torch.Tensor]]
"""(training engine, micro-batches) -> sequence log-probs [B] per micro-batch, without gradients."""


class InferringEngine(Protocol):
    """One rank of a model that supports inference."""

    def infer(self, micro_batches: list[Any], forward: Callable[[nn.Module, Any], torch.Tensor]) -> list[torch.Tensor]:
        """Return the result of `forward` for each micro-batch."""


def batch_logprobs(model: nn.Module, batch: MicroBatch) -> torch.Tensor:
    """Return response log-probs [2 P] for a micro-batch."""
    return sequence_logprobs(model, batch.pack)


@dataclass(frozen=True)
class DPOObjective:
    """Weighted sum of losses, plus `nll_loss_coef` times the mean NLL per token of chosen responses."""

    names: tuple[str, ...]
    weights: tuple[float, ...]
    settings: PreferenceSettings
    nll_loss_coef: float = 0.0

    def __call__(self, model: nn.Module, batch: MicroBatch, totals: StepTotals) -> tuple[torch.Tensor, Metrics]:
        """Return this micro-batch's contribution to the mean loss over the step's pairs."""
        pairs = pair_logprobs(batch_logprobs(model, batch), batch)
        loss = sequence_mean(mixed_loss(self.names, self.weights, pairs, self.settings), totals)
        nll = -sequence_mean(pairs.chosen_logprobs / pairs.chosen_lengths, totals)
        metrics = preference_metrics(pairs, beta=self.settings.beta, num_pairs=totals.num_sequences)
        # Skip the term instead of multiplying by 0: a log-prob of -inf times 0 would be NaN.
        if self.nll_loss_coef:
            loss = loss + self.nll_loss_coef * nll
        return loss, {"loss": loss.detach(), "chosen_nll": nll.detach(), **metrics}

    @property
    def needs_reference(self) -> bool:
        """Whether any loss uses the reference."""
        return any(row.needs_reference for row in preference_losses(self.names))

    @property
    def step_constants(self) -> set[str]:
        """Step constants required by the losses."""
        return {row.step_constant for row in preference_losses(self.names) if row.step_constant is not None}


def pair_logprobs(logprobs_B: torch.Tensor, batch: MicroBatch) -> PairLogprobs:
    """Return response log-probs [2 P] as pairs, with the pair columns."""
    lengths_B, ref_P2, delta_P = trained_counts(batch.pack), batch.columns.get(REF), batch.columns.get(DELTA)
    return PairLogprobs(
        chosen_logprobs=logprobs_B[0::2],
        rejected_logprobs=logprobs_B[1::2],
        ref_chosen_logprobs=None if ref_P2 is None else ref_P2[:, 0],
        ref_rejected_logprobs=None if ref_P2 is None else ref_P2[:, 1],
        chosen_lengths=lengths_B[0::2],
        rejected_lengths=lengths_B[1::2],
        aot_partner=batch.columns.get(PARTNER),
        bco_delta=delta_P,
    )


@dataclass(frozen=True)
class PairPreparation:
    """Adds reference log-probs and step constants to micro-batches.

    `reference` is None if the items contain log-probs, or if no loss uses them.
    """

    objective: DPOObjective
    reference: Infer | None
    gather: Gather

    @property
    def is_needed(self) -> bool:
        """Whether any preparation is required."""
        return self.reference is not None or bool(self.objective.step_constants)

    def __call__(self, engine: InferringEngine, batches: list[MicroBatch]) -> list[MicroBatch]:
        """Return this rank's micro-batches with the missing columns."""
        # The step constants below need the reference log-probs.
        if self.reference is not None:
            found = self.reference(engine, batches)
            batches = [
                batch.with_column(REF, ref.unflatten(0, (-1, 2))) for batch, ref in zip(batches, found, strict=True)
            ]
        if not self.objective.step_constants:
            return batches
        # The constants depend on all pairs in the step, so gather log-probs from all ranks before the first
        # micro-batch.
        own = [_table(*both) for both in zip(engine.infer(batches, batch_logprobs), batches, strict=True)]
        whole_P4, start = self.gather(torch.cat(own))
        whole = _pairs_of_table(whole_P4)
        partners = aot_partners(whole)
        # The mean is over all pairs in the step, so that it does not depend on how pairs are split into micro-batches.
        delta = torch.stack(implicit_rewards(whole, beta=self.objective.settings.beta)).mean()
        prepared = []
        for batch, table in zip(batches, own, strict=True):
            # The gathered rows are in rank order, so this rank's pairs are consecutive.
            stop = start + len(table)
            batch = batch.with_column(PARTNER, partners[start:stop])
            prepared.append(batch.with_column(DELTA, delta.expand(len(table))))
            start = stop
        return prepared


def _table(logprobs_B: torch.Tensor, batch: MicroBatch) -> torch.Tensor:
    """Return [P, 4]: chosen and rejected log-probs for the model, then for the reference."""
    # Columns may be on another device than model outputs.
    return torch.cat([logprobs_B.unflatten(0, (-1, 2)), batch.columns[REF].to(logprobs_B.device)], dim=1)


def _pairs_of_table(table_P4: torch.Tensor) -> PairLogprobs:
    chosen, rejected, ref_chosen, ref_rejected = table_P4.unbind(1)
    ones = torch.ones_like(chosen)  # step constants do not depend on lengths
    return PairLogprobs(chosen, rejected, ref_chosen, ref_rejected, chosen_lengths=ones, rejected_lengths=ones)
