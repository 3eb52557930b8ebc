"""What teachers read for a micro-batch of a student."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from rlhf_cli.data.packing.packs import Pack, TokenSequence, pack


@dataclass(frozen=True)
class Reading:
    """A teacher's pack.

    - `rows_k`: numbers of the student's targets that the teacher is compared at; None for all, in order.
    - `spans`: for a teacher with other tokens, `TokenSequence.teacher_rows` with numbers in both packs; None if the
      targets of the pack are those of `rows_k`.

    Example: the second of two teachers scores the last of three sequences with 2, 1 and 2 targets: `rows_k` is [3, 4].
    """

    pack: Pack
    rows_k: torch.Tensor | None = None
    spans: torch.Tensor | None = None


@dataclass(frozen=True)
class TaughtPack:
    """A student's pack, with what each teacher reads."""

    pack: Pack
    readings: tuple[Reading, ...]


def taught_pack(
    sequences: list[TokenSequence],
    num_teachers: int,
    own: Pack | None = None,
    pack_sequences: Callable[[list[TokenSequence]], Pack] = pack,
) -> TaughtPack:
    """Pack the sequences in order, for the student and for each teacher; an idle pack for a teacher of none of them.

    `own` is the student's pack, if it is already packed.
    """
    own = pack_sequences(sequences) if own is None else own
    if num_teachers == 1 and all(one.teacher_rows is None for one in sequences):
        reads = [one.teacher_reads or one for one in sequences]
        is_other = any(one.teacher_reads is not None for one in sequences)
        return TaughtPack(own, (Reading(pack_sequences(reads) if is_other else own),))
    firsts = np.cumsum([0, *(sequence.num_trained for sequence in sequences)])
    found = []
    for teacher in range(num_teachers):
        chosen = [number for number, one in enumerate(sequences) if one.teacher == teacher]
        reads = [sequences[number].teacher_reads or sequences[number] for number in chosen]
        read = pack_sequences(reads)
        if any(sequences[number].teacher_rows is not None for number in chosen):
            others = np.cumsum([0, *(one.num_trained for one in reads)])
            spans = [_placed(sequences[n], firsts[n], other) for n, other in zip(chosen, others[:-1], strict=True)]
            spans_n4 = torch.from_numpy(np.concatenate(spans))
            found.append(Reading(read, spans_n4[:, 0], spans_n4))
            continue
        rows = [np.arange(firsts[number], firsts[number + 1]) for number in chosen]
        rows_k = torch.from_numpy(np.concatenate([np.zeros(0, np.int64), *rows]))
        found.append(Reading(read, rows_k))
    return TaughtPack(own, tuple(found))


def _placed(sequence: TokenSequence, first: int, other: int) -> np.ndarray:
    """Return the rows of a sequence whose targets, and those of its teacher, have these first numbers in the packs."""
    assert sequence.teacher_rows is not None, "sequences of one teacher differ in their tokens"
    return sequence.teacher_rows + np.array([first, other, 0, 0])
