"""Private functions of PyTorch and transformers, each behind a function of ours.

A library may change them without notice: this is the one place to mend, and each has a test. The two methods of vLLM
that our scheduler overrides are in `backends/rollout/vllm_scheduler.py`.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:  # templates are rendered by processes that need no PyTorch
    from jinja2 import Template
    from torch import Tensor
    from transformers import PretrainedConfig


def softmax_backward(grad: "Tensor", probabilities: "Tensor") -> "Tensor":
    """Return the gradient of the scores from the gradient of their softmax over the last dimension, in one pass."""
    import torch

    return torch._softmax_backward_data(grad, probabilities, -1, probabilities.dtype)


def has_bf16_products() -> bool:
    """Return whether oneDNN multiplies in bfloat16 on this processor; else PyTorch does, slowly."""
    import torch

    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def prepare_amx() -> None:
    """Ask the kernel for AMX if the processor has it: without it, bf16 attention dies on short prompts."""
    import torch

    if torch.cpu._is_amx_tile_supported():
        torch.cpu._init_amx()


def compiled_template(template: str) -> "Template":
    """Return a chat template as Jinja compiled it; transformers keeps it, and vLLM renders with it too."""
    from transformers.utils.chat_template_utils import _compile_jinja_template

    compiled: Template = _compile_jinja_template(template)
    return compiled


def attention_name(config: "PretrainedConfig") -> str | None:
    """Return the name of the attention function that a loaded model calls."""
    name: str | None = config._attn_implementation
    return name


def use_attention(config: "PretrainedConfig", name: str) -> None:
    """Let a loaded model, or a part of one, call the registered attention function of that name.

    `set_attn_implementation` would look for a package of any name with "flash" in it.
    """
    config._attn_implementation = name
