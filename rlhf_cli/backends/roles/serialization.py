"""Sends sequences to ranks as a few long arrays, with tokens and images once per iteration.

Pickling thousands of short arrays takes longer than copying their bytes, and grows faster than their number.
"""

import pickle
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, pairwise
from typing import Self

import numpy as np

from rlhf_cli.algorithms.aggregation import StepTotals
from rlhf_cli.data.packing.packs import TokenSequence
from rlhf_cli.data.packing.splitting import split_members
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


_Pictures = dict[int, tuple[PlacedPicture, ...]]
_JoinedColumn = tuple[np.ndarray, np.ndarray | None, np.ndarray]
"""Values, how often each is repeated (None: once), and bounds of sequences."""

_CHUNK_TOKENS = 1 << 18  # a megabyte: few objects for the driver, and little that a node reads for other nodes


@dataclass(frozen=True)
class StoredTokens:
    """Tokens of a sequence in an object store: elements `start` to `stop` of the array that `chunk` refers to."""

    chunk: object
    start: int
    stop: int


def store(sequences: Sequence[TokenSequence], put: Callable[[object], object]) -> list[TokenSequence]:
    """Return the sequences with tokens and images in an object store, from which all ranks read them.

    Images with equal digests are stored once. `put` stores an object and returns a reference.
    """
    pictures: dict[str, Picture] = {}
    found: list[TokenSequence] = []
    for part in split_members(sequences, list(map(len, sequences)), max_tokens=_CHUNK_TOKENS):
        token_ids, bounds = _joined([sequence.token_ids for sequence in part])
        chunk = put(token_ids)
        for sequence, (start, stop) in zip(part, pairwise(bounds.tolist()), strict=True):
            placed = tuple(replace(one, picture=_stored(one.picture, pictures, put)) for one in sequence.pictures)
            found.append(replace(sequence, pictures=placed, stored=StoredTokens(chunk, start, stop)))
    return found


def _stored(picture: Picture, known: dict[str, Picture], put: Callable[[object], object]) -> Picture:
    if picture.digest not in known:
        known[picture.digest] = replace(picture, read=_StoredRead(put(picture.read)))
    return known[picture.digest]


@dataclass(frozen=True)
class _StoredRead:
    """`Picture.read` that is in Ray's object store, with the encoded image."""

    reference: object

    def __call__(self) -> np.ndarray:
        # Ranks import this module before Ray.
        import ray

        read: Callable[[], np.ndarray] = ray.get(self.reference)
        return read()


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

    @property
    def chunks(self) -> list[object]:
        """References to the stored tokens, each once."""
        sequences = chain.from_iterable(chain.from_iterable(self.steps))
        return list({sequence.stored.chunk: None for sequence in sequences if sequence.stored is not None})


@dataclass(frozen=True)
class SentWork:
    """`RankWork` as it is sent. The stored tokens are not in it: Ray reads `RankWork.chunks` on the rank's node.

    - `token_ids`: concatenated tokens of sequences that are not stored.
    - `places`: per sequence its chunk (the last is `token_ids`), start and end there.
    - `loss_masks`: concatenated masks, eight tokens per byte.
    - `pictures`: by sequence number.
    - `experts`: None without routing replay. `teacher_prompts`: None if teachers read the same prompts.
    - `steps`: sequence numbers.
    """

    token_ids: np.ndarray
    places: list[tuple[int, int, int]]
    loss_masks: np.ndarray
    pictures: _Pictures
    columns: dict[str, _JoinedColumn]
    experts: _JoinedColumn | None
    teacher_prompts: _JoinedColumn | None
    steps: list[list[list[int]]]
    totals: list[StepTotals]

    @classmethod
    def of(cls, work: RankWork) -> Self:
        """Join the sequences of the work."""
        # By identity, because arrays have no hash.
        numbers: dict[int, int] = {}
        sequences: list[TokenSequence] = []
        for sequence in chain.from_iterable(chain.from_iterable(work.steps)):
            if numbers.setdefault(id(sequence), len(sequences)) == len(sequences):
                sequences.append(sequence)
        names = list(sequences[0].columns) if sequences else []
        assert all(list(one.columns) == names for one in sequences), "sequences of one update differ in their columns"
        chunk_numbers = {chunk: number for number, chunk in enumerate(work.chunks)}
        own, places = list[np.ndarray](), list[tuple[int, int, int]]()
        num_own = 0
        for sequence in sequences:
            stored = sequence.stored
            if stored is not None:
                places.append((chunk_numbers[stored.chunk], stored.start, stored.stop))
                continue
            own.append(sequence.token_ids)
            places.append((len(chunk_numbers), num_own, num_own + len(sequence)))
            num_own += len(sequence)
        return cls(
            _joined(own)[0],
            places,
            np.packbits(_joined([sequence.loss_mask for sequence in sequences])[0].astype(bool, copy=False)),
            _pictures(sequences),
            {name: _joined_column([sequence.columns[name] for sequence in sequences]) for name in names},
            _optional([sequence.routed_experts for sequence in sequences]),
            _optional([sequence.teacher_prompt for sequence in sequences]),
            [[[numbers[id(sequence)] for sequence in members] for members in step] for step in work.steps],
            work.totals,
        )

    def work(self, chunks: Sequence[np.ndarray]) -> RankWork:
        """Return the work, with the arrays that `RankWork.chunks` refer to."""
        arrays = [*chunks, self.token_ids]
        bounds = np.cumsum([0, *(stop - start for _, start, stop in self.places)])
        masks = _split(np.unpackbits(self.loss_masks, count=int(bounds[-1])).astype(bool), bounds)
        columns = {name: _split_column(column) for name, column in self.columns.items()}
        experts, prompts = (
            [None] * len(masks) if column is None else _split_column(column)
            for column in (self.experts, self.teacher_prompts)
        )
        sequences = [
            TokenSequence(
                arrays[chunk][start:stop],
                masks[number],
                self.pictures.get(number, ()),
                {name: values[number] for name, values in columns.items()},
                experts[number],
                prompts[number],
            )
            for number, (chunk, start, stop) in enumerate(self.places)
        ]
        return RankWork([[[sequences[n] for n in members] for members in step] for step in self.steps], self.totals)


def _optional(arrays: Sequence[np.ndarray | None]) -> _JoinedColumn | None:
    """Return joined arrays, empty for a sequence without one, such as the experts of an episode without a turn; None if
    no sequence has any.
    """
    known = [array for array in arrays if array is not None]
    return _joined_column([known[0][:0] if array is None else array for array in arrays]) if known else None


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


def _joined(arrays: Sequence[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """Return (concatenated arrays, bounds)."""
    bounds = np.cumsum([0, *map(len, arrays)])
    return (np.concatenate(arrays) if arrays else np.zeros(0)), bounds


def _joined_column(arrays: Sequence[np.ndarray]) -> _JoinedColumn:
    # An advantage of a whole response is a single value in memory, so send it as one.
    if arrays and all(array.size and array.strides == (0,) for array in arrays):
        counts = np.array([array.size for array in arrays])
        return np.array([array[0] for array in arrays]), counts, np.cumsum([0, *counts])
    values, bounds = _joined(arrays)
    return values, None, bounds


def _split_column(column: _JoinedColumn) -> list[np.ndarray]:
    values, counts, bounds = column
    return _split(values if counts is None else np.repeat(values, counts), bounds)


def _split(joined: np.ndarray, bounds: np.ndarray) -> list[np.ndarray]:
    return [joined[start:stop] for start, stop in pairwise(bounds.tolist())]
