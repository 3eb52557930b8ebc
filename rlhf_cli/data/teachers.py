"""The rows that each teacher of a run scores."""

import collections.abc
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TypeVar

import numpy as np

from rlhf_cli.config.base import CommandConfig
from rlhf_cli.config.row_rewards import DATA_SOURCE
from rlhf_cli.config.teachers import source_of_teacher, teachers_of
from rlhf_cli.data.loading import LoadedData
from rlhf_cli.data.packing.packs import TokenSequence
from rlhf_cli.data.prompts import Prompt
from rlhf_cli.errors import UsageError, listed

_SHOWN_SOURCES = 9
_TaughtT = TypeVar("_TaughtT", Prompt, TokenSequence)


@dataclass(frozen=True)
class TeachersOfRows:
    """Teachers by row.

    - `teachers`: models, the one of rows without an entry first.
    - `by_source`: models by source name or pattern.
    - `sources`: source of each row.
    - `what`: name of the rows: "prompts".
    """

    teachers: tuple[str, ...]
    by_source: dict[str, str]
    sources: Sequence[str]
    what: str

    @classmethod
    def of(cls, config: CommandConfig, sources: Sequence[str], what: str) -> "TeachersOfRows":
        """Return the teachers of rows with these sources."""
        pretrain, by_source = config.setting("teacher_pretrain"), config.setting("teacher_by_source")
        return cls(teachers_of(pretrain, by_source), json.loads(by_source), sources, what)

    @cached_property
    def numbers(self) -> np.ndarray:
        """Numbers of the teachers by row, int64 [N]."""
        entries = {source: source_of_teacher(source, self.by_source) for source in set(self.sources)}
        numbers = {
            source: 0 if entry is None else self.teachers.index(self.by_source[entry])
            for source, entry in entries.items()
        }
        return np.array([numbers[source] for source in self.sources], dtype=np.int64)

    def check(self) -> None:
        """Raise UsageError if an entry has no row."""
        counts = Counter(self.sources)
        used = {source_of_teacher(source, self.by_source) for source in counts}
        for source in self.by_source:
            if source not in used:
                most = listed([name for name, _ in counts.most_common(_SHOWN_SOURCES)])
                raise UsageError(
                    f"--teacher_by_source: no row has the source {source!r}; sources of {self.what}: {most}"
                )

    @property
    def summary(self) -> str:
        """The teachers with their numbers of rows."""
        counts = np.bincount(self.numbers, minlength=len(self.teachers)).tolist()
        rows = zip(self.teachers, counts, strict=True)
        return ", ".join(f"{teacher} ({count:,} {self.what})" for teacher, count in rows)

    def of_prompts(self, prompts: Sequence[Prompt]) -> Sequence[Prompt]:
        """Return the prompts with the numbers of their teachers."""
        return _WithTeachers(prompts, self.numbers)

    def of_sequences(self, sequences: Sequence[TokenSequence]) -> Sequence[TokenSequence]:
        """Return the sequences with the numbers of their teachers."""
        return _WithTeachers(sequences, self.numbers)


def teachers_of_prompts(config: CommandConfig, prompts: Sequence[Prompt]) -> TeachersOfRows | None:
    """Return the teachers by prompt; None if all have the same one. Raises UsageError if an entry has no prompt."""
    if config.setting("teacher_by_source") is None:
        return None
    found = TeachersOfRows.of(config, [prompt.data_source or prompt.source for prompt in prompts], "prompts")
    found.check()
    return found


def teachers_of_items(config: CommandConfig, data: LoadedData[TokenSequence]) -> TeachersOfRows | None:
    """Return the teachers by item; None if all have the same one."""
    if config.setting("teacher_by_source") is None:
        return None
    key = config.setting("reward_key") or DATA_SOURCE
    rows = (data.row_of(item) for item in range(len(data.items)))
    sources = [named if isinstance(named := row.get(key), str) else row.source.name for row in rows]
    return TeachersOfRows.of(config, sources, "rows")


@dataclass(frozen=True)
class _WithTeachers(collections.abc.Sequence[_TaughtT]):
    items: Sequence[_TaughtT]
    numbers: np.ndarray

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index):  # type: ignore[no-untyped-def]
        if isinstance(index, slice):
            return [self[place] for place in range(*index.indices(len(self)))]
        return replace(self.items[index], teacher=int(self.numbers[index]))
