"""Rank of a student with its teachers in the same process, so that hidden states never leave it."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn

from rlhf_cli.algorithms.aggregation import Metrics, StepTotals
from rlhf_cli.algorithms.token_trace import PLACE
from rlhf_cli.backends.roles.ranks import SampledRank, within
from rlhf_cli.backends.roles.serialization import RankWork
from rlhf_cli.backends.roles.settings import RoleSettings
from rlhf_cli.backends.roles.update_record import UpdateRecord
from rlhf_cli.backends.roles.watch import Watch
from rlhf_cli.backends.training import distributed
from rlhf_cli.backends.training.frozen_teacher import FrozenTeacher
from rlhf_cli.data.packing.packs import Pack, TokenSequence, micro_batch
from rlhf_cli.data.packing.readings import taught_pack
from rlhf_cli.models.distillation import DIVERGENCE
from rlhf_cli.models.student import StudentModel


class StudentRank(SampledRank):
    """One rank of a model that is trained on a teacher's distributions."""

    def __init__(self, settings: RoleSettings) -> None:
        super().__init__(settings, StudentModel)
        hosted = settings.teachers
        assert hosted is not None, "a student needs a teacher"
        events = hosted.events or [None] * len(hosted.models)
        pairs = zip(hosted.models, events, strict=True)
        self._teachers = [FrozenTeacher(model, hosted.deepspeed, shared) for model, shared in pairs]
        self._prepare = hosted.prepare(self._teachers)
        self._objective = hosted.objective
        if settings.sleeps:
            self._sleep_teachers()

    def learn(self, work: RankWork, *, watch: Watch | None = None) -> list[dict[str, float]]:
        """Run the optimizer steps. Returns metrics per step."""
        self.record = None if watch is None else UpdateRecord(watch)
        with self._awake_teachers():
            return [self._step(step, totals) for step, totals in zip(work.steps, work.totals, strict=True)]

    def _step(self, step: list[list[TokenSequence]], totals: StepTotals) -> dict[str, float]:
        accumulated = self._began(step, self._terms)
        metrics = self.train_step(partial(self._prepared, step), partial(self._loss, totals), accumulated=accumulated)
        self.update_average()
        return metrics

    def _prepared(self, step: list[list[TokenSequence]], max_tokens: int | None) -> list["_PlacedBatch"]:
        names = () if self.record is None else PLACE
        parts = list(within(step, max_tokens))
        packed = [micro_batch(part, names=names, pack_sequences=self.packer) for part in parts]
        batches = self._with_teachers(parts, [one.pack for one in packed])
        return [_PlacedBatch(batch, one.columns) for batch, one in zip(batches, packed, strict=True)]

    def _with_teachers(self, parts: list[list[TokenSequence]], packs: list[Pack]) -> list[Any]:
        """Return micro-batches of these packs with the teachers' hidden states at their targets."""
        pairs = zip(parts, packs, strict=True)
        return self._prepare(
            self.engine, [taught_pack(part, len(self._teachers), own, self.packer) for part, own in pairs]
        )

    def _loss(self, totals: StepTotals, model: nn.Module, batch: "_PlacedBatch") -> tuple[torch.Tensor, Metrics]:
        if self.record is None:
            return self._objective(model, batch.batch, totals)
        found: dict[str, torch.Tensor] = {}
        loss = self._objective(_recorded(model, found), batch.batch, totals)
        own_K = found[DIVERGENCE].detach().requires_grad_()
        again, _ = self._objective(lambda *_, **__: found | {DIVERGENCE: own_K}, batch.batch, totals)
        (gradient_K,) = torch.autograd.grad(again, own_K)
        self.record.trace.add({**batch.columns, **found, "gradient": gradient_K})
        return loss

    def _terms(self, sequence: TokenSequence, columns: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Return the parts of the step's loss by token, `[K]`: their gradients sum to that of the loss."""
        (batch,) = self._with_teachers([[sequence]], [self.packer([sequence])])
        found: dict[str, torch.Tensor] = {}
        totals = StepTotals(sequence.num_trained, 1)
        self._objective(_recorded(self.engine.module, found), batch.to(distributed.device()), totals)
        return found[DIVERGENCE] * columns["gradient"].to(found[DIVERGENCE])

    @contextmanager
    def _awake_teachers(self) -> Iterator[None]:
        """Keep the teachers awake inside the block. Outside, they sleep if the student does."""
        if not self.settings.sleeps:
            yield
            return
        for teacher in self._teachers:
            teacher.wake()
        # Not in a `finally`: after an error, other ranks may wait in a collective and never reply.
        yield
        self._sleep_teachers()

    def _sleep_teachers(self) -> None:
        for teacher in self._teachers:
            teacher.sleep()


@dataclass(frozen=True)
class _PlacedBatch:
    """A micro-batch with the teachers' hidden states, and columns that identify its tokens in a trace."""

    batch: Any
    columns: Mapping[str, torch.Tensor]

    @property
    def pack(self) -> Pack:
        """The tokens."""
        pack: Pack = self.batch.pack
        return pack

    def to(self, device: torch.device | str) -> "_PlacedBatch":
        """Move the micro-batch to a device."""
        return replace(self, batch=self.batch.to(device))


def _recorded(model: nn.Module, found: dict[str, torch.Tensor]) -> Any:
    """Return the model's forward function, which also adds its outputs and `divergence_details` to `found`."""

    def forward(*args: object, **settings: object) -> dict[str, torch.Tensor]:
        found.update(model(*args, **settings, with_details=True))
        return found

    return forward
