"""LLaVA: every picture is one square, cut from its middle, and has the same number of features."""

from transformers import PretrainedConfig

from rlhf_cli.errors import UsageError
from rlhf_cli.models.vision.families.processing import ImageProcessor, PictureProcessing

CLASS_TOKENS = {"clip_vision_model": 1, "siglip_vision_model": 0}
"""Features of these towers before the features of the patches."""


class LlavaProcessing(PictureProcessing):
    """Pictures of LLaVA: the shorter side as long as the square's, or both sides, as the image processor has it."""

    def __init__(self, processor: ImageProcessor, architecture: PretrainedConfig) -> None:
        super().__init__(processor, architecture)
        tower = architecture.vision_config
        if tower.model_type not in CLASS_TOKENS:
            raise UsageError(
                f"models of type llava with a tower of type {tower.model_type} are not trained on pictures here: only "
                f"with {' or '.join(CLASS_TOKENS)}"
            )
        dropped = 1 if architecture.vision_feature_select_strategy == "default" else 0
        self._num_features = (tower.image_size // tower.patch_size) ** 2 + CLASS_TOKENS[tower.model_type] - dropped
        self._size = processor.size

    def _own_size(self, height: int, width: int) -> tuple[int, int]:
        shorter = self._size.get("shortest_edge")
        if shorter is None:
            return self._size["height"], self._size["width"]
        longer = int(shorter * max(height, width) / min(height, width))
        return (longer, shorter) if width <= height else (shorter, longer)

    def marks(self, height: int, width: int, placeholder: str) -> str:
        return placeholder * self._num_features
