"""Prepared data for display: examples as text pieces, and length histograms.

Uses the same items as training. Layout is separate.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from typing import NamedTuple

from rlhf_cli.data.templates.turn_spans import num_shared
from rlhf_cli.models.vision.pictures import Picture, PlacedPicture

Decode = Callable[[Sequence[int]], str]

HEAD_TOKENS, TAIL_TOKENS = 120, 40
"""Number of tokens shown at the start and end of a longer stretch."""
_HEAD_RUNS, _TAIL_RUNS = 6, 4
"""Number of stretches shown at the start and end of a text with more of them."""
_CUT_CHARACTER = "\ufffd"
"""Replacement character for incomplete UTF-8 sequences, of at most `_MAX_BYTES` bytes."""
_MAX_BYTES = 4
_NUM_BINS = 10
_COMMON_SHARE = 0.99
"""Share of lengths covered by bins of equal width if the longest are outliers."""


class Piece(NamedTuple):
    """Text of adjacent tokens that are all trained or untrained; or the number of omitted tokens.

    For an image, `text` describes the `picture`.
    """

    text: str
    is_trained: bool
    num_left_out: int = 0
    picture: Picture | None = None


@dataclass(frozen=True)
class PreviewPart:
    """One text of an example: a prompt, a response, or all of it."""

    name: str
    num_tokens: int
    num_trained: int
    pieces: list[Piece]


@dataclass(frozen=True)
class ShownExample:
    """An item as seen by the model; `where` is the file and line of its row, `facts` are additional properties."""

    number: int
    where: str
    parts: list[PreviewPart]
    facts: dict[str, str]


class Bin(NamedTuple):
    """Number of lengths from `low` to `high` inclusive."""

    low: int
    high: int
    num_items: int


def spread(count: int, num_shown: int) -> list[int]:
    """Return at most `num_shown` evenly spaced numbers below `count`, including the first and last."""
    if num_shown == 1 or count <= 1:
        return [0][: min(count, num_shown)]
    num_shown = min(count, num_shown)
    return [round(place * (count - 1) / (num_shown - 1)) for place in range(num_shown)]


def part_of(
    name: str,
    token_ids: Sequence[int],
    is_trained: Sequence[bool],
    decode: Decode,
    *,
    behind: Sequence[int] = (),
    pictures: Sequence[PlacedPicture] = (),
    is_whole: bool = False,
) -> PreviewPart:
    """Split a text into trained and untrained pieces, shortened unless `is_whole`. It follows the tokens `behind`.

    Preceding tokens affect decoding: some tokenizers drop a space at the start of a text. `pictures` are in the text's
    tokens.
    """
    # Decode with the preceding tokens, which decide spaces and split characters.
    ids, first = [*behind, *token_ids], len(behind)
    kinds = [(bool(trained), 0) for trained in is_trained]
    for number, placed in enumerate(pictures, start=1):
        kinds[placed.start : placed.stop] = [(False, number)] * placed.length
    runs: list[tuple[int, int, bool, int]] = []
    for (trained, number), places in groupby(range(len(token_ids)), key=lambda place: kinds[place]):
        listed = list(places)
        runs.append((first + listed[0], first + listed[-1] + 1, trained, number))
    # Show the first and last stretches, and one piece for all between.
    pieces: list[Piece] = []
    hidden = [] if is_whole else runs[_HEAD_RUNS:-_TAIL_RUNS]
    for run in runs:
        start, stop, trained, number = run
        if run in hidden:
            if run == hidden[0]:
                pieces.append(Piece("", False, hidden[-1][1] - hidden[0][0]))
        elif number:
            pieces.append(_described(number, pictures[number - 1]))
        elif is_whole:
            pieces.append(Piece(_text(ids, start, stop, decode), trained))
        else:
            pieces += _pieces(ids, start, stop, trained, decode)
    return PreviewPart(name, len(token_ids), sum(stop - start for start, stop, trained, _ in runs if trained), pieces)


def _described(number: int, placed: PlacedPicture) -> Piece:
    """Describe an image by size and number of tokens."""
    size = f"{placed.picture.width} x {placed.picture.height} pixels"
    return Piece(f"[picture {number}: {size}, {placed.length:,} tokens]", False, picture=placed.picture)


def _pieces(ids: list[int], start: int, stop: int, trained: bool, decode: Decode) -> list[Piece]:
    """Return a stretch of tokens, all trained or untrained, without its middle if it is long."""
    if stop - start <= HEAD_TOKENS + TAIL_TOKENS:
        return [Piece(_text(ids, start, stop, decode), trained)]
    head = _whole_characters(ids, start + HEAD_TOKENS, -1, decode)
    tail = _whole_characters(ids, stop - TAIL_TOKENS, 1, decode)
    return [
        Piece(_text(ids, start, head, decode), trained),
        Piece("", trained, tail - head),
        Piece(_text(ids, tail, stop, decode), trained),
    ]


def _text(ids: list[int], start: int, stop: int, decode: Decode) -> str:
    # Decode both prefixes and subtract, instead of decoding the stretch alone.
    before, whole = decode(ids[:start]) if start else "", decode(ids[:stop])
    return whole[num_shared(before, whole) :]


def _whole_characters(ids: list[int], place: int, step: int, decode: Decode) -> int:
    """Return a position at or near `place` that does not split a character."""
    places = (place + step * number for number in range(_MAX_BYTES))
    return next((near for near in places if not decode(ids[:near]).endswith(_CUT_CHARACTER)), place)


def length_bins(lengths: Mapping[int, int], limit: int) -> list[Bin]:
    """Bin the lengths with a round bin width. No bin spans the limit.

    Outliers share the last bin.
    """
    ordered = sorted(lengths)
    shortest, longest = ordered[0], ordered[-1]
    common = quantile(lengths, _COMMON_SHARE)
    # Outliers would squeeze most lengths into the first bin.
    top = longest if longest <= 2 * common else common
    width = _round_width((top - shortest + 1) / _NUM_BINS)
    starts = {*range(shortest // width * width, top + 1, width), longest + 1}
    if top < longest:
        starts.add(max(starts - {longest + 1}) + width)
    # Lengths above the limit must be in other bins than those below.
    if shortest <= limit < longest:
        starts.add(limit + 1)
    edges = sorted(start for start in starts if start <= longest + 1)
    return [
        Bin(max(low, 1), high - 1, sum(lengths[length] for length in ordered if low <= length < high))
        for low, high in pairwise(edges)
    ]


def quantile(lengths: Mapping[int, int], share: float) -> int:
    """Return the smallest length that covers this share of all lengths."""
    needed, seen = share * sum(lengths.values()), 0
    for length in sorted(lengths):
        seen += lengths[length]
        if seen >= needed:
            return length
    raise AssertionError("no lengths")


def _round_width(least: float) -> int:
    """Return the smallest of 1, 2, 5, 10, 20, ... that is at least `least`."""
    power = 10 ** max(0, math.floor(math.log10(least))) if least > 1 else 1
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power >= least)
