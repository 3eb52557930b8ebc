"""Sends sequences to ranks as a few long arrays.

Pickling thousands of short arrays takes longer than copying their bytes, and grows faster than their number.
"""

import pickle
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

import numpy as np

from rlhf_cli.algorithms.aggregation import StepTotals
from rlhf_cli.data.packing.packs import TokenSequence
from rlhf_cli.models.vision.pictures import Picture, PlacedPicture


class PickledCall:
    """A function that is pickled once, however many workers it is sent to. They receive the function itself."""

    def __init__(self, function: Callable[..., object]) -> None:
        # Ranks import this module before Ray.
        from ray import cloudpickle

        self._function = function
        self._pickled = cloudpickle.dumps(function)

    def __call__(self, *args: object) -> object:
        """Call the function."""
        return self._function(*args)

    def __reduce__(self) -> tuple[Callable[[bytes], object], tuple[bytes]]:
        return pickle.loads, (self._pickled,)


_Reduced = tuple[Callable[..., object], tuple[object, ...]]
_Pictures = dict[int, tuple[PlacedPicture, ...]]
_JoinedColumns = dict[str, tuple[np.ndarray, np.ndarray]]
_JoinedExperts = tuple[np.ndarray, np.ndarray] | None
_JoinedSequences = tuple[np.ndarray, np.ndarray, np.ndarray, _Pictures, _JoinedColumns, _JoinedExperts]
"""Concatenated token ids and loss masks, sequence bounds, images by sequence number, and concatenated columns and
experts with bounds."""


@dataclass(frozen=True)
class RankWork:
    """Work for one rank: micro-batches per optimizer step, with totals over all ranks. A forward pass is one step
    without totals.

    All sequences must have the same columns. A sequence in multiple steps is sent once.

    Example: `RankWork([[[a, b], [c]]], [StepTotals(num_tokens=9, num_sequences=5)])` is a step with two micro-batches.
    This rank trains on three sequences, and the other ranks on two.
    """

    steps: list[list[list[TokenSequence]]]
    totals: list[StepTotals] = field(default_factory=list)

    def __reduce__(self) -> _Reduced:
        # By identity, because arrays have no hash.
        numbers: dict[int, int] = {}
        sequences: list[TokenSequence] = []
        for sequence in (sequence for step in self.steps for members in step for sequence in members):
            if numbers.setdefault(id(sequence), len(sequences)) == len(sequences):
                sequences.append(sequence)
        steps = [[[numbers[id(sequence)] for sequence in members] for members in step] for step in self.steps]
        return _rank_work, (_joined_sequences(sequences), steps, self.totals)


def _rank_work(joined: _JoinedSequences, steps: list[list[list[int]]], totals: list[StepTotals]) -> RankWork:
    sequences = _split_sequences(*joined)
    return RankWork([[[sequences[number] for number in members] for members in step] for step in steps], totals)


def _joined_sequences(sequences: Sequence[TokenSequence]) -> _JoinedSequences:
    names = list(sequences[0].columns) if sequences else []
    assert all(list(one.columns) == names for one in sequences), "sequences of one update differ in their columns"
    token_ids, bounds = _joined([sequence.token_ids for sequence in sequences])
    loss_mask, _ = _joined([sequence.loss_mask for sequence in sequences])
    columns = {name: _joined([sequence.columns[name] for sequence in sequences]) for name in names}
    return token_ids, loss_mask, bounds, _pictures(sequences), columns, _experts(sequences)


def _experts(sequences: Sequence[TokenSequence]) -> _JoinedExperts:
    """Return joined experts; empty for a sequence without any, such as an episode without a turn."""
    known = [sequence.routed_experts for sequence in sequences if sequence.routed_experts is not None]
    if not known:
        return None
    return _joined([known[0][:0] if one.routed_experts is None else one.routed_experts for one in sequences])


def _pictures(sequences: Sequence[TokenSequence]) -> _Pictures:
    """Return images by sequence number. Equal images become one object, so that pixels are sent once."""
    known: dict[Picture, Picture] = {}
    return {
        number: tuple(
            replace(placed, picture=known.setdefault(placed.picture, placed.picture)) for placed in sequence.pictures
        )
        for number, sequence in enumerate(sequences)
        if sequence.pictures
    }


def _split_sequences(
    token_ids: np.ndarray,
    loss_mask: np.ndarray,
    bounds: np.ndarray,
    pictures: _Pictures,
    columns: _JoinedColumns,
    experts: _JoinedExperts,
) -> list[TokenSequence]:
    split = {name: _split(*column) for name, column in columns.items()}
    chosen = [None] * (len(bounds) - 1) if experts is None else _split(*experts)
    pieces = enumerate(zip(_split(token_ids, bounds), _split(loss_mask, bounds), chosen, strict=True))
    return [
        TokenSequence(
            ids, mask, pictures.get(number, ()), {name: values[number] for name, values in split.items()}, own
        )
        for number, (ids, mask, own) in pieces
    ]


def _joined(arrays: Sequence[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """Return (concatenated arrays, bounds)."""
    bounds = np.cumsum([0, *map(len, arrays)])
    return (np.concatenate(arrays) if arrays else np.zeros(0)), bounds


def _split(joined: np.ndarray, bounds: np.ndarray) -> list[np.ndarray]:
    return [joined[start:stop] for start, stop in pairwise(bounds.tolist())]
