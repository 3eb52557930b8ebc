"""Wrappers for private PyTorch and transformers functions.

Libraries may change them without notice: fix such changes here; each wrapper has a test. Two overridden vLLM scheduler
methods are in `backends/rollout/vllm_scheduler.py`.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

# Some processes only render templates: do not import PyTorch at module level.
if TYPE_CHECKING:
    from jinja2 import Template
    from torch import Tensor
    from transformers import PretrainedConfig


def softmax_backward(grad: "Tensor", probabilities: "Tensor") -> "Tensor":
    """Compute the softmax gradient over the last dimension in one pass."""
    import torch

    # The public API would need autograd, or two passes over the scores.
    return torch._softmax_backward_data(grad, probabilities, -1, probabilities.dtype)


def varlen_with_lse(
    kernel: "Callable[..., Any]", *inputs: "Tensor", bounds: "Sequence[object]", **options: object
) -> "tuple[Tensor, Tensor]":
    """Return the output [T, heads, size] of PyTorch's variable-length kernel and the log-sum-exp, float32 [heads, T].

    `inputs` are query, key and value, `bounds` the kernel's four arguments about sequences.
    """
    from torch.nn.attention.varlen import AuxRequest

    output, lse = kernel(*inputs, *bounds, **options, return_aux=AuxRequest(lse=True))
    return output, lse


def varlen_backward(
    *tensors: "Tensor", bounds: "Sequence[object]", scale: float | None, window_size: tuple[int, int]
) -> "tuple[Tensor, Tensor, Tensor]":
    """Return the gradients of query, key and value in PyTorch's variable-length kernel.

    `tensors` are the gradient of the output, query, key, value, output and log-sum-exp.
    """
    import torch

    # The public function differentiates only with its own output and log-sum-exp.
    grads: tuple[Tensor, Tensor, Tensor] = torch.ops.torch_attn._varlen_attn_backward(
        *tensors,
        *bounds,
        window_size == (-1, 0),  # the kernel's flag for causal attention without a window
        torch.zeros(2, dtype=torch.uint64, device=tensors[0].device),  # random state of a dropout that is off
        scale,
        list(window_size),
    )
    return grads


def efficient_varlen(
    query: "Tensor", key: "Tensor", value: "Tensor", *bounds: object, scale: float, window_size: tuple[int, int]
) -> "Tensor":
    """Compute attention with the interface of PyTorch's variable-length kernel, for heads of any size.

    `scaled_dot_product_attention` calls this kernel too, but without bounds of sequences.
    """
    import torch

    group = query.shape[1] // key.shape[1]
    keys, values = (tensor.repeat_interleave(group, 1) if group > 1 else tensor for tensor in (key, value))
    left, right = window_size
    output: Tensor = torch.ops.aten._efficient_attention_forward(
        *(tensor[None] for tensor in (query, keys, values)),
        None,
        *bounds,
        0.0,
        # Mask types of CUTLASS: none, or causal if the last query sees the last key.
        0 if right < 0 else 2,
        compute_log_sumexp=True,  # the backward pass needs it
        scale=scale,
        window_size=None if left < 0 else left + 1,
    )[0]
    return output[0]


def has_bf16_products() -> bool:
    """Return whether oneDNN supports bf16 matmul on this processor. Without it, PyTorch uses a slow fallback."""
    import torch

    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def prepare_amx() -> None:
    """Request AMX permission from the kernel if available: without it, bf16 attention crashes on short prompts."""
    import torch

    if torch.cpu._is_amx_tile_supported():
        torch.cpu._init_amx()


def compiled_template(template: str) -> "Template":
    """Return a chat template compiled by Jinja. transformers caches it, and vLLM uses the same cache."""
    from transformers.utils.chat_template_utils import _compile_jinja_template

    compiled: Template = _compile_jinja_template(template)
    return compiled


def attention_name(config: "PretrainedConfig") -> str | None:
    """Return the attention function name of a loaded model."""
    name: str | None = config._attn_implementation
    return name


def use_attention(config: "PretrainedConfig", name: str) -> None:
    """Set the registered attention function for a loaded model, or part of one.

    `set_attn_implementation` would look for a package if the name contains "flash".
    """
    config._attn_implementation = name


@contextmanager
def without_partitions() -> Iterator[None]:
    """Let transformers build models without ZeRO-3, which it otherwise applies to all models once a process uses it."""
    from transformers.integrations import deepspeed

    active = deepspeed._hf_deepspeed_config_weak_ref
    deepspeed.unset_hf_deepspeed_config()
    try:
        yield
    finally:
        deepspeed._hf_deepspeed_config_weak_ref = active
