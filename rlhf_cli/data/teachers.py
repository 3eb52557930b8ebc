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
from rlhf_cli.data.tokenizing.teacher_tokens import TeacherTokens
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


@dataclass(frozen=True)
class _AsTeachersRead(collections.abc.Sequence[Prompt]):
    """Prompts `kept` by number, with the tokens of their teachers from `others`, at `places` there."""

    prompts: Sequence[Prompt]
    others: Sequence[Sequence[Prompt]]
    kept: np.ndarray
    places: np.ndarray

    def __len__(self) -> int:
        return len(self.kept)

    def __getitem__(self, index):  # type: ignore[no-untyped-def]
        if isinstance(index, slice):
            return [self[place] for place in range(*index.indices(len(self)))]
        prompt = self.prompts[int(self.kept[index])]
        read = self.others[prompt.teacher][int(self.places[index])]
        return replace(prompt, teacher_ids=read.prompt_ids if read.teacher_ids is None else read.teacher_ids)


def as_teachers_read(prompts: Sequence[Prompt], others: Sequence[Sequence[Prompt]]) -> Sequence[Prompt]:
    """Return the prompts with the tokens of their teachers.

    Args:
        prompts: student's prompts, with the numbers of their teachers.
        others: the same prompts in the tokens of each teacher, without those that are too long.

    Raises UsageError if no prompt remains.
    """
    places = [{(one.source, one.index): place for place, one in enumerate(other)} for other in others]
    found = [places[prompt.teacher].get((prompt.source, prompt.index), -1) for prompt in prompts]
    places_N = np.array(found, dtype=np.int64)
    kept = np.flatnonzero(places_N >= 0)
    if not kept.size:
        raise UsageError("no prompt has room for a response in the teacher's tokens: raise --max_len")
    return _AsTeachersRead(prompts, others, kept, places_N[kept])


@dataclass(frozen=True)
class AlignedSequences(collections.abc.Sequence[TokenSequence]):
    """Sequences with what their teachers read: `others` are the same rows in the tokens of each teacher, at `places`
    there.
    """

    sequences: Sequence[TokenSequence]
    others: Sequence[Sequence[TokenSequence]]
    places: np.ndarray
    tokens: Sequence[TeacherTokens]

    def __len__(self) -> int:
        return len(self.sequences)

    def __getitem__(self, index):  # type: ignore[no-untyped-def]
        if isinstance(index, slice):
            return [self[place] for place in range(*index.indices(len(self)))]
        sequence = self.sequences[index]
        other = self.others[sequence.teacher][int(self.places[index])]
        return self.tokens[sequence.teacher].aligned(sequence, other)


def aligned_sequences(
    data: LoadedData[TokenSequence],
    sequences: Sequence[TokenSequence],
    others: Sequence[LoadedData[TokenSequence]],
    tokens: Sequence[TeacherTokens],
) -> AlignedSequences:
    """Return the sequences of a dataset with what their teachers read.

    Args:
        data: student's rows.
        sequences: their sequences, with the numbers of the teachers.
        others: the same rows, read by each teacher.

    Raises UsageError if a row is missing in the tokens of its teacher.
    """
    if data.patches is not None:
        raise UsageError("--teacher_tokenizer own does not support models with images")
    places = [{_origin(other, item): item for item in range(len(other.items))} for other in others]
    found = np.zeros(len(sequences), np.int64)
    for item, sequence in enumerate(sequences):
        place = places[sequence.teacher].get(_origin(data, item))
        if place is None:
            raise UsageError(
                f"{data.where(item)}: the row is too long in the tokens of its teacher: raise --max_len, or set "
                "--overlong truncate"
            )
        found[item] = place
    return AlignedSequences(sequences, [other.items for other in others], found, tokens)


def _origin(data: LoadedData[TokenSequence], item: int) -> tuple[str, int]:
    row = data.row_of(item)
    return row.source.name, row.index
