"""How sequences and samples travel to ranks: as a few long arrays.

A pickler takes longer over thousands of short arrays than their bytes take, and ever longer the more of them there are.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np

from rlhf_cli.backends.roles.settings import UpdateStep
from rlhf_cli.data.packing.packs import TokenSequence
from rlhf_cli.models.vision.pictures import Picture, PlacedPicture

Reduced = tuple[Callable[..., object], tuple[object, ...]]
Pictures = dict[int, tuple[PlacedPicture, ...]]
JoinedColumns = dict[str, tuple[np.ndarray, np.ndarray]]
JoinedSequences = tuple[np.ndarray, np.ndarray, np.ndarray, Pictures, JoinedColumns]
"""Token ids and loss masks end to end, the bounds between them, the pictures by number of the sequence, and the columns
end to end with their bounds."""


class MicroBatches(list[list[TokenSequence]]):
    """The micro-batches of sequences of a rank; a list of lists again at the receiver."""

    def __reduce__(self) -> Reduced:
        sizes = [len(members) for members in self]
        return _micro_batches, (sizes, _joined_sequences([sequence for members in self for sequence in members]))


class UpdateSteps(list[UpdateStep]):
    """The optimizer steps of a rank, whose samples have the same columns; a list at the receiver.

    A sample of several steps travels once.
    """

    def __reduce__(self) -> Reduced:
        numbers: dict[int, int] = {}
        samples: list[TokenSequence] = []
        steps = []
        for step in self:
            for sample in (sample for members in step.micro_batches for sample in members):
                if numbers.setdefault(id(sample), len(samples)) == len(samples):
                    samples.append(sample)
            steps.append(([[numbers[id(sample)] for sample in members] for members in step.micro_batches], step.totals))
        return _steps, (_joined_sequences(samples), steps)


def _micro_batches(sizes: Sequence[int], joined: JoinedSequences) -> list[list[TokenSequence]]:
    sequences = iter(_split_sequences(*joined))
    return [[next(sequences) for _ in range(size)] for size in sizes]


def _steps(joined: JoinedSequences, steps: Sequence[tuple[Any, Any]]) -> list[UpdateStep]:
    samples = _split_sequences(*joined)
    return [UpdateStep([[samples[n] for n in members] for members in bins], totals) for bins, totals in steps]


def _joined_sequences(sequences: Sequence[TokenSequence]) -> JoinedSequences:
    names = list(sequences[0].columns) if sequences else []
    assert all(list(one.columns) == names for one in sequences), "sequences of one update differ in their columns"
    token_ids, bounds = _joined([sequence.token_ids for sequence in sequences])
    loss_mask, _ = _joined([sequence.loss_mask for sequence in sequences])
    columns = {name: _joined([sequence.columns[name] for sequence in sequences]) for name in names}
    return token_ids, loss_mask, bounds, _pictures(sequences), columns


def _pictures(sequences: Sequence[TokenSequence]) -> Pictures:
    """Return the pictures by number of the sequence, equal ones as one object, whose pixels travel once."""
    known: dict[Picture, Picture] = {}
    return {
        number: tuple(
            replace(placed, picture=known.setdefault(placed.picture, placed.picture)) for placed in sequence.pictures
        )
        for number, sequence in enumerate(sequences)
        if sequence.pictures
    }


def _split_sequences(
    token_ids: np.ndarray, loss_mask: np.ndarray, bounds: np.ndarray, pictures: Pictures, columns: JoinedColumns
) -> list[TokenSequence]:
    split = {name: _split(*column) for name, column in columns.items()}
    pieces = enumerate(zip(_split(token_ids, bounds), _split(loss_mask, bounds), strict=True))
    return [
        TokenSequence(ids, mask, pictures.get(number, ()), {name: values[number] for name, values in split.items()})
        for number, (ids, mask) in pieces
    ]


def _joined(arrays: Sequence[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """Return (the arrays end to end, the bounds between them)."""
    bounds = np.cumsum([0, *(array.size for array in arrays)])
    return (np.concatenate(arrays) if arrays else np.zeros(0)), bounds


def _split(joined: np.ndarray, bounds: np.ndarray) -> list[np.ndarray]:
    return [joined[start:stop] for start, stop in pairwise(bounds.tolist())]
