"""How one model cuts pictures for its tower: by its folder's image processor, in NumPy or torchvision."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
import torch
from transformers import AutoImageProcessor, PretrainedConfig

from rlhf_cli.errors import UsageError
from rlhf_cli.models.finding import naming_the_model

ImageProcessor: TypeAlias = Any
"""An image processor of transformers, whose settings differ by family."""
MOST_STRETCHED = 200
"""Largest proportion of a picture's sides, as Qwen-VL's image processor takes it."""
WHITE = 255


class PictureProcessing(ABC):
    """Sizes, marks and tower inputs of pictures in one model; needs neither weights nor tokenizer.

    `has_axes`: the model counts positions in time, rows and columns. `sample_axis` is the dimension of its tower's
    inputs in which pictures follow each other; `patches_per_feature` is the number of patches that become one feature.
    """

    has_axes = False
    source = ""
    """Folder or Hub name of the model."""
    sample_axis = 0
    patches_per_feature = 1
    input_names: tuple[str, ...] = ("pixel_values",)

    def __init__(self, processor: ImageProcessor, architecture: PretrainedConfig) -> None:
        self._processor = processor
        self._architecture = architecture

    def __repr__(self) -> str:
        """Return the class with both configurations."""
        return f"{type(self).__name__} {self._processor!r} {self._architecture!r}"

    def final_size(self, height: int, width: int) -> tuple[int, int]:
        """Return the size in which trainer and engine get a picture. UsageError for one of very unequal sides."""
        sizes = [(height, width)]
        if not _is_stretched(height, width):
            sizes.append(self._own_size(height, width))  # rounding may stretch it a little more
        if _is_stretched(*sizes[-1]):
            raise UsageError(
                f"a picture of {width} x {height} pixels: one side is more than {MOST_STRETCHED} times the other"
            )
        return sizes[-1]

    @abstractmethod
    def _own_size(self, height: int, width: int) -> tuple[int, int]:
        """Return the size of a picture after the processor's first resizing."""

    @abstractmethod
    def marks(self, height: int, width: int, placeholder: str) -> str:
        """Return the text that stands for a picture of this final size, with a placeholder for each feature."""

    @property
    def frame(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The tokens of a prompt before and behind a placeholder; none if `marks` has them."""
        return (), ()

    @property
    def pixel_bounds(self) -> tuple[int, int] | None:
        """Return the least and most pixels of a picture if the model keeps a picture's size within bounds."""
        return None

    def grid(self, height: int, width: int) -> tuple[int, int] | None:
        """Return the rows and columns of features where the model counts positions in three axes."""
        return None

    def inputs_of(self, pixels: np.ndarray) -> dict[str, torch.Tensor]:
        """Return the tower's inputs for one picture, uint8 [height, width, 3] in its final size."""
        made = self._processor(images=self._as_sample(pixels), return_tensors="pt", input_data_format="channels_last")
        return {name: made[name] for name in self.input_names}

    def _as_sample(self, pixels: np.ndarray) -> list[object]:
        return [pixels]

    def joined(self, inputs: Sequence[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
        """Return the tower's inputs for several pictures from the inputs for each."""
        return {name: torch.cat([one[name] for one in inputs], dim=self.sample_axis) for name in self.input_names}

    def blank(self) -> np.ndarray:
        """Return a small picture for packs that have none. White, as Idefics3 leaves out pictures of zeros."""
        return np.full((*self.final_size(1, 1), 3), WHITE, dtype=np.uint8)


def _is_stretched(height: int, width: int) -> bool:
    return max(height, width) > MOST_STRETCHED * min(height, width)


def load_image_processor(path: str, *, trust_remote_code: bool) -> ImageProcessor:
    """Return the image processor of a folder or Hub name. Raise UsageError if there is none."""
    with naming_the_model(path, "the image processor"):
        processor = AutoImageProcessor.from_pretrained(path, trust_remote_code=trust_remote_code)
    if not processor.do_resize:
        raise UsageError(f"pretrain {path!r}: its image processor does not resize pictures (do_resize false)")
    return processor


def refuse_bounds(model_type: str, min_pixels: int | None, max_pixels: int | None) -> None:
    """Raise UsageError if bounds of pixels are given for a model that has its own size for all pictures."""
    for name, value in (("min_pixels", min_pixels), ("max_pixels", max_pixels)):
        if value is not None:
            raise UsageError(f"--{name}: models of type {model_type} take every picture in a size of their own")
