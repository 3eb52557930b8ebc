"""Image files of each kind are read as upright RGB on white, or rejected."""

import io
from typing import Any

import numpy as np
import pytest
from picture_rows import encoded
from PIL import Image
from tiny_vision import random_picture

from rlhf_cli.data.pictures.decoding import PictureFault, pixels_of, size_of

PIXELS = random_picture(6, 10)


def saved(image: Image.Image, form: str = "PNG", **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, form, **options)
    return file.getvalue()


def read(contents: bytes) -> np.ndarray:
    return pixels_of(contents, *size_of(contents))


def test_pictures_are_rgb_whatever_their_mode() -> None:
    image = Image.fromarray(PIXELS)
    np.testing.assert_array_equal(read(saved(image)), PIXELS)
    grey = image.convert("L")
    np.testing.assert_array_equal(read(saved(grey)), np.repeat(np.array(grey)[..., None], 3, axis=2))
    palette = image.convert("P", palette=Image.Palette.ADAPTIVE)
    np.testing.assert_array_equal(read(saved(palette)), np.array(palette.convert("RGB")))
    cmyk = image.convert("CMYK")
    np.testing.assert_array_equal(read(saved(cmyk, "TIFF")), np.array(cmyk.convert("RGB")))


def test_what_is_transparent_is_white() -> None:
    alpha = np.zeros((6, 10), dtype=np.uint8)
    alpha[:3] = 255
    shown = read(saved(Image.fromarray(np.dstack([PIXELS, alpha]))))
    np.testing.assert_array_equal(shown[:3], PIXELS[:3])
    np.testing.assert_array_equal(shown[3:], np.full((3, 10, 3), 255))


def test_a_picture_that_a_camera_turned_is_upright() -> None:
    exif = Image.Exif()
    exif[0x0112] = 6  # the camera was rotated by 90 degrees
    contents = saved(Image.fromarray(PIXELS), exif=exif)
    assert size_of(contents) == (10, 6)
    np.testing.assert_array_equal(read(contents), np.rot90(PIXELS, k=-1))


def test_resizing_is_bicubic_as_in_image_processors() -> None:
    contents = encoded(40, 60)
    resized = Image.open(io.BytesIO(contents)).resize((30, 20), Image.Resampling.BICUBIC)
    np.testing.assert_array_equal(pixels_of(contents, 20, 30), np.array(resized))


ANIMATION = saved(
    Image.fromarray(PIXELS), "GIF", save_all=True, append_images=[Image.fromarray(random_picture(6, 10, seed=1))]
)
BROKEN = {
    "empty": (b"", "is empty"),
    "text": (b"no picture", "is no picture in a format that is read"),
    "drawing": (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n%%EOF\n", "is no picture in a format that is read"),
    "cut PNG": (encoded(40, 60)[:-900], "is broken: "),
    "cut JPEG": (encoded(400, 600, form="JPEG")[:-5000], "is broken: "),
    "animation": (ANIMATION, "has 2 frames, and a picture has one"),
    "16 bits": (saved(Image.fromarray(np.full((4, 4), 40_000, dtype=np.uint16))), "has more than 8 bits a channel"),
    "bomb": (saved(Image.new("1", (10_000, 9_500))), "has more than 89,478,485 pixels"),
    "large bomb": (saved(Image.new("1", (20_000, 10_000))), "has more than 89,478,485 pixels"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_files_that_are_no_single_whole_picture_are_refused(name: str) -> None:
    contents, reason = BROKEN[name]
    with pytest.raises(PictureFault, match=reason):
        size_of(contents)
