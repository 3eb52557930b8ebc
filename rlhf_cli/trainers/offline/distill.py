"""Distillation on a fixed dataset: micro-batches, teacher preparation, and objective."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import nn

from rlhf_cli.algorithms.aggregation import Metrics, StepTotals, token_mean
from rlhf_cli.data.packing.packs import Pack
from rlhf_cli.models.distillation import DIVERGENCE, MEASURES, DivergenceSettings
from rlhf_cli.models.logit_chunks import HeadWeights
from rlhf_cli.models.student import LOGPROBS

HiddenStates = Callable[[list[Pack]], list[torch.Tensor]]
"""Packs -> teacher hidden states [k, D] for this rank's targets in each pack."""


@dataclass(frozen=True)
class DistillBatch:
    """A pack with teacher hidden states [k, D] for this rank's targets, and the teacher's head."""

    pack: Pack
    teacher_kD: torch.Tensor
    teacher: HeadWeights

    def to(self, device: torch.device | str) -> "DistillBatch":
        """Move the micro-batch to a device. The head is already there."""
        return replace(self, pack=self.pack.to(device), teacher_kD=self.teacher_kD.to(device))


@dataclass(frozen=True)
class TeacherPreparation:
    """Adds teacher hidden states to micro-batches."""

    hidden_states: HiddenStates
    head: HeadWeights

    def __call__(self, engine: object, packs: list[Pack]) -> list[DistillBatch]:
        """Return this rank's micro-batches for a step, or for part of an evaluation."""
        del engine
        states = self.hidden_states(packs)
        return [DistillBatch(pack, teacher_kD, self.head) for pack, teacher_kD in zip(packs, states, strict=True)]


@dataclass(frozen=True)
class DistillObjective:
    """`kd_coef` times the divergence from the teacher, plus `1 - kd_coef` times the negative log-likelihood."""

    settings: DivergenceSettings
    kd_coef: float = 1.0

    def __call__(self, model: nn.Module, batch: DistillBatch, totals: StepTotals) -> tuple[torch.Tensor, Metrics]:
        """Return this micro-batch's contribution to the mean loss over the step's trained tokens, in nats."""
        # The student's own log-probs cost an additional pass over its logits, so request them only for the mixed loss.
        mixes = self.kd_coef < 1.0
        found = model(batch.pack, batch.teacher_kD, teacher=batch.teacher, settings=self.settings, with_logprobs=mixes)
        loss = divergence = token_mean(found[DIVERGENCE], totals)
        metrics = {name: token_mean(found[name], totals) for name in MEASURES}
        if mixes:
            nll = -token_mean(found[LOGPROBS], totals)
            loss = self.kd_coef * divergence + (1.0 - self.kd_coef) * nll
            metrics |= {"divergence": divergence.detach(), "nll": nll.detach()}
        return loss, {"loss": loss.detach(), **metrics}
