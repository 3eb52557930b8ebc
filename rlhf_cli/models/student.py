"""Distillation models: a teacher that returns hidden states, and a student that returns per-token divergences.

Both read the same packs with the same ranks and weight dtype, so each rank has the same rows in both models. Hidden
states are far smaller than distributions, which the student recomputes with the teacher's head.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn
from transformers import PreTrainedModel

from rlhf_cli.algorithms.divergence import divergence
from rlhf_cli.models.distillation import (
    DIVERGENCE,
    DivergenceSettings,
    TokenEvents,
    divergence_details,
    token_divergences,
)
from rlhf_cli.models.logit_chunks import HeadWeights
from rlhf_cli.models.logprobs import token_logprobs
from rlhf_cli.models.packs import PackLike
from rlhf_cli.models.policy import Decoder, LanguageModel, TokenHead
from rlhf_cli.models.sequence_parallel.parts import part_of
from rlhf_cli.models.sequence_parallel.shards import SequenceRanks
from rlhf_cli.models.shape_bucketing import rounded

LOGPROBS = "logprobs"
ALIGNED = "aligned"
"""1 for tokens that are compared with a teacher of another tokenizer, and 0 for those inside a token of the teacher."""


@dataclass(frozen=True)
class TeacherStates:
    """A teacher's hidden states [k, D] for this rank's targets in a pack, and the teacher's head.

    - `rows_k`: numbers of the student's targets that are compared; None for all targets.
    - `events`, `spans`, `targets_k`: for a student with another tokenizer, the events that both share, the spans of
      `Reading`, and the teacher's targets.
    """

    states_kD: torch.Tensor
    head: HeadWeights
    rows_k: torch.Tensor | None = None
    events: TokenEvents | None = None
    spans: torch.Tensor | None = None
    targets_k: torch.Tensor | None = None

    def to(self, device: torch.device | str) -> "TeacherStates":
        """Move the states to a device. Head and events are already there."""
        names = ("states_kD", "rows_k", "spans", "targets_k")
        tensors = {name: getattr(self, name) for name in names}
        return replace(self, **{name: one.to(device) for name, one in tensors.items() if one is not None})


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

        `teachers` have states for targets on this rank, at most one per target; the results are 0 for targets without
        one. Log-probs use temperature 1.
        """
        # Round like the teacher does, so that both return the same rows.
        part = part_of(rounded(pack, self.model.dtype), self.sequence_ranks)

        def compute(hidden_kD: torch.Tensor, head: HeadWeights) -> dict[str, torch.Tensor]:
            targets_k = part.pack.targets_K[part.targets]
            found = [
                _compared(hidden_kD, head, teacher, settings, targets_k, with_details=with_details)
                for teacher in teachers
            ]
            is_whole = len(found) == 1 and teachers[0].rows_k is None
            joined = found[0] if is_whole else _in_order(teachers, found, len(hidden_kD))
            return joined | ({LOGPROBS: _logprobs(hidden_kD, head, targets_k)} if with_logprobs else {})

        found = self.head(self._decoder(part, real=pack), compute)
        return {name: part.whole(values)[: pack.targets_K.numel()] for name, values in found.items()}


def _compared(
    hidden_kD: torch.Tensor,
    head: HeadWeights,
    teacher: TeacherStates,
    settings: DivergenceSettings,
    targets_k: torch.Tensor,
    *,
    with_details: bool,
) -> dict[str, torch.Tensor]:
    """Return the divergences at a teacher's rows, with details if requested."""
    own_kD, states_kD, rows_k = hidden_kD, teacher.states_kD, teacher.rows_k
    if rows_k is not None:
        own_kD, targets_n = hidden_kD[rows_k], targets_k[rows_k]
        states_kD = states_kD[: len(rows_k)] if teacher.spans is None else states_kD[teacher.spans[:, 1]]
    else:
        targets_n = targets_k
    assert len(states_kD) == len(own_kD), "student and teacher split packs differently"
    found = token_divergences(own_kD, head, states_kD, teacher.head, settings, teacher.events)
    if teacher.events is not None:
        found[ALIGNED] = torch.ones_like(found[DIVERGENCE].detach())
    if teacher.spans is not None:
        found[DIVERGENCE] = found[DIVERGENCE] + _of_spans(hidden_kD, head, targets_k, teacher, settings)
    if with_details:
        found |= divergence_details(own_kD, head, states_kD, teacher.head, settings, targets_n, teacher.events)
    return found


def _of_spans(
    hidden_kD: torch.Tensor,
    head: HeadWeights,
    targets_k: torch.Tensor,
    teacher: TeacherStates,
    settings: DivergenceSettings,
) -> torch.Tensor:
    """Return the divergence of two events for each row: the text up to the next common position, and any other text.

    0 for spans of one token on both sides, which the divergence over tokens covers.
    """
    assert teacher.spans is not None
    assert teacher.targets_k is not None
    several = (teacher.spans[:, 2:] > 1).any(-1).nonzero().squeeze(-1)
    spans = teacher.spans[several]
    found = hidden_kD.new_zeros(len(teacher.spans), dtype=torch.float32)
    if not len(spans):
        return found
    at = settings.temperature
    own_m = _span_logprobs(hidden_kD, head, targets_k, spans[:, [0, 2]], at)
    with torch.no_grad():
        teachers_m = _span_logprobs(teacher.states_kD, teacher.head, teacher.targets_k, spans[:, [1, 3]], at)
    of_spans = divergence(_with_rest(own_m), _with_rest(teachers_m), settings.beta)
    return found.to(of_spans.dtype).index_copy(0, several, of_spans)


def _span_logprobs(
    hidden_kD: torch.Tensor, head: HeadWeights, targets_k: torch.Tensor, spans: torch.Tensor, temperature: float
) -> torch.Tensor:
    """Return the log-probs of spans, (first target, number of targets): the sums over their tokens."""
    firsts, counts = spans.unbind(-1)
    numbers = torch.repeat_interleave(torch.arange(len(spans), device=spans.device), counts)
    rows = torch.arange(len(numbers), device=spans.device) + (firsts - counts.cumsum(0) + counts)[numbers]
    logprobs, _ = token_logprobs(
        hidden_kD[rows],
        head.weight_VD,
        targets_k[rows],
        bias_V=head.bias_V,
        temperature=temperature,
        transform=head.transform,
    )
    return logprobs.new_zeros(len(spans)).index_add(0, numbers, logprobs)


def _with_rest(logprobs_m: torch.Tensor) -> torch.Tensor:
    """Return log-probs of an event and of its complement, `[m, 2]`."""
    bounded_m = logprobs_m.clamp(max=-1e-6)  # the complement's log-prob stays finite
    return torch.stack([bounded_m, torch.log(-torch.expm1(bounded_m))], -1)


def _in_order(
    teachers: Sequence[TeacherStates], found: Sequence[dict[str, torch.Tensor]], num_rows: int
) -> dict[str, torch.Tensor]:
    """Join the results of all teachers, `[num_rows]` each, in the order of the student's targets."""
    joined = {}
    for name, values_k in found[0].items():
        whole = values_k.new_zeros(num_rows)
        for teacher, own in zip(teachers, found, strict=True):
            assert teacher.rows_k is not None, "several teachers compare different targets"
            whole = whole.index_copy(0, teacher.rows_k, own[name])
        joined[name] = whole
    return joined


def _logprobs(hidden_kD: torch.Tensor, head: HeadWeights, targets_k: torch.Tensor) -> torch.Tensor:
    return token_logprobs(hidden_kD, head.weight_VD, targets_k, bias_V=head.bias_V, transform=head.transform)[0]
