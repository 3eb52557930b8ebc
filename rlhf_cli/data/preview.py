"""Prepared data in a form that people can look at: examples as pieces of text, and lengths in bins.

Trained tokens are read from the items that training itself gets. The layout is left to others.
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
"""Tokens shown at both ends of a stretch that is longer than both together."""
HEAD_RUNS, TAIL_RUNS = 6, 4
"""Stretches shown at both ends of a text that has more of them."""
CUT_CHARACTER = "\ufffd"
"""What bytes of an incomplete character are decoded to, of which there are at most `MAX_BYTES`."""
MAX_BYTES = 4
NUM_BINS = 10
COMMON_SHARE = 0.99
"""Share of the lengths that bins of equal width cover if the longest are far away."""


class Piece(NamedTuple):
    """Text of neighbouring tokens, which carry loss or do not; or no text, and the number of tokens left out.

    The text of a picture's tokens describes the `picture`.
    """

    text: str
    is_trained: bool
    num_left_out: int = 0
    picture: Picture | None = None


@dataclass(frozen=True)
class PreviewPart:
    """One text of an example: a prompt, a response or all of it."""

    name: str
    num_tokens: int
    num_trained: int
    pieces: list[Piece]


@dataclass(frozen=True)
class ShownExample:
    """An item as the model gets it; `where` is file and line of its row, `facts` what belongs to it besides tokens."""

    number: int
    where: str
    parts: list[PreviewPart]
    facts: dict[str, str]


class Bin(NamedTuple):
    """Lengths from `low` to `high`, both included, and how many there are."""

    low: int
    high: int
    num_items: int


def spread(count: int, num_shown: int) -> list[int]:
    """Return at most `num_shown` of the numbers below `count`, evenly apart, first and last among them."""
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
    """Return a text with its trained pieces, shortened if it is long, unless `is_whole`. It follows the tokens `behind`
    it in a sequence.

    The tokens before a piece decide how its text is decoded: some tokenizers drop a space at the start of a text. The
    `pictures` stand in the tokens of the text.
    """
    ids, first = [*behind, *token_ids], len(behind)
    kinds = [(bool(trained), 0) for trained in is_trained]
    for number, placed in enumerate(pictures, start=1):
        kinds[placed.start : placed.stop] = [(False, number)] * placed.length
    runs: list[tuple[int, int, bool, int]] = []
    for (trained, number), places in groupby(range(len(token_ids)), key=lambda place: kinds[place]):
        listed = list(places)
        runs.append((first + listed[0], first + listed[-1] + 1, trained, number))
    pieces: list[Piece] = []
    hidden = [] if is_whole else runs[HEAD_RUNS:-TAIL_RUNS]
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
    """Return a piece with the size of a picture and its tokens."""
    size = f"{placed.picture.width} x {placed.picture.height} pixels"
    return Piece(f"[picture {number}: {size}, {placed.length:,} tokens]", False, picture=placed.picture)


def _pieces(ids: list[int], start: int, stop: int, trained: bool, decode: Decode) -> list[Piece]:
    """Return one stretch of tokens, all trained or none, without its middle if it is long."""
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
    before, whole = decode(ids[:start]) if start else "", decode(ids[:stop])
    return whole[num_shared(before, whole) :]


def _whole_characters(ids: list[int], place: int, step: int, decode: Decode) -> int:
    """Return the place, or one near it, at which no character is cut in two."""
    places = (place + step * number for number in range(MAX_BYTES))
    return next((near for near in places if not decode(ids[:near]).endswith(CUT_CHARACTER)), place)


def length_bins(lengths: Mapping[int, int], limit: int) -> list[Bin]:
    """Return the counted lengths in bins of one round width; no bin has lengths on both sides of the limit.

    A few lengths far above all others share the last bin.
    """
    ordered = sorted(lengths)
    shortest, longest = ordered[0], ordered[-1]
    common = quantile(lengths, COMMON_SHARE)
    top = longest if longest <= 2 * common else common
    width = _round_width((top - shortest + 1) / NUM_BINS)
    starts = {*range(shortest // width * width, top + 1, width), longest + 1}
    if top < longest:
        starts.add(max(starts - {longest + 1}) + width)
    if shortest <= limit < longest:
        starts.add(limit + 1)
    edges = sorted(start for start in starts if start <= longest + 1)
    return [
        Bin(max(low, 1), high - 1, sum(lengths[length] for length in ordered if low <= length < high))
        for low, high in pairwise(edges)
    ]


def quantile(lengths: Mapping[int, int], share: float) -> int:
    """Return the smallest length that this share of all lengths does not exceed."""
    needed, seen = share * sum(lengths.values()), 0
    for length in sorted(lengths):
        seen += lengths[length]
        if seen >= needed:
            return length
    raise AssertionError("no lengths")


def _round_width(least: float) -> int:
    """Return the smallest of 1, 2, 5, 10, 20, ... that is not below `least`."""
    power = 10 ** max(0, math.floor(math.log10(least))) if least > 1 else 1
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power >= least)
