"""Questions about images of squares, to test vision-language models: small, verifiable, with disjoint splits."""

import itertools
import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image

_SIDE, _CELL, _SQUARE = 56, 14, 11
"""Size in pixels of an image, a grid cell, and a square."""
_MOST_SQUARES = 4
COLOURS = {"red": (220, 40, 40), "green": (40, 180, 60), "blue": (50, 80, 220), "yellow": (230, 210, 40)}
_COUNTS = tuple(str(number) for number in range(1, _MOST_SQUARES + 1))
QUESTIONS = {"colour": "Which colour do the squares have?", "count": "How many squares are there?"}
ANSWERS = {"colour": tuple(COLOURS), "count": _COUNTS}
"""Answers per kind; four each, so that random guesses are correct in a quarter of cases."""
NUM_HELD_OUT, NUM_TRAIN = 400, 2_000


@dataclass(frozen=True)
class _Squares:
    """Image of squares with one color on white, uint8 [_SIDE, _SIDE, 3], and the correct answers."""

    pixels: np.ndarray
    answers: dict[str, str]


def write_questions(folder: Path, *, seed: int) -> None:
    """Write train.jsonl, held_out_colour.jsonl and held_out_count.jsonl, with images in images/.

    Rows have the columns `images`, `prompt`, `answer` and `demonstration`. All images are different. `answer` is
    correct; `demonstration` is a random answer of the right kind.
    """
    rng = random.Random(seed)
    pictures = _different_pictures(rng)
    (folder / "images").mkdir(parents=True, exist_ok=True)
    for kind in QUESTIONS:
        _write(folder / f"held_out_{kind}.jsonl", [kind] * (NUM_HELD_OUT // 2), pictures, rng)
    _write(folder / "train.jsonl", list(QUESTIONS) * (NUM_TRAIN // 2), pictures, rng)


def _write(path: Path, kinds: list[str], pictures: Iterator[_Squares], rng: random.Random) -> None:
    rows = []
    for number, (kind, squares) in enumerate(zip(kinds, pictures, strict=False)):
        image = f"images/{path.stem}_{number:04}.png"
        Image.fromarray(squares.pixels).save(path.parent / image)
        rows.append(
            {
                "images": [image],
                "prompt": f"<image>{QUESTIONS[kind]}",
                "answer": squares.answers[kind],
                "demonstration": rng.choice(ANSWERS[kind]),
            }
        )
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def _different_pictures(rng: random.Random) -> Iterator[_Squares]:
    seen: set[bytes] = set()
    while True:
        squares = _squares(rng)
        if squares.pixels.tobytes() not in seen:
            seen.add(squares.pixels.tobytes())
            yield squares


def _squares(rng: random.Random) -> _Squares:
    cells = list(itertools.product(range(0, _SIDE, _CELL), repeat=2))
    count, colour = rng.choice(_COUNTS), rng.choice(list(COLOURS))
    # White background, as for transparent images.
    pixels = np.full((_SIDE, _SIDE, 3), 255, dtype=np.uint8)
    for row, column in rng.sample(cells, int(count)):
        # A random offset within the cell, so that squares never overlap.
        top, left = row + rng.randint(0, _CELL - _SQUARE), column + rng.randint(0, _CELL - _SQUARE)
        pixels[top : top + _SQUARE, left : left + _SQUARE] = COLOURS[colour]
    return _Squares(pixels, {"colour": colour, "count": count})
