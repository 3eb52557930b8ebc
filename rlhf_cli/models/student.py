"""Distillation models: a teacher that returns hidden states, and a student that returns per-token divergences.

Both read the same packs with the same ranks and weight dtype, so each rank has the same rows in both models. Hidden
states are far smaller than distributions, which the student recomputes with the teacher's head.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

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


@dataclass(frozen=True)
class TeacherStates:
    """A teacher's hidden states [k, D] for this rank's targets in a pack, and the teacher's head.

    `rows_k` are the numbers of these targets; None for all targets.
    """

    states_kD: torch.Tensor
    head: HeadWeights
    rows_k: torch.Tensor | None = None

    def to(self, device: torch.device | str) -> "TeacherStates":
        """Move the states to a device. The head is already there."""
        rows_k = None if self.rows_k is None else self.rows_k.to(device)
        return replace(self, states_kD=self.states_kD.to(device), rows_k=rows_k)


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
    """A language model that returns divergences from teachers."""

    def forward(
        self,
        pack: PackLike,
        teachers: Sequence[TeacherStates],
        *,
        settings: DivergenceSettings,
        with_logprobs: bool = False,
        with_details: bool = False,
    ) -> dict[str, torch.Tensor]:
        """Return `token_divergences` for the pack's K targets, plus target log-probs or `divergence_details` if
        requested.

        `teachers` have states for each target on this rank, from one of them. Log-probs use temperature 1.
        """
        # Round like the teacher does, so that both return the same rows.
        part = part_of(rounded(pack, self.model.dtype), self.sequence_ranks)

        def compute(hidden_kD: torch.Tensor, head: HeadWeights) -> dict[str, torch.Tensor]:
            targets_k = part.pack.targets_K[part.targets]
            found = [
                _compared(hidden_kD, head, teacher, settings, targets_k if with_details else None)
                for teacher in teachers
            ]
            joined = found[0] if len(found) == 1 else _in_order(teachers, found, len(hidden_kD))
            return joined | ({LOGPROBS: _logprobs(hidden_kD, head, part)} if with_logprobs else {})

        found = self.head(self._decoder(part, real=pack), compute)
        return {name: part.whole(values)[: pack.targets_K.numel()] for name, values in found.items()}


def _compared(
    hidden_kD: torch.Tensor,
    head: HeadWeights,
    teacher: TeacherStates,
    settings: DivergenceSettings,
    targets_k: torch.Tensor | None,
) -> dict[str, torch.Tensor]:
    """Return the divergences at a teacher's rows, with details if targets are given."""
    states_kD = teacher.states_kD
    if teacher.rows_k is not None:
        hidden_kD, states_kD = hidden_kD[teacher.rows_k], states_kD[: len(teacher.rows_k)]  # without filler
        targets_k = None if targets_k is None else targets_k[teacher.rows_k]
    assert len(states_kD) == len(hidden_kD), "student and teacher split packs differently"
    found = token_divergences(hidden_kD, head, states_kD, teacher.head, settings)
    if targets_k is not None:
        found |= divergence_details(hidden_kD, head, states_kD, teacher.head, settings, targets_k)
    return found


def _in_order(
    teachers: Sequence[TeacherStates], found: Sequence[dict[str, torch.Tensor]], num_rows: int
) -> dict[str, torch.Tensor]:
    """Join the results of all teachers, `[num_rows]` each, in the order of the student's targets."""
    joined = {}
    for name, values_k in found[0].items():
        whole = values_k.new_zeros(num_rows)
        for teacher, own in zip(teachers, found, strict=True):
            assert teacher.rows_k is not None, "several teachers score different targets"
            whole = whole.index_copy(0, teacher.rows_k, own[name])
        joined[name] = whole
    return joined


def _logprobs(hidden_kD: torch.Tensor, head: HeadWeights, part: Part) -> torch.Tensor:
    targets_k = part.pack.targets_K[part.targets]
    return token_logprobs(hidden_kD, head.weight_VD, targets_k, bias_V=head.bias_V, transform=head.transform)[0]
