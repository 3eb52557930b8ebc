"""Small copies of the pictures in the first samples of each step, for people who look at the samples."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from PIL import Image

if TYPE_CHECKING:
    from rlhf_cli.models.vision.pictures import Picture  # imports torch, for which a tracker has no use

FOLDER = "sample_images"
"""The folder of a run with the copies."""
IMAGES = "images"
"""The entry of a sample that names its own."""
LONGEST_SIDE = 256
"""Pixels of a copy; larger pictures are made smaller."""
WITH_IMAGES = 16
"""Samples of a step that get copies: the report shows no more."""


class Thumbnails:
    """The folder `sample_images/` of a run. A picture that many samples have is there once."""

    def __init__(self, output: Path) -> None:
        self._output = output

    def rows(self, samples: Sequence[Mapping[str, object]]) -> list[Mapping[str, object]]:
        """Return the samples with paths in place of their entry `images`, a sequence of `Picture`; those behind the
        first few have no such entry.
        """
        return [self._row(sample, is_shown=number < WITH_IMAGES) for number, sample in enumerate(samples)]

    def _row(self, sample: Mapping[str, object], *, is_shown: bool) -> Mapping[str, object]:
        pictures = sample.get(IMAGES)
        if not isinstance(pictures, Sequence):
            return sample
        paths = {IMAGES: [self._path(picture) for picture in pictures]} if is_shown else {}
        return {name: value for name, value in sample.items() if name != IMAGES} | paths

    def _path(self, picture: "Picture") -> str:
        path = f"{FOLDER}/{picture.digest}.png"
        if not (self._output / path).exists():
            (self._output / FOLDER).mkdir(exist_ok=True)
            image = Image.fromarray(picture.pixels)
            image.thumbnail((LONGEST_SIDE, LONGEST_SIDE))
            image.save(self._output / path)
        return path
