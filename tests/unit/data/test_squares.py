"""Questions about images of squares: the answers match the images, and splits share no images."""

import json
from collections import Counter

import numpy as np
import pytest
from PIL import Image

from rlhf_cli.data.squares import ANSWERS, COLOURS, NUM_HELD_OUT, NUM_TRAIN, QUESTIONS, write_questions


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("squares")
    write_questions(path, seed=1)
    return path


def rows_of(folder):
    return {
        name: [json.loads(line) for line in (folder / f"{name}.jsonl").read_text().splitlines()]
        for name in ("train", "held_out_colour", "held_out_count")
    }


def squares_in(pixels, colour):
    """Count the squares of a colour, which are filled and do not touch."""
    area = (pixels == np.array(COLOURS[colour])).all(-1).sum()
    assert area % 11**2 == 0
    return area // 11**2


def test_answers_are_on_the_pictures(folder):
    for row in [row for rows in rows_of(folder).values() for row in rows][::7]:
        pixels = np.array(Image.open(folder / row["images"][0]))
        counts = {colour: squares_in(pixels, colour) for colour in COLOURS}
        (colour,) = [colour for colour, count in counts.items() if count]
        asks_for_colour = row["prompt"].endswith(QUESTIONS["colour"])
        assert row["answer"] == (colour if asks_for_colour else str(counts[colour]))


def test_every_row_has_a_picture_of_its_own(folder):
    rows = rows_of(folder)
    assert [len(found) for found in rows.values()] == [NUM_TRAIN, NUM_HELD_OUT // 2, NUM_HELD_OUT // 2]
    contents = [(folder / row["images"][0]).read_bytes() for found in rows.values() for row in found]
    assert len(set(contents)) == len(contents)


def test_demonstrations_are_guesses_of_the_right_kind(folder):
    train = rows_of(folder)["train"]
    for kind, answers in ANSWERS.items():
        written = Counter(row["demonstration"] for row in train if row["prompt"].endswith(QUESTIONS[kind]))
        assert set(written) == set(answers)
    right = sum(row["demonstration"] == row["answer"] for row in train)
    assert 0.2 < right / NUM_TRAIN < 0.3
