"""Supported vision-language model families, by model configuration. This module does not import transformers."""

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING

from rlhf_cli.errors import UsageError
from rlhf_cli.models.vision.families.idefics3 import Idefics3Processing
from rlhf_cli.models.vision.families.llava import LlavaProcessing
from rlhf_cli.models.vision.families.processing import PictureProcessing, load_image_processor
from rlhf_cli.models.vision.families.qwen_vl import QwenVLProcessing
from rlhf_cli.models.vision.family import PictureRun, VisionFamily

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedTokenizerBase


@dataclass(frozen=True)
class _FamilyRow:
    """A family.

    - `processing`: image processing.
    - `tower`, `projectors`: module names of the vision encoder and projectors, as in memory.
    - `has_bounds`: the encoder processes concatenated images of any size, with attention boundaries.
    - `vllm_needs`: packages that vLLM requires for the model or its processor.
    """

    processing: type[PictureProcessing]
    tower: str
    projectors: tuple[str, ...]
    has_bounds: bool = False
    vllm_needs: tuple[str, ...] = ()


TORCHVISION = "torchvision"
_QWEN2 = _FamilyRow(
    QwenVLProcessing, "model.visual", ("model.visual.merger",), has_bounds=True, vllm_needs=(TORCHVISION,)
)
_IDEFICS3 = _FamilyRow(Idefics3Processing, "model.vision_model", ("model.connector",))
FAMILIES = {
    "qwen2_vl": _QWEN2,
    "qwen2_5_vl": _QWEN2,
    "qwen3_vl": replace(_QWEN2, projectors=("model.visual.merger", "model.visual.deepstack_merger_list")),
    "qwen3_5": _QWEN2,
    "qwen3_5_moe": _QWEN2,
    "idefics3": _IDEFICS3,
    # SmolVLM's processor imports num2words, for video lengths.
    "smolvlm": replace(_IDEFICS3, vllm_needs=(TORCHVISION, "num2words")),
    "llava": _FamilyRow(
        LlavaProcessing, "model.vision_tower", ("model.multi_modal_projector",), vllm_needs=(TORCHVISION,)
    ),
}
"""Families by the `model_type` in their configuration."""
_REASONS = {"paligemma": "prompts attend both ways, which packed attention does not support"}
"""Reasons why types are neither in `FAMILIES` nor in `TEXT_ONLY`, besides that they are not tested."""
TEXT_ONLY = {
    "exaone4_5": ("exaone4",),
    "gemma3": ("gemma3_text",),
    "gemma4": ("gemma4_text",),
    "gemma4_unified": ("gemma4_unified_text",),
    "glm46v": ("glm4v_text",),
    "glm4v": ("glm4v_text",),
    "glm4v_moe": ("glm4v_moe_text",),
    "internvl": ("gpt_oss", "llama", "qwen2", "qwen3", "qwen3_moe"),
    "lfm2_vl": ("lfm2", "lfm2_moe"),
    "llava_next": ("llama", "mistral", "qwen2"),
    "llava_onevision": ("qwen2", "qwen3"),
    "minicpmv4_6": ("qwen3_5_text",),
    "mistral3": ("ministral3", "mistral"),
    "qwen3_vl_moe": ("qwen3_vl_moe_text",),
}
"""Vision-language model types that read only text here, with the types of language models that they may contain.

Their language models train and generate; all other parts are frozen. tests/unit/models/test_packed_types.py compares
packs with transformers.
"""


def takes_pictures(architecture: "PretrainedConfig") -> bool:
    """Return whether models with this configuration can train on images."""
    return architecture.model_type in FAMILIES


def is_text_only(architecture: "PretrainedConfig") -> bool:
    """Return whether models with this configuration are loaded with a vision encoder, but read only text."""
    kinds = TEXT_ONLY.get(architecture.model_type, ())
    return bool(kinds) and architecture.get_text_config().model_type in kinds


def is_multimodal(architecture: "PretrainedConfig") -> bool:
    """Return whether models with this configuration are loaded with a vision encoder."""
    return takes_pictures(architecture) or is_text_only(architecture)


def names_of_parts(architecture: "PretrainedConfig") -> tuple[str, ...]:
    """Return the encoder and projector module names (projectors may be within the encoder).

    Empty for text models and types in `TEXT_ONLY`.
    """
    if not takes_pictures(architecture):
        return ()
    parts = FAMILIES[architecture.model_type]
    return (parts.tower, *parts.projectors)


def _require_known_family(architecture: "PretrainedConfig") -> None:
    """Raise UsageError for a vision-language model of an unsupported type."""
    if is_multimodal(architecture) or getattr(architecture, "vision_config", None) is None:
        return
    kind, text = architecture.model_type, architecture.get_text_config().model_type
    raise UsageError(
        f"models of type {kind} with a language model of type {text} are not supported "
        f"({_REASONS.get(kind, 'not tested')}): use {', '.join(FAMILIES)}, which read images, or "
        f"{', '.join(TEXT_ONLY)}, which read text"
    )


def find_processing(
    path: str,
    architecture: "PretrainedConfig",
    *,
    min_pixels: int | None = None,
    max_pixels: int | None = None,
    trust_remote_code: bool = False,
) -> PictureProcessing:
    """Return the image processing for a supported model. `path` is its folder or Hub name."""
    processor = load_image_processor(path, trust_remote_code=trust_remote_code)
    make = FAMILIES[architecture.model_type].processing
    processing = make(processor, architecture, min_pixels=min_pixels, max_pixels=max_pixels)
    processing.source = path
    return processing


def find_family(
    path: str,
    architecture: "PretrainedConfig",
    tokenizer: "PreTrainedTokenizerBase",
    *,
    min_pixels: int | None = None,
    max_pixels: int | None = None,
    trust_remote_code: bool = False,
) -> VisionFamily | None:
    """Return the family of a model in a folder or on the Hub, or None for a model that reads only text.

    Raises:
        UsageError: the type is not supported, the folder has no image processor, or no size satisfies the pixel
            bounds.
    """
    _require_known_family(architecture)
    if not takes_pictures(architecture):
        return None
    processing = find_processing(
        path, architecture, min_pixels=min_pixels, max_pixels=max_pixels, trust_remote_code=trust_remote_code
    )
    return TokenisedFamily(processing, tokenizer, _image_token_of(architecture))


def _image_token_of(architecture: "PretrainedConfig") -> int:
    """Return the placeholder ID."""
    token: int | None = getattr(architecture, "image_token_id", None)
    # LLaVA configurations use the older name image_token_index.
    return int(architecture.image_token_index if token is None else token)


class TokenisedFamily:
    """Image processing for a model, combined with its tokenizer."""

    def __init__(self, processing: PictureProcessing, tokenizer: "PreTrainedTokenizerBase", image_token: int) -> None:
        self.processing = processing
        self.image_token = image_token
        self.placeholder = str(tokenizer.convert_ids_to_tokens(image_token))
        before, behind = processing.frame
        self.mark = "".join(map(str, tokenizer.convert_ids_to_tokens([*before, image_token, *behind])))
        self._tokenizer = tokenizer
        # Datasets repeat a few image sizes, and tokenizing thousands of placeholders is slow. Per instance, not per
        # class.
        self._run = lru_cache(maxsize=4096)(self._new_run)

    def __repr__(self) -> str:
        """Return everything that determines image sizes and tokens; cached datasets use it as a key."""
        return f"{self.image_token} {self.processing!r}"

    def final_size(self, height: int, width: int) -> tuple[int, int]:
        return self.processing.final_size(height, width)

    def run(self, height: int, width: int) -> PictureRun:
        return self._run(height, width)

    def _new_run(self, height: int, width: int) -> PictureRun:
        text = self.processing.marks(height, width, self.placeholder)
        token_ids = self._tokenizer(text, add_special_tokens=False)["input_ids"]
        patches = token_ids.count(self.image_token) * self.processing.patches_per_feature
        return PictureRun(tuple(token_ids), self.processing.grid(height, width), patches)
