"""Sends sequences to ranks as a few long arrays. Tokens, images and results of other ranks are read from the store.

Pickling thousands of short arrays takes longer than copying their bytes, and grows faster than their number.
"""

import pickle
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate, chain, pairwise
from typing import Any, Self

import numpy as np

from rlhf_cli.algorithms.aggregation import StepTotals
from rlhf_cli.data.packing.packs import TOKEN_IDS, TokenSequence
from rlhf_cli.data.packing.splitting import split_members
from rlhf_cli.data.stored_arrays import Column, StoredArray, StoredChunk
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

_CHUNK_TOKENS = 1 << 18  # a megabyte: few objects for the driver, and little that a node reads for other nodes


def store_arrays(arrays: Sequence[np.ndarray], put: Callable[[object], object]) -> list[StoredArray]:
    """Return the arrays in an object store, from which all ranks read them. Several share a chunk.

    `put` stores an object and returns a reference.
    """
    found: list[StoredArray] = []
    for part in split_members(arrays, list(map(len, arrays)), max_tokens=_CHUNK_TOKENS) if len(arrays) else ():
        found += stored_parts(StoredChunk(put(np.concatenate(part)), read_stored), map(len, part))
    return found


def stored_parts(chunk: StoredChunk, lengths: Iterable[int]) -> list[StoredArray]:
    """Split a chunk into consecutive arrays."""
    return [StoredArray(chunk, start, stop) for start, stop in pairwise(accumulate(lengths, initial=0))]


def store(sequences: Sequence[TokenSequence], put: Callable[[object], object]) -> list[TokenSequence]:
    """Return the sequences with tokens and images in an object store, as `store_arrays`.

    Images with equal digests are stored once.
    """
    pictures: dict[str, Picture] = {}
    found: list[TokenSequence] = []
    tokens = store_arrays([sequence.token_ids for sequence in sequences], put)
    for sequence, stored in zip(sequences, tokens, strict=True):
        placed = tuple(replace(one, picture=_stored(one.picture, pictures, put)) for one in sequence.pictures)
        found.append(replace(sequence, pictures=placed, stored={TOKEN_IDS: stored}))
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
        read: Callable[[], np.ndarray] = read_stored(self.reference)
        return read()


def read_stored(reference: Any) -> Any:
    """Return an object from Ray's object store."""
    # Ranks import this module before Ray.
    import ray

    return ray.get(reference)


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

    @cached_property
    def chunk_numbers(self) -> dict[StoredChunk, int]:
        """Chunks with arrays of the sequences, and their numbers."""
        sequences = chain.from_iterable(chain.from_iterable(self.steps))
        chunks = dict.fromkeys(array.chunk for sequence in sequences for array in sequence.stored.values())
        return {chunk: number for number, chunk in enumerate(chunks)}

    @property
    def chunks(self) -> list[object]:
        """References to the chunks with arrays of the sequences, each once."""
        return [chunk.reference for chunk in self.chunk_numbers]


@dataclass(frozen=True)
class SentArrays:
    """Arrays as they are sent. Those that are stored are not in it.

    - `values`: concatenated arrays that are not stored.
    - `counts`: how often each value is repeated; None: once.
    - `places`: per array its chunk (the last is `values`), start and end there, int64 [S, 3].
    """

    values: np.ndarray
    counts: np.ndarray | None
    places: np.ndarray

    @classmethod
    def of(cls, arrays: Sequence[Column], chunks: Mapping[StoredChunk, int]) -> Self:
        """Join the arrays. `chunks` are the numbers of the chunks."""
        own, places, end = list[np.ndarray](), list[tuple[int, int, int]](), 0
        for array in arrays:
            if isinstance(array, StoredArray):
                places.append((chunks[array.chunk], array.start, array.stop))
                continue
            own.append(array)
            places.append((len(chunks), end, end + len(array)))
            end += len(array)
        return cls(*_joined(own), np.array(places, dtype=np.int64).reshape(-1, 3))

    def arrays(self, chunks: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Return the arrays, given all chunks."""
        joined = [*chunks, self.values if self.counts is None else np.repeat(self.values, self.counts)]
        return [joined[chunk][start:stop] for chunk, start, stop in self.places.tolist()]


def _joined(arrays: Sequence[np.ndarray]) -> tuple[np.ndarray, np.ndarray | None]:
    """Return (values, how often each is repeated or None)."""
    # An advantage of a whole response is a single value in memory, so send it as one.
    if arrays and all(array.size and array.strides == (0,) for array in arrays):
        return np.array([array[0] for array in arrays]), np.array([array.size for array in arrays])
    return (np.concatenate(arrays) if arrays else np.zeros(0)), None


@dataclass(frozen=True)
class SentColumns:
    """Columns of one array per sample, as they are sent."""

    columns: dict[str, SentArrays]

    @classmethod
    def of(cls, columns: Mapping[str, Sequence[Column]]) -> tuple[Self, list[object]]:
        """Return the columns, and references to the chunks that `arrays` needs."""
        stored = (one for column in columns.values() for one in column if isinstance(one, StoredArray))
        chunks = {chunk: number for number, chunk in enumerate(dict.fromkeys(one.chunk for one in stored))}
        sent = {name: SentArrays.of(column, chunks) for name, column in columns.items()}
        return cls(sent), [chunk.reference for chunk in chunks]

    def arrays(self, chunks: Sequence[np.ndarray]) -> dict[str, list[np.ndarray]]:
        """Return the columns, given the chunks."""
        return {name: column.arrays(chunks) for name, column in self.columns.items()}


@dataclass(frozen=True)
class SentWork:
    """`RankWork` as it is sent. Stored arrays are not in it: Ray reads `RankWork.chunks` on the rank's node.

    - `loss_masks`: concatenated masks, eight tokens per byte.
    - `pictures`: by sequence number.
    - `experts`: None without routing replay. `teachers`: numbers of the teachers.
    - `teacher_tokens`, `teacher_masks`, `teacher_rows`: sequences of teachers, empty if they read the student's; None
      if they read all of the student's.
    - `steps`: sequence numbers.
    """

    token_ids: SentArrays
    loss_masks: np.ndarray
    pictures: _Pictures
    columns: dict[str, SentArrays]
    experts: SentArrays | None
    teachers: list[int]
    teacher_tokens: SentArrays | None
    teacher_masks: SentArrays | None
    teacher_rows: SentArrays | None
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
        all_columns = [sequence.all_columns for sequence in sequences]
        names = all_columns[0].keys() if all_columns else ()
        assert all(one.keys() == names for one in all_columns), "sequences of one update differ in their columns"
        masks = [sequence.loss_mask for sequence in sequences]
        teachers_read = [sequence.teacher_reads for sequence in sequences]
        return cls(
            SentArrays.of([one.stored.get(TOKEN_IDS, one.token_ids) for one in sequences], work.chunk_numbers),
            np.packbits(np.concatenate(masks or [np.zeros(0)]).astype(bool, copy=False)),
            _pictures(sequences),
            {name: SentArrays.of([one[name] for one in all_columns], work.chunk_numbers) for name in names},
            _optional([sequence.routed_experts for sequence in sequences]),
            [sequence.teacher for sequence in sequences],
            _optional([None if read is None else read.token_ids for read in teachers_read]),
            _optional([None if read is None else read.loss_mask for read in teachers_read]),
            _optional([sequence.teacher_rows for sequence in sequences]),
            [[[numbers[id(sequence)] for sequence in members] for members in step] for step in work.steps],
            work.totals,
        )

    def work(self, chunks: Sequence[np.ndarray]) -> RankWork:
        """Return the work, with the arrays that `RankWork.chunks` refer to."""
        token_ids = self.token_ids.arrays(chunks)
        bounds = np.cumsum([0, *map(len, token_ids)])
        masks = np.split(np.unpackbits(self.loss_masks, count=int(bounds[-1])).astype(bool), bounds[1:-1])
        columns = {name: column.arrays(chunks) for name, column in self.columns.items()}
        experts, read, targets, rows = (
            [None] * len(token_ids) if sent is None else sent.arrays(())
            for sent in (self.experts, self.teacher_tokens, self.teacher_masks, self.teacher_rows)
        )
        sequences = [
            TokenSequence(
                own,
                masks[number],
                self.pictures.get(number, ()),
                {name: values[number] for name, values in columns.items()},
                experts[number],
                self.teachers[number],
                _teachers_sequence(read[number], targets[number]),
                rows[number],
            )
            for number, own in enumerate(token_ids)
        ]
        return RankWork([[[sequences[n] for n in members] for members in step] for step in self.steps], self.totals)


def _teachers_sequence(token_ids: np.ndarray | None, loss_mask: np.ndarray | None) -> TokenSequence | None:
    """Return what a teacher reads; None if it reads the sequence itself."""
    if token_ids is None or loss_mask is None or not token_ids.size:
        return None
    return TokenSequence(token_ids, loss_mask)


def _optional(arrays: Sequence[np.ndarray | None]) -> SentArrays | None:
    """Return joined arrays, empty for a sequence without one, such as the experts of an episode without a turn; None if
    no sequence has any.
    """
    known = [array for array in arrays if array is not None]
    return SentArrays.of([known[0][:0] if array is None else array for array in arrays], {}) if known else None


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
