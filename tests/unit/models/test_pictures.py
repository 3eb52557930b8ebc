"""Images in prompts and in transfers between processes."""

import pickle

import numpy as np

from rlhf_cli.models.vision.pictures import Picture, PlacedPicture, picture_of_pixels, unexpanded


def test_a_message_has_the_pixels_of_a_picture_once():
    picture = picture_of_pixels("abc", np.full((8, 8, 3), 7, dtype=np.uint8))
    once, often = pickle.dumps([picture]), pickle.dumps([picture] * 50)
    assert len(often) < len(once) + 500
    first, *others = pickle.loads(often)
    assert all(other is first for other in others)
    assert first == picture
    assert np.array_equal(first.pixels, picture.pixels)


def test_a_picture_keeps_no_pixels():
    reads = []

    def read():
        reads.append(np.zeros((8, 8, 3), dtype=np.uint8))
        return reads[-1]

    picture = Picture("abc", 8, 8, read)
    assert not reads
    assert picture.pixels is reads[0]
    assert picture.pixels is reads[1]


def test_a_prompt_for_an_engine_has_one_placeholder_a_picture():
    picture = Picture("abc", 8, 8, lambda: np.zeros((8, 8, 3), dtype=np.uint8))
    pictures = (PlacedPicture(picture, 1, 3, token=9), PlacedPicture(picture, 5, 4, token=9))
    assert unexpanded([1, 9, 9, 9, 2, 8, 9, 9, 8, 3], pictures) == [1, 9, 2, 9, 3]
    assert unexpanded([1, 2], ()) == [1, 2]
