"""Thumbnails of the images in the first samples of each step, for inspecting samples."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from PIL import Image

if TYPE_CHECKING:
    # Only for annotations: it imports torch, which the tracker does not need.
    from rlhf_cli.models.vision.pictures import Picture

FOLDER = "sample_images"
"""Folder for thumbnails in the run directory."""
IMAGES = "images"
"""Sample field that lists its images."""
_LONGEST_SIDE = 256
"""Maximum thumbnail size in pixels."""
WITH_IMAGES = 16
"""Samples per step that get thumbnails; the report shows no more."""


class Thumbnails:
    """The folder `sample_images/` in a run directory. Images shared by samples are stored once."""

    def __init__(self, output: Path) -> None:
        self._output = output

    def rows(self, samples: Sequence[Mapping[str, object]]) -> list[Mapping[str, object]]:
        """Replace each sample's `images`, a sequence of `Picture`, with thumbnail paths.

        After the first `WITH_IMAGES` samples, the field is removed.
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
            image.thumbnail((_LONGEST_SIDE, _LONGEST_SIDE))
            image.save(self._output / path)
        return path
