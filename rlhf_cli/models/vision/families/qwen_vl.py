"""Qwen2-VL to Qwen3-VL and Qwen3.5: images keep their size within pixel bounds, in multiples of merged patches."""

import math
from typing import TYPE_CHECKING

from rlhf_cli.errors import UsageError
from rlhf_cli.models.vision.families.processing import ImageProcessor, PictureProcessing

if TYPE_CHECKING:
    from transformers import PretrainedConfig

_MOST_ROUNDS = 16
"""Resize iterations after which a size counts as not converging."""


class QwenVLProcessing(PictureProcessing):
    """Image handling for Qwen-VL. Settings narrow the image processor's pixel bounds."""

    has_axes = True
    input_names = ("pixel_values", "image_grid_thw")

    def __init__(
        self,
        processor: ImageProcessor,
        architecture: "PretrainedConfig",
        *,
        min_pixels: int | None,
        max_pixels: int | None,
    ) -> None:
        super().__init__(processor, architecture)
        least, most = processor.size["shortest_edge"], processor.size["longest_edge"]
        # One feature merges merge_size x merge_size patches, so sides must be multiples of both.
        self._step = processor.patch_size * processor.merge_size
        self.patches_per_feature = processor.merge_size**2
        self._least = max(least, min_pixels or least)
        self._most = min(most, max_pixels or most)
        if self._least > self._most:
            raise UsageError(
                f"--min_pixels, --max_pixels: no image has between {self._least} and {self._most} pixels, which are "
                f"the settings combined with the image processor's bounds {least} and {most}"
            )

    def _own_size(self, height: int, width: int) -> tuple[int, int]:
        """Return a fixed point of the resize function, so that the processor does not resize the image again."""
        size = (height, width)
        for _ in range(_MOST_ROUNDS):
            before, size = size, _resized(*size, step=self._step, least=self._least, most=self._most)
            if size == before:
                return size
        raise UsageError(
            f"an image of {width} x {height} pixels: no sides in multiples of {self._step} have between {self._least} "
            f"and {self._most} pixels; lower --min_pixels or raise --max_pixels"
        )

    @property
    def frame(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        architecture = self._architecture
        return (architecture.vision_start_token_id,), (architecture.vision_end_token_id,)

    @property
    def pixel_bounds(self) -> tuple[int, int]:
        return self._least, self._most

    def grid(self, height: int, width: int) -> tuple[int, int]:
        return height // self._step, width // self._step

    def marks(self, height: int, width: int, placeholder: str) -> str:
        rows, columns = self.grid(height, width)
        return placeholder * (rows * columns)


def _resized(height: int, width: int, *, step: int, least: int, most: int) -> tuple[int, int]:
    """Return sides in multiples of `step`, with the pixel count within bounds and a similar aspect ratio.

    The same as in the Qwen2-VL image processor (arXiv 2409.12191, section 2.1).
    """
    # The same arithmetic as smart_resize in transformers, including round half to even. A zero is scaled up below.
    rows, columns = (max(round(side / step), 0) for side in (height, width))
    if rows * columns * step * step > most:
        shrink = math.sqrt(height * width / most)
        rows, columns = (max(1, math.floor(side / shrink / step)) for side in (height, width))
    elif rows * columns * step * step < least:
        stretch = math.sqrt(least / (height * width))
        # Ceil, because rounding down could fall below the minimum again.
        rows, columns = (math.ceil(side * stretch / step) for side in (height, width))
    return rows * step, columns * step
