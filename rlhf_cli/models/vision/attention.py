"""Attention kernels for vision encoders, which process concatenated images of any size instead of packs."""

from collections.abc import Callable

from transformers import PretrainedConfig, PreTrainedModel

from rlhf_cli.models.attention.table import has_cuda_varlen
from rlhf_cli.models.attention.varlen import TOWER_VARLEN, VARLEN
from rlhf_cli.models.compat import use_attention
from rlhf_cli.models.vision.families.table import FAMILIES, is_text_only, takes_pictures

_FLASH = ("flash_attention_2", "flash_attention_3")
"""Kernels to which transformers passes image boundaries."""


def tower_kernel(kernel: str, model_type: str, *, has_varlen: Callable[[], bool] = has_cuda_varlen) -> str:
    """Return the attention kernel for a model's encoder, given the decoder kernel.

    Encoders with equally sized square inputs use SDPA: without boundaries or masks, PyTorch selects its flash kernel.
    FlashAttention 4 does not support the head sizes of all encoders.
    """
    if kernel in _FLASH:
        return kernel
    if not FAMILIES[model_type].has_bounds:
        return "sdpa"
    if kernel == VARLEN or (kernel == "flash_attention_4" and has_varlen()):
        return TOWER_VARLEN
    return "sdpa"


def attention_of_parts(kernel: str, architecture: PretrainedConfig) -> str | dict[str, str]:
    """Return attention kernels per model part for `from_pretrained`; `kernel` is for the decoder.

    It does not accept custom names for an encoder: `use_tower_kernel` sets those after loading.
    """
    if is_text_only(architecture):
        # Other parts keep the default of transformers: they may not support the kernel, and never run here.
        text = architecture.get_text_config()
        names = (name for name in architecture.sub_configs if getattr(architecture, name, None) is text)
        return dict.fromkeys(("", *names), kernel)
    if not takes_pictures(architecture):
        return kernel
    tower = tower_kernel(kernel, architecture.model_type)
    # sdpa is a placeholder until use_tower_kernel runs.
    return {"": kernel, "text_config": kernel, "vision_config": "sdpa" if tower == TOWER_VARLEN else tower}


def use_tower_kernel(model: PreTrainedModel, kernel: str) -> None:
    """Switch a loaded model's encoder to the custom varlen kernel, if it is compatible with the decoder `kernel`."""
    if tower_kernel(kernel, model.config.model_type) == TOWER_VARLEN:
        use_attention(model.get_submodule(FAMILIES[model.config.model_type].tower).config, TOWER_VARLEN)
