"""Distillation on a fixed dataset: micro-batches, teacher preparation, and objective."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import nn

from rlhf_cli.algorithms.aggregation import Metrics, StepTotals, token_mean
from rlhf_cli.config.base import CommandConfig
from rlhf_cli.data.loading import LoadedData
from rlhf_cli.data.packing.packs import Pack, TokenSequence
from rlhf_cli.data.packing.readings import Reading, TaughtPack, taught_pack
from rlhf_cli.data.teachers import AlignedSequences, TeachersOfRows, aligned_sequences, teachers_of_items
from rlhf_cli.data.tokenizing.teacher_tokens import TeacherTokens
from rlhf_cli.errors import UsageError
from rlhf_cli.models.distillation import DIVERGENCE, MEASURES, DivergenceSettings, TokenEvents
from rlhf_cli.models.logit_chunks import HeadWeights
from rlhf_cli.models.student import ALIGNED, LOGPROBS, TeacherStates
from rlhf_cli.trainers.offline.loop import LoadedItems


@dataclass(frozen=True)
class TaughtItems(LoadedItems[TokenSequence]):
    """Tokenized sequences, one per item.

    - `assigned`: teachers by row; None with a single teacher.
    - `aligned`: sequences paired with sequences for teachers with different tokenizers.
    """

    assigned: TeachersOfRows | None = None
    aligned: AlignedSequences | None = None

    @property
    def sequences(self) -> Sequence[TokenSequence]:
        """Sequences with teachers."""
        if self.aligned is not None:
            return self.aligned
        items: Sequence[TokenSequence] = self.data.items
        return items if self.assigned is None else self.assigned.of_sequences(items)

    def read_by(self, others: Sequence[LoadedData[TokenSequence]], tokens: Sequence[TeacherTokens]) -> "TaughtItems":
        """Return the items with the same rows as tokenized for teachers. Raises UsageError if rows differ."""
        return replace(self, aligned=aligned_sequences(self.data, self.sequences, others, tokens))

    def collate(self, indices: Sequence[int]) -> TaughtPack:
        """Pack the sequences into one micro-batch."""
        sequences = self.sequences
        num_teachers = 1 if self.assigned is None else len(self.assigned.teachers)
        return taught_pack([sequences[index] for index in indices], num_teachers)


def taught_items(config: CommandConfig, data: LoadedData[TokenSequence]) -> TaughtItems:
    """Return the items. Raises UsageError for loss weights other than 0 and 1."""
    if data.report.weighted_rows:
        where = data.report.noted["weighted_rows"][0]
        raise UsageError(f"{where} has a loss weight other than 0 and 1, which only rlhf sft supports: remove it")
    return TaughtItems(data, teachers_of_items(config, data))


class Teacher(Protocol):
    """A frozen model in a rank."""

    head: HeadWeights
    events: TokenEvents | None

    def hidden_states(self, packs: Sequence[Pack]) -> list[torch.Tensor]:
        """Return the hidden states [k, D] for this rank's targets in each pack."""


@dataclass(frozen=True)
class DistillBatch:
    """A pack with teacher states."""

    pack: Pack
    teachers: tuple[TeacherStates, ...]

    def to(self, device: torch.device | str) -> "DistillBatch":
        """Move the micro-batch to a device."""
        return DistillBatch(self.pack.to(device), tuple(teacher.to(device) for teacher in self.teachers))


@dataclass(frozen=True)
class TeacherPreparation:
    """Adds the teachers' hidden states to micro-batches, one teacher after another."""

    teachers: Sequence[Teacher]

    def __call__(self, engine: object, packs: list[TaughtPack]) -> list[DistillBatch]:
        """Return this rank's micro-batches with hidden states."""
        del engine
        states = [
            [
                _states(teacher, states_kD, one.readings[number])
                for states_kD, one in zip(
                    teacher.hidden_states([one.readings[number].pack for one in packs]), packs, strict=True
                )
            ]
            for number, teacher in enumerate(self.teachers)
        ]
        return [DistillBatch(one.pack, of_pack) for one, of_pack in zip(packs, zip(*states, strict=True), strict=True)]


def _states(teacher: Teacher, states_kD: torch.Tensor, reading: Reading) -> TeacherStates:
    targets_k = None if reading.spans is None else reading.pack.targets_K
    return TeacherStates(states_kD, teacher.head, reading.rows_k, teacher.events, reading.spans, targets_k)


@dataclass(frozen=True)
class DistillObjective:
    """`kd_coef` times the divergence from the teacher, plus `1 - kd_coef` times the negative log-likelihood."""

    settings: DivergenceSettings
    kd_coef: float = 1.0

    def __call__(self, model: nn.Module, batch: DistillBatch, totals: StepTotals) -> tuple[torch.Tensor, Metrics]:
        """Return this micro-batch's contribution to the mean loss over the step's trained tokens, in nats."""
        # The student's own log-probs cost an additional pass over its logits, so request them only for the mixed loss.
        mixes = self.kd_coef < 1.0
        found = model(batch.pack, batch.teachers, settings=self.settings, with_logprobs=mixes)
        loss = divergence = token_mean(found[DIVERGENCE], totals)
        # Only teachers with another tokenizer leave tokens out.
        metrics = {name: token_mean(found[name], totals) for name in (*MEASURES, ALIGNED) if name in found}
        if mixes:
            nll = -token_mean(found[LOGPROBS], totals)
            loss = self.kd_coef * divergence + (1.0 - self.kd_coef) * nll
            metrics |= {"divergence": divergence.detach(), "nll": nll.detach()}
        return loss, {"loss": loss.detach(), **metrics}
