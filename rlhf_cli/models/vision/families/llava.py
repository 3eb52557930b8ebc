"""LLaVA: every image becomes one center-cropped square with a fixed number of features."""

from typing import TYPE_CHECKING

from rlhf_cli.errors import UsageError
from rlhf_cli.models.vision.families.processing import ImageProcessor, PictureProcessing

if TYPE_CHECKING:
    from transformers import PretrainedConfig

_CLASS_TOKENS = {"clip_vision_model": 1, "siglip_vision_model": 0}
"""Number of features that these encoders return before patch features."""


class LlavaProcessing(PictureProcessing):
    """Image handling for LLaVA: the image processor resizes the shorter side, or both sides, to the square."""

    def __init__(self, processor: ImageProcessor, architecture: "PretrainedConfig", **bounds: int | None) -> None:
        super().__init__(processor, architecture, **bounds)
        tower = architecture.vision_config
        if tower.model_type not in _CLASS_TOKENS:
            raise UsageError(
                f"models of type llava with a vision encoder of type {tower.model_type} are not supported: only "
                f"{' or '.join(_CLASS_TOKENS)}"
            )
        # The "default" strategy drops the first feature, which is the class token in CLIP.
        dropped = 1 if architecture.vision_feature_select_strategy == "default" else 0
        self._num_features = (tower.image_size // tower.patch_size) ** 2 + _CLASS_TOKENS[tower.model_type] - dropped
        self._size = processor.size

    def _own_size(self, height: int, width: int) -> tuple[int, int]:
        shorter = self._size.get("shortest_edge")
        if shorter is None:
            return self._size["height"], self._size["width"]
        longer = int(shorter * max(height, width) / min(height, width))
        return (longer, shorter) if width <= height else (shorter, longer)

    def marks(self, height: int, width: int, placeholder: str) -> str:
        return placeholder * self._num_features
