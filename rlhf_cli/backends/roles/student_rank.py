"""Rank of a student with its teacher in the same process, so that hidden states never leave it."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from rlhf_cli.algorithms.aggregation import StepTotals
from rlhf_cli.backends.roles.ranks import SampledRank, within
from rlhf_cli.backends.roles.serialization import RankWork
from rlhf_cli.backends.roles.settings import RoleSettings
from rlhf_cli.backends.training.frozen_teacher import FrozenTeacher
from rlhf_cli.data.packing.packs import TokenSequence
from rlhf_cli.models.student import StudentModel


class StudentRank(SampledRank):
    """One rank of a model that is trained on a teacher's distributions."""

    def __init__(self, settings: RoleSettings) -> None:
        super().__init__(settings, StudentModel)
        assert settings.teacher is not None, "a student needs a teacher"
        self._teacher = FrozenTeacher(settings.teacher.model, settings.teacher.deepspeed)
        self._prepare = settings.teacher.prepare(self._teacher.hidden_states, self._teacher.head)
        self._objective = settings.teacher.objective
        if settings.sleeps:
            self._teacher.sleep()

    def learn(self, work: RankWork) -> list[dict[str, float]]:
        """Run the optimizer steps. Returns metrics per step."""
        with self._awake_teacher():
            return [self._step(step, totals) for step, totals in zip(work.steps, work.totals, strict=True)]

    def _step(self, step: list[list[TokenSequence]], totals: StepTotals) -> dict[str, float]:
        metrics = self.train_step(
            partial(self._prepared, step), lambda model, batch: self._objective(model, batch, totals)
        )
        self.update_average()
        return metrics

    def _prepared(self, step: list[list[TokenSequence]], max_tokens: int | None) -> list[Any]:
        return self._prepare(self.engine, [self.packer(part) for part in within(step, max_tokens)])

    @contextmanager
    def _awake_teacher(self) -> Iterator[None]:
        """Keep the teacher on the GPU inside the block. Outside, it sleeps if the student does."""
        if not self.settings.sleeps:
            yield
            return
        self._teacher.wake()
        # Not in a `finally`: after an error, other ranks may wait in a collective and never reply.
        yield
        self._teacher.sleep()
