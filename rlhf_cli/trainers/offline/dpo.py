"""Direct preference optimization and its relatives: the objective, and the data that it needs beforehand."""

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
from rlhf_cli.trainers.offline.pairs import Gather, PairBatch, sequence_logprobs, trained_counts

REF, PARTNER, DELTA = "ref_logprobs", "aot_partner", "bco_delta"
"""Columns of a pair: log-probabilities of both responses under the reference, and constants of the step."""

Infer = Callable[[Any, list[Any]], list[torch.Tensor]]
"""(engine of the trained model, micro-batches) -> log-probabilities [B] of the sequences of each, no gradient."""


class InferringEngine(Protocol):
    """One rank of a model that can be asked without training."""

    def infer(self, micro_batches: list[Any], forward: Callable[[nn.Module, Any], torch.Tensor]) -> list[torch.Tensor]:
        """Return the results of `forward` on each micro-batch."""


def batch_logprobs(model: nn.Module, batch: PairBatch) -> torch.Tensor:
    """Return the log-probabilities [2 P] of the responses of a micro-batch."""
    return sequence_logprobs(model, batch.pack)


@dataclass(frozen=True)
class DPOObjective:
    """Losses by name with their weights, and the mean NLL per token of the chosen response, `nll_loss_coef` times."""

    names: tuple[str, ...]
    weights: tuple[float, ...]
    settings: PreferenceSettings
    nll_loss_coef: float = 0.0

    def __call__(self, model: nn.Module, batch: PairBatch, totals: StepTotals) -> tuple[torch.Tensor, Metrics]:
        """Return this micro-batch's part of the mean loss over the pairs of the step."""
        pairs = pair_logprobs(batch_logprobs(model, batch), batch)
        loss = sequence_mean(mixed_loss(self.names, self.weights, pairs, self.settings), totals)
        nll = -sequence_mean(pairs.chosen_logprobs / pairs.chosen_lengths, totals)
        metrics = preference_metrics(pairs, beta=self.settings.beta, num_pairs=totals.num_sequences)
        if self.nll_loss_coef:
            loss = loss + self.nll_loss_coef * nll
        return loss, {"loss": loss.detach(), "chosen_nll": nll.detach(), **metrics}

    @property
    def needs_reference(self) -> bool:
        """Whether any of the losses compares with a reference."""
        return any(row.needs_reference for row in preference_losses(self.names))

    @property
    def step_constants(self) -> set[str]:
        """Constants of the whole step that the losses need."""
        return {row.step_constant for row in preference_losses(self.names) if row.step_constant is not None}


def pair_logprobs(logprobs_B: torch.Tensor, batch: PairBatch) -> PairLogprobs:
    """Return the log-probs [2 P] of the responses of a micro-batch as pairs, with the columns of the pairs."""
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
    """Adds to micro-batches the data that the objective needs: the reference's log-probs and constants of the step.

    `reference` is None if the items bring the log-probs, or no loss needs them.
    """

    objective: DPOObjective
    reference: Infer | None
    gather: Gather

    @property
    def is_needed(self) -> bool:
        """Whether there is anything to do."""
        return self.reference is not None or bool(self.objective.step_constants)

    def __call__(self, engine: InferringEngine, batches: list[PairBatch]) -> list[PairBatch]:
        """Return the micro-batches of this rank with the columns that were missing."""
        if self.reference is not None:
            found = self.reference(engine, batches)
            batches = [
                batch.with_column(REF, ref.unflatten(0, (-1, 2))) for batch, ref in zip(batches, found, strict=True)
            ]
        if not self.objective.step_constants:
            return batches
        own = [_table(*both) for both in zip(engine.infer(batches, batch_logprobs), batches, strict=True)]
        whole_P4, start = self.gather(torch.cat(own))
        whole = _pairs_of_table(whole_P4)
        partners = aot_partners(whole)
        delta = torch.stack(implicit_rewards(whole, beta=self.objective.settings.beta)).mean()
        prepared = []
        for batch, table in zip(batches, own, strict=True):
            stop = start + len(table)
            batch = batch.with_column(PARTNER, partners[start:stop])
            prepared.append(batch.with_column(DELTA, delta.expand(len(table))))
            start = stop
        return prepared


def _table(logprobs_B: torch.Tensor, batch: PairBatch) -> torch.Tensor:
    """Return [P, 4]: chosen and rejected under the model, then under the reference."""
    return torch.cat([logprobs_B.unflatten(0, (-1, 2)), batch.columns[REF].to(logprobs_B.device)], dim=1)


def _pairs_of_table(table_P4: torch.Tensor) -> PairLogprobs:
    chosen, rejected, ref_chosen, ref_rejected = table_P4.unbind(1)
    ones = torch.ones_like(chosen)  # no constant depends on lengths
    return PairLogprobs(chosen, rejected, ref_chosen, ref_rejected, chosen_lengths=ones, rejected_lengths=ones)
