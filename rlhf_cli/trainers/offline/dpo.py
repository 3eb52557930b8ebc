"""Direct preference optimization and variants: objective and data preparation."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from torch import nn

from rlhf_cli.algorithms.aggregation import Metrics, StepTotals, sequence_mean
from rlhf_cli.algorithms.preference import (
    PairLogprobs,
    PreferenceSettings,
    aot_partners,
    implicit_rewards,
    length_weights,
    mixed_loss,
    preference_losses,
    preference_metrics,
)
from rlhf_cli.algorithms.ragged import segment_mean, segment_sum
from rlhf_cli.data.packing.packs import MicroBatch, Pack
from rlhf_cli.trainers.offline.pairs import Gather, trained_counts

REF, PARTNER, DELTA = "ref_logprobs", "aot_partner", "bco_delta"
"""Pair columns: reference log-probs of both responses, and step constants."""

Infer = Callable[[Any, list[Any]], list[torch.Tensor]]
"""(training engine, micro-batches) -> sequence log-probs [B] per micro-batch, without gradients."""


class InferringEngine(Protocol):
    """One rank of a model that supports inference."""

    def infer(self, micro_batches: list[Any], forward: Callable[[nn.Module, Any], torch.Tensor]) -> list[torch.Tensor]:
        """Return the result of `forward` for each micro-batch."""


def batch_logprobs(model: nn.Module, batch: MicroBatch, *, ld_alpha: float = 1.0) -> torch.Tensor:
    """Return response log-probs [2 P] for a micro-batch."""
    return _summed(model(batch.pack)[0], batch.pack, ld_alpha)


def _summed(logprobs_K: torch.Tensor, pack: Pack, ld_alpha: float) -> torch.Tensor:
    """Sum the log-probs of each response; those beyond the length of the pair's other response count `ld_alpha`."""
    if ld_alpha != 1:
        logprobs_K = length_weights(pack.cu_trained, len(logprobs_K), ld_alpha=ld_alpha) * logprobs_K
    return segment_sum(logprobs_K, pack.cu_trained)


@dataclass(frozen=True)
class DPOObjective:
    """Weighted sum of losses, plus `nll_loss_coef` times the mean NLL per token of chosen responses.

    With `use_weighting`, the losses of a pair are multiplied by `w_c w_r` (WPO, arXiv 2406.11827): `w` is the geometric
    mean over a response of `p / sum_v p_v^2`, which is 1 on average for tokens that the policy samples.
    """

    names: tuple[str, ...]
    weights: tuple[float, ...]
    settings: PreferenceSettings
    nll_loss_coef: float = 0.0
    use_weighting: bool = False
    ld_alpha: float = 1.0

    def __call__(self, model: nn.Module, batch: MicroBatch, totals: StepTotals) -> tuple[torch.Tensor, Metrics]:
        """Return this micro-batch's contribution to the mean loss over the step's pairs."""
        pack = batch.pack
        logprobs_K, log_squares_K = model(pack, **({"with_log_squares": True} if self.use_weighting else {}))
        pairs = pair_logprobs(_summed(logprobs_K, pack, self.ld_alpha), batch)
        loss_P = mixed_loss(self.names, self.weights, pairs, self.settings)
        metrics: Metrics = {}
        if self.use_weighting:
            likelihoods_B = segment_mean((logprobs_K - log_squares_K).detach(), pack.cu_trained).exp()
            weights_P = likelihoods_B[0::2] * likelihoods_B[1::2]
            loss_P, metrics = weights_P * loss_P, {"pair_weight": sequence_mean(weights_P, totals)}
        loss = sequence_mean(loss_P, totals)
        nll = -sequence_mean(segment_mean(logprobs_K, pack.cu_trained)[0::2], totals)
        metrics |= preference_metrics(pairs, beta=self.settings.beta, num_pairs=totals.num_sequences)
        # Skip the term instead of multiplying by 0: a log-prob of -inf times 0 would be NaN.
        if self.nll_loss_coef:
            loss = loss + self.nll_loss_coef * nll
        return loss, {"loss": loss.detach(), "chosen_nll": nll.detach(), **metrics}

    @property
    def forward(self) -> Callable[[nn.Module, MicroBatch], torch.Tensor]:
        """(model, micro-batch) -> log-probs [2 P], as the losses compare them."""
        return partial(batch_logprobs, ld_alpha=self.ld_alpha)

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
        own = [_table(*both) for both in zip(engine.infer(batches, self.objective.forward), batches, strict=True)]
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
