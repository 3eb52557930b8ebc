"""The `varlen` attention function for transformers: attention within each packed sequence, causal in decoders.

On CUDA it uses PyTorch's variable-length flash kernel, on a CPU the operator in `varlen_cpu`. It supports training and
scoring of packs, without KV cache, padding, attention dropout or soft caps.
"""

import functools
import inspect
import os
import subprocess
from collections.abc import Callable
from contextlib import suppress
from importlib.util import find_spec
from typing import Any

import torch
from torch.nn.functional import pad
from transformers import AttentionInterface

from rlhf_cli.models.attention.sinks import AttendWithSinks
from rlhf_cli.models.attention.varlen_cpu import BOTH_WAYS, varlen_attention
from rlhf_cli.models.compat import efficient_varlen, varlen_backward, varlen_with_lse
from rlhf_cli.models.sequence_parallel.attention import attend_shared

VARLEN = "varlen"
"""Name registered with transformers."""
TOWER_VARLEN = "flash_varlen"
"""Name in vision encoders: Qwen-VL passes image bounds only to attention functions with "flash" in their name."""
_UNSUPPORTED = ("softcap", "position_bias", "dropout")
"""Arguments that transformers may pass but this function does not support."""
LARGEST_HEAD = 256
"""Size of the largest heads in flash kernels."""


def varlen_attention_forward(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Compute attention [1, T, heads, head size] from query [1, heads, T, size], key and value [1, kv heads, T, size].

    `kwargs` are the arguments that transformers passes to every attention function:
    - `cu_seq_lens_q` (int32 [B + 1]), `max_length_q`, and the same for keys
    - `scaling`
    - `sliding_window`: tokens visible to a position, including itself
    - `is_causal`: false in vision encoders
    - `s_aux` [heads]: attention sinks, the logits of one more key per head with value 0
    - `key_index` [U]: for packs with shared prefixes, the concatenated key positions that the sequences attend to
    - `shards`: for sequence parallelism; the tensors then contain only this rank's tokens

    The mask is ignored, because the boundaries replace it. Raises ValueError for unsupported arguments, so that none is
    silently ignored.
    """
    del module, attention_mask
    if kwargs.get("cu_seq_lens_q") is None:
        raise ValueError("attention 'varlen' is for packed sequences; use 'sdpa' for generation and padded batches")
    for feature in _UNSUPPORTED:
        if kwargs.get(feature) is not None and not (feature == "dropout" and kwargs["dropout"] == 0):
            raise ValueError(f"attention 'varlen' has no {feature}: use attn_implementation eager")
    shards = kwargs.pop("shards", None)
    if shards is None:
        return _attend(query, key, value, **kwargs), None
    return attend_shared(query, key, value, shards, _attend, **kwargs), None


def _attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **kwargs: Any) -> torch.Tensor:
    """Compute attention [1, T, heads, size]; arguments as in `varlen_attention_forward`."""
    # squeeze, because the backward pass of an index writes zeros and a copy.
    query_THD, key_THD, value_THD = (tensor.squeeze(0).transpose(0, 1) for tensor in (query, key, value))
    if kwargs.get("key_index") is not None:
        key_THD, value_THD = (SelectTokens.apply(tensor, kwargs["key_index"]) for tensor in (key_THD, value_THD))
    window = BOTH_WAYS if kwargs.get("is_causal") is False else kwargs.get("sliding_window") or 0
    if query.is_cuda:
        # A layer may have larger heads than the others, as in Gemma 4.
        kernel = efficient_varlen if max(query.shape[-1], value.shape[-1]) > LARGEST_HEAD else _cuda_kernel()
        output_THD = attend_cuda(query_THD, key_THD, value_THD, kernel, window=window, **kwargs)
    else:
        scale = kwargs.get("scaling") or query.shape[-1] ** -0.5
        bounds = kwargs["cu_seq_lens_q"], kwargs["cu_seq_lens_k"]
        output_THD = varlen_attention(query_THD, key_THD, value_THD, *bounds, scale, window, kwargs.get("s_aux"))
    return output_THD.unsqueeze(0)


class SelectTokens(torch.autograd.Function):
    """`index_select` over tokens with float32 gradient accumulation and a single rounding.

    CPU index_select already does this. On CUDA it is expected to accumulate in the weight dtype with atomics (not
    verified on a GPU): emulated in bfloat16, 16 responses per prompt triple the rounding error. The summation order on
    CUDA remains nondeterministic.
    """

    @staticmethod
    def forward(ctx: Any, tensor_THD: torch.Tensor, index_U: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(index_U)
        ctx.num_tokens = tensor_THD.shape[0]
        return tensor_THD.index_select(0, index_U)

    @staticmethod
    def backward(ctx: Any, grad_UHD: torch.Tensor) -> tuple[torch.Tensor, None]:
        (index_U,) = ctx.saved_tensors
        wide = torch.promote_types(grad_UHD.dtype, torch.float32)
        total_THD = grad_UHD.new_zeros((ctx.num_tokens, *grad_UHD.shape[1:]), dtype=wide)
        return total_THD.index_add_(0, index_U, grad_UHD.to(wide)).to(grad_UHD.dtype), None


def attend_cuda(
    query_THD: torch.Tensor,
    key_THD: torch.Tensor,
    value_THD: torch.Tensor,
    kernel: Callable[..., Any],
    *,
    window: int,
    **kwargs: Any,
) -> torch.Tensor:
    """Compute attention [T, heads, value size] with `kernel`, which has the `torch.nn.attention.varlen` interface.

    Like FlashAttention since 2.1, it aligns the last query with the last key if there are more keys than queries.
    """
    size = -(-max(query_THD.shape[-1], value_THD.shape[-1]) // 8) * 8
    inputs = [_widened(tensor, size) for tensor in (query_THD, key_THD, value_THD)]
    bounds = [kwargs[name] for name in ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")]
    options: dict[str, Any] = {
        "scale": kwargs.get("scaling") or query_THD.shape[-1] ** -0.5,
        # The kernel counts keys to the left of the query; transformers includes the query itself.
        "window_size": (-1, -1) if window == BOTH_WAYS else (window - 1 if window else -1, 0),
    }
    # Newer releases require enable_gqa for fewer KV heads; older ones detect it and reject the argument.
    grouped = {"enable_gqa": query_THD.shape[1] != key_THD.shape[1]} if _takes_gqa(kernel) else {}
    if (sinks := kwargs.get("s_aux")) is None:
        output_THD: torch.Tensor = kernel(*inputs, *bounds, **options, **grouped)
    else:
        forward = functools.partial(varlen_with_lse, kernel, bounds=bounds, **options, **grouped)
        backward = functools.partial(varlen_backward, bounds=bounds, **options)
        output_THD = AttendWithSinks.apply(*inputs, sinks, forward, backward)
    return output_THD[..., : value_THD.shape[-1]]


def _widened(tensor_THD: torch.Tensor, size: int) -> torch.Tensor:
    """Append zeros to heads smaller than `size`: kernels need values as large as keys, and multiples of 8."""
    missing = size - tensor_THD.shape[-1]
    return pad(tensor_THD, (0, missing)) if missing > 0 else tensor_THD


@functools.cache
def _takes_gqa(kernel: Callable[..., torch.Tensor]) -> bool:
    """Return whether the kernel has the enable_gqa argument. Cached, because every layer calls it."""
    return "enable_gqa" in inspect.signature(kernel).parameters


@functools.cache
def _cuda_kernel() -> Callable[..., torch.Tensor]:
    from torch.nn.attention.varlen import varlen_attn

    if wants_flash_attention_3(compute_capability(), find_spec("flash_attn_interface") is not None):
        from torch.nn.attention import activate_flash_attention_impl

        # Switches PyTorch's flash kernels for the full process.
        activate_flash_attention_impl("FA3")
    return varlen_attn


@functools.cache
def compute_capability() -> tuple[int, int]:
    """Return the compute capability of the first visible GPU, for example (9, 0) for an H100.

    The driver of an online run checks settings but never computes. nvidia-smi is asked there, because PyTorch would
    create a CUDA context, which holds about 0.5 GiB of the GPU until the run ends.
    """
    if not torch.cuda.is_initialized():
        first = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
        command = ["nvidia-smi", "-i", first, "--query-gpu=compute_cap", "--format=csv,noheader"]
        # Without nvidia-smi (some containers), or for MIG devices, which it cannot query, PyTorch answers.
        with suppress(OSError, subprocess.SubprocessError, ValueError):
            answer = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout
            major, minor = answer.strip().split(".")
            return int(major), int(minor)
    return torch.cuda.get_device_capability()


def wants_flash_attention_3(capability: tuple[int, int], is_installed: bool) -> bool:
    """Return whether to run FlashAttention 3 in PyTorch's kernel: on Hopper, if flash-attn-3 is installed."""
    return is_installed and capability[0] == 9


# Not registered as a mask function, so transformers builds no mask.
AttentionInterface.register(VARLEN, varlen_attention_forward)
AttentionInterface.register(TOWER_VARLEN, varlen_attention_forward)
