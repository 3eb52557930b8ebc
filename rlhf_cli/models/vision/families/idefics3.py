"""Idefics3 and SmolVLM2: an image is one square tile, optionally also split into rows and columns of tiles."""

import math
from typing import TYPE_CHECKING

import numpy as np

from rlhf_cli.models.vision.families.processing import ImageProcessor, PictureProcessing

if TYPE_CHECKING:
    from transformers import PretrainedConfig

_FRAME, _WHOLE = "<fake_token_around_image>", "<global-img>"
"""Tokens around each tile; the marker for the full image."""
_LARGEST_SIDE = 4096
"""Maximum side length in the image processor, independent of its configuration."""


class Idefics3Processing(PictureProcessing):
    """Image handling for Idefics3 and SmolVLM2, which resize the longest side to a fixed length."""

    # Dimension 0 is the batch, with one sample.
    sample_axis = 1
    input_names = ("pixel_values", "pixel_attention_mask")

    def __init__(self, processor: ImageProcessor, architecture: "PretrainedConfig", **bounds: int | None) -> None:
        super().__init__(processor, architecture, **bounds)
        tower = architecture.vision_config
        self._longest = min(processor.size["longest_edge"], _LARGEST_SIDE)
        self._square = processor.max_image_size["longest_edge"]
        self.patches_per_feature = architecture.scale_factor**2
        self._num_features = (tower.image_size // tower.patch_size) ** 2 // self.patches_per_feature

    def _as_sample(self, pixels: np.ndarray) -> list[object]:
        return [[pixels]]

    def _own_size(self, height: int, width: int) -> tuple[int, int]:
        """Return the processor's size: a fixed longest side, and the other side in proportion, rounded up to even."""
        shorter = int(self._longest * min(height, width) / max(height, width))
        shorter = max(shorter + shorter % 2, 2)
        return (shorter, self._longest) if width >= height else (self._longest, shorter)

    def marks(self, height: int, width: int, placeholder: str) -> str:
        """Return the text that the model's processor writes: tiles row by row, then the full image."""
        features = placeholder * self._num_features
        whole = _FRAME + _WHOLE + features + _FRAME
        rows, columns = self.squares(height, width)
        if not rows:
            return whole
        lines = [
            "".join(f"{_FRAME}<row_{row}_col_{column}>{features}" for column in range(1, columns + 1)) + "\n"
            for row in range(1, rows + 1)
        ]
        return "".join(lines) + "\n" + whole

    def squares(self, height: int, width: int) -> tuple[int, int]:
        """Return the rows and columns of tiles for an image with this final size; 0, 0 if it is not split."""
        if not self._processor.do_image_splitting:
            return 0, 0
        # The same float operations as in the processor: another order could round to a different number of tiles.
        proportion = width / height
        if width >= height:
            columns = math.ceil(width / self._square)
            rows = math.ceil(int(columns * self._square / proportion) / self._square)
        else:
            rows = math.ceil(height / self._square)
            columns = math.ceil(int(rows * self._square * proportion) / self._square)
        return (rows, columns) if max(rows, columns) > 1 else (0, 0)
