"""The attention kernel of a vision tower, which sees pictures of all sizes end to end and no packs."""

from collections.abc import Callable

from transformers import PretrainedConfig, PreTrainedModel

from rlhf_cli.models.attention.table import has_cuda_varlen
from rlhf_cli.models.attention.varlen import TOWER_VARLEN, VARLEN
from rlhf_cli.models.compat import use_attention
from rlhf_cli.models.vision.families.table import FAMILIES, takes_pictures

FLASH = ("flash_attention_2", "flash_attention_3")
"""Kernels that transformers calls with bounds of pictures itself."""


def tower_kernel(kernel: str, model_type: str, *, has_varlen: Callable[[], bool] = has_cuda_varlen) -> str:
    """Return the attention kernel of a model's tower, whose decoder runs `kernel`.

    Towers whose inputs are equal squares take SDPA: without bounds or masks PyTorch runs its flash kernel there.
    FlashAttention 4 does not take the heads of all towers.
    """
    if kernel in FLASH:
        return kernel
    if not FAMILIES[model_type].has_bounds:
        return "sdpa"
    if kernel == VARLEN or (kernel == "flash_attention_4" and has_varlen()):
        return TOWER_VARLEN
    return "sdpa"


def attention_of_parts(kernel: str, architecture: PretrainedConfig) -> str | dict[str, str]:
    """Return the attention kernels of a model's parts as `from_pretrained` takes them; `kernel` is the decoder's.

    It takes no name of ours for a tower: `use_tower_kernel` follows.
    """
    if not takes_pictures(architecture):
        return kernel
    tower = tower_kernel(kernel, architecture.model_type)
    return {"": kernel, "text_config": kernel, "vision_config": "sdpa" if tower == TOWER_VARLEN else tower}


def use_tower_kernel(model: PreTrainedModel, kernel: str) -> None:
    """Let the tower of a loaded model run the project's own kernel, if that goes with the decoder's `kernel`."""
    if tower_kernel(kernel, model.config.model_type) == TOWER_VARLEN:
        use_attention(model.get_submodule(FAMILIES[model.config.model_type].tower).config, TOWER_VARLEN)
