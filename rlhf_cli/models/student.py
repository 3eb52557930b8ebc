"""Distillation models: a teacher that returns hidden states, and a student that returns per-token divergences.

Both read the same packs with the same ranks and weight dtype, so each rank has the same rows in both models. Hidden
states are far smaller than distributions, which the student recomputes with the teacher's head.
"""

import torch
from torch import nn
from transformers import PreTrainedModel

from rlhf_cli.models.distillation import DivergenceSettings, divergence_details, token_divergences
from rlhf_cli.models.logit_chunks import HeadWeights
from rlhf_cli.models.logprobs import token_logprobs
from rlhf_cli.models.packs import PackLike
from rlhf_cli.models.policy import Decoder, LanguageModel, TokenHead
from rlhf_cli.models.sequence_parallel.parts import Part, part_of
from rlhf_cli.models.sequence_parallel.shards import SequenceRanks
from rlhf_cli.models.shape_bucketing import rounded

LOGPROBS = "logprobs"


class HiddenStateModel(nn.Module):
    """A frozen language model that returns hidden states before its head."""

    def __init__(self, model: PreTrainedModel, sequence_ranks: SequenceRanks | None = None) -> None:
        super().__init__()
        self.sequence_ranks = sequence_ranks
        self.model = model
        self._decoder = Decoder(model)
        self.head = TokenHead(model)

    def forward(self, pack: PackLike) -> torch.Tensor:
        """Return states [k, D] that predict this rank's targets, including filler."""
        return self._decoder(part_of(rounded(pack, self.model.dtype), self.sequence_ranks), real=pack)


class StudentModel(LanguageModel):
    """A language model that returns divergences from a teacher."""

    def forward(
        self,
        pack: PackLike,
        teacher_kD: torch.Tensor,
        *,
        teacher: HeadWeights,
        settings: DivergenceSettings,
        with_logprobs: bool = False,
        with_details: bool = False,
    ) -> dict[str, torch.Tensor]:
        """Return `token_divergences` for the pack's K targets, plus target log-probs or `divergence_details` if
        requested.

        `teacher_kD` are the teacher's states for this pack on this rank. Log-probs use temperature 1.
        """
        # Round like the teacher does, so that both return the same rows.
        part = part_of(rounded(pack, self.model.dtype), self.sequence_ranks)
        assert len(teacher_kD) == len(part.rows_k), "student and teacher split packs differently"

        def compute(hidden_kD: torch.Tensor, head: HeadWeights) -> dict[str, torch.Tensor]:
            found = token_divergences(hidden_kD, head, teacher_kD, teacher, settings)
            if with_details:
                targets_k = part.pack.targets_K[part.targets]
                found |= divergence_details(hidden_kD, head, teacher_kD, teacher, settings, targets_k)
            return found | ({LOGPROBS: _logprobs(hidden_kD, head, part)} if with_logprobs else {})

        found = self.head(self._decoder(part, real=pack), compute)
        return {name: part.whole(values)[: pack.targets_K.numel()] for name, values in found.items()}


def _logprobs(hidden_kD: torch.Tensor, head: HeadWeights, part: Part) -> torch.Tensor:
    targets_k = part.pack.targets_K[part.targets]
    return token_logprobs(hidden_kD, head.weight_VD, targets_k, bias_V=head.bias_V, transform=head.transform)[0]
