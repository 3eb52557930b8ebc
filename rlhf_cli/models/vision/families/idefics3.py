"""Idefics3 and SmolVLM2: a picture is one square; if it is split, also rows and columns of squares, with marks."""

import math

import numpy as np
from transformers import PretrainedConfig

from rlhf_cli.models.vision.families.processing import ImageProcessor, PictureProcessing

FRAME, WHOLE = "<fake_token_around_image>", "<global-img>"
"""Tokens before and behind each square; the mark of the picture as a whole."""
LARGEST_SIDE = 4096
"""Sides that the image processor does not exceed, whatever its configuration asks for."""


class Idefics3Processing(PictureProcessing):
    """Pictures of Idefics3 and SmolVLM2, whose longest side becomes a length of the image processor."""

    sample_axis = 1  # behind a batch of one sample
    input_names = ("pixel_values", "pixel_attention_mask")

    def __init__(self, processor: ImageProcessor, architecture: PretrainedConfig) -> None:
        super().__init__(processor, architecture)
        tower = architecture.vision_config
        self._longest = min(processor.size["longest_edge"], LARGEST_SIDE)
        self._square = processor.max_image_size["longest_edge"]
        self.patches_per_feature = architecture.scale_factor**2
        self._num_features = (tower.image_size // tower.patch_size) ** 2 // self.patches_per_feature

    def _as_sample(self, pixels: np.ndarray) -> list[object]:
        return [[pixels]]

    def _own_size(self, height: int, width: int) -> tuple[int, int]:
        """Return the longest side as the processor wants it; the other one in proportion, made even."""
        shorter = int(self._longest * min(height, width) / max(height, width))
        shorter = max(shorter + shorter % 2, 2)
        return (shorter, self._longest) if width >= height else (self._longest, shorter)

    def marks(self, height: int, width: int, placeholder: str) -> str:
        """Return the text as the model's processor writes it: squares row by row, then the whole picture."""
        features = placeholder * self._num_features
        whole = FRAME + WHOLE + features + FRAME
        rows, columns = self.squares(height, width)
        if not rows:
            return whole
        lines = [
            "".join(f"{FRAME}<row_{row}_col_{column}>{features}" for column in range(1, columns + 1)) + "\n"
            for row in range(1, rows + 1)
        ]
        return "".join(lines) + "\n" + whole

    def squares(self, height: int, width: int) -> tuple[int, int]:
        """Return the rows and columns of squares that a picture of this final size is cut into; 0, 0 if it is not."""
        if not self._processor.do_image_splitting:
            return 0, 0
        proportion = width / height
        if width >= height:
            columns = math.ceil(width / self._square)
            rows = math.ceil(int(columns * self._square / proportion) / self._square)
        else:
            rows = math.ceil(height / self._square)
            columns = math.ceil(int(rows * self._square * proportion) / self._square)
        return (rows, columns) if max(rows, columns) > 1 else (0, 0)
