"""Image processing for one model, with the image processor from its folder, in NumPy or torchvision."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from rlhf_cli.errors import UsageError
from rlhf_cli.models.finding import naming_the_model

if TYPE_CHECKING:
    import torch
    from transformers import PretrainedConfig

ImageProcessor: TypeAlias = Any
"""A transformers image processor. Settings differ by family."""
_MOST_STRETCHED = 200
"""Maximum aspect ratio, the limit in Qwen-VL's image processor."""
_WHITE = 255


class PictureProcessing(ABC):
    """Image sizes, marker text and encoder inputs for one model; needs neither weights nor tokenizer.

    - `has_axes`: the model has three-axis positions (time, rows, columns).
    - `sample_axis`: encoder input dimension along which images are concatenated.
    - `patches_per_feature`: patches that are merged into one feature.
    """

    has_axes = False
    source = ""
    """Model folder or Hub name."""
    sample_axis = 0
    patches_per_feature = 1
    input_names: tuple[str, ...] = ("pixel_values",)

    def __init__(self, processor: ImageProcessor, architecture: "PretrainedConfig", **bounds: int | None) -> None:
        """Raise UsageError for pixel bounds: unless a subclass applies them, the image size is fixed."""
        for name, value in bounds.items():
            if value is not None:
                raise UsageError(f"--{name}: models of type {architecture.model_type} use a fixed image size")
        self._processor = processor
        self._architecture = architecture

    def __repr__(self) -> str:
        """Return the class name with both configurations."""
        return f"{type(self).__name__} {self._processor!r} {self._architecture!r}"

    def final_size(self, height: int, width: int) -> tuple[int, int]:
        """Return the image size for trainer and engine. Raises UsageError for extreme aspect ratios."""
        sizes = [(height, width)]
        if not _is_stretched(height, width):
            # Rounding can increase the aspect ratio, so check the result as well.
            sizes.append(self._own_size(height, width))
        if _is_stretched(*sizes[-1]):
            raise UsageError(
                f"an image of {width} x {height} pixels: one side is more than {_MOST_STRETCHED} times the other"
            )
        return sizes[-1]

    @abstractmethod
    def _own_size(self, height: int, width: int) -> tuple[int, int]:
        """Return the image size after the processor's first resize."""

    @abstractmethod
    def marks(self, height: int, width: int, placeholder: str) -> str:
        """Return the text for an image with this final size, with one placeholder per feature."""

    @property
    def frame(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Prompt tokens before and after a placeholder; empty if `marks` includes them."""
        return (), ()

    @property
    def pixel_bounds(self) -> tuple[int, int] | None:
        """Minimum and maximum pixels, if the model preserves image sizes within bounds."""
        return None

    def grid(self, height: int, width: int) -> tuple[int, int] | None:
        """Return feature rows and columns for models with three-axis positions, otherwise None."""
        return None

    def inputs_of(self, pixels: np.ndarray) -> "dict[str, torch.Tensor]":
        """Compute the encoder inputs for an image, uint8 [height, width, 3] in its final size."""
        # Pass the layout: transformers would guess it from the shape, and an image of height 3 is ambiguous.
        made = self._processor(images=self._as_sample(pixels), return_tensors="pt", input_data_format="channels_last")
        return {name: made[name] for name in self.input_names}

    def _as_sample(self, pixels: np.ndarray) -> list[object]:
        return [pixels]

    def joined(self, inputs: "Sequence[dict[str, torch.Tensor]]") -> "dict[str, torch.Tensor]":
        """Concatenate the encoder inputs of more than one image."""
        # Plans import this module, and importing torch takes seconds.
        import torch

        return {name: torch.cat([one[name] for one in inputs], dim=self.sample_axis) for name in self.input_names}

    def blank(self) -> np.ndarray:
        """Return a small dummy image for packs without images."""
        # White, because Idefics3 drops images that contain only zeros.
        return np.full((*self.final_size(1, 1), 3), _WHITE, dtype=np.uint8)


def _is_stretched(height: int, width: int) -> bool:
    return max(height, width) > _MOST_STRETCHED * min(height, width)


def load_image_processor(path: str, *, trust_remote_code: bool) -> ImageProcessor:
    """Load the image processor from a folder or the Hub. Raises UsageError if there is none."""
    from transformers import AutoImageProcessor

    with naming_the_model(path, "the image processor"):
        processor = AutoImageProcessor.from_pretrained(path, trust_remote_code=trust_remote_code)
    if not processor.do_resize:
        raise UsageError(f"pretrain {path!r}: its image processor does not resize images (do_resize false)")
    return processor
