"""What teachers read for a micro-batch of a student."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from rlhf_cli.data.packing.packs import Pack, TokenSequence, pack


@dataclass(frozen=True)
class Reading:
    """A teacher's pack, with one target for each of the student's targets `rows_k`; None stands for all, in order.

    Example: the second of two teachers scores the last of three sequences with 2, 1 and 2 targets: `rows_k` is [3, 4].
    """

    pack: Pack
    rows_k: torch.Tensor | None = None


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
    if num_teachers == 1:
        reads = [one.teacher_reads or one for one in sequences]
        is_other = any(one.teacher_reads is not None for one in sequences)
        return TaughtPack(own, (Reading(pack_sequences(reads) if is_other else own),))
    bounds = np.cumsum([0, *(sequence.num_trained for sequence in sequences)])
    found = []
    for teacher in range(num_teachers):
        chosen = [number for number, one in enumerate(sequences) if one.teacher == teacher]
        rows = [np.arange(bounds[number], bounds[number + 1]) for number in chosen]
        reads = [sequences[number].teacher_reads or sequences[number] for number in chosen]
        rows_k = torch.from_numpy(np.concatenate(rows or [np.zeros(0, np.int64)]))
        found.append(Reading(pack_sequences(reads), rows_k))
    return TaughtPack(own, tuple(found))
