"""Table of attention kernels for packed sequences, and kernel selection.

Every kernel gets one flat row of tokens with `position_ids` and `cu_seq_lens_q`, so that tokens never attend across
sequences. models/sequence_parallel/ distributes `varlen` over ranks.
"""

import inspect
from collections.abc import Callable
from dataclasses import dataclass

import torch
from transformers import PretrainedConfig
from transformers.utils import is_flash_attn_2_available, is_flash_attn_3_available, is_flash_attn_4_available

from rlhf_cli.errors import UsageError
from rlhf_cli.models.attention.varlen import VARLEN, compute_capability
from rlhf_cli.models.cost import layer_configs

_HALF_TYPES = (torch.bfloat16, torch.float16)
_LARGE_OR_ODD = "heads above 256 or no multiple of 8"
_TWO_SIZES = "values of another size than keys"
SINKS = "sinks"
_WITH_SINKS = frozenset({"gpt_oss", "granite_swa", "granitemoe_swa", "mimo_v2_flash"})
_BOUNDS = "within sequences whose masks transformers makes without positions"
WITHOUT_BOUNDS = frozenset({"afmoe", "llama4_text", "opt"})
"""Model types that build masks without sequence boundaries, or with chunks of the pack.

Only kernels that receive the boundaries keep their sequences separate.
"""
_ANY_HEADS = frozenset({_LARGE_OR_ODD, _TWO_SIZES})
"""Head sizes that GPU kernels do not support."""
_ALL_TYPES = (*_HALF_TYPES, torch.float32, torch.float64)


@dataclass(frozen=True)
class AttentionBackend:
    """An attention kernel: devices, dtypes, and features beyond causal and sliding-window attention."""

    name: str
    devices: tuple[str, ...]
    dtypes: tuple[torch.dtype, ...] = _ALL_TYPES
    offers: frozenset[str] = frozenset()
    """Supported features: attention `softcap`, `dropout`, `sinks`, head sizes, sequence boundaries."""
    is_available: Callable[[], bool] = lambda: True
    missing: str = ""
    """How to make it available."""


def has_cuda_varlen() -> bool:
    """Return whether PyTorch's variable-length kernel is available with sliding windows and runs on this GPU."""
    # Flash kernels need Ampere (8.0) or newer.
    if not torch.cuda.is_available() or compute_capability() < (8, 0):
        return False
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return False
    # Probe the signature, not the version: backports and nightly builds differ.
    return "window_size" in inspect.signature(varlen_attn).parameters


def _flash(version: int, is_available: Callable[[], bool], package: str) -> AttentionBackend:
    return AttentionBackend(
        name=f"flash_attention_{version}",
        devices=("cuda",),
        dtypes=_HALF_TYPES,
        # transformers pads value heads if they are smaller than key heads.
        offers=frozenset({"softcap", _TWO_SIZES, _BOUNDS} | ({"dropout"} if version == 2 else set())),
        is_available=is_available,
        missing=f"install {package} and run on a GPU it supports",
    )


BACKENDS = (
    _flash(4, is_flash_attn_4_available, "flash-attn-4"),
    AttentionBackend(
        name=VARLEN,
        devices=("cuda",),
        dtypes=_HALF_TYPES,
        # Smaller values or keys are padded with zeros, and larger heads have a kernel of their own.
        offers=_ANY_HEADS | {_BOUNDS, SINKS},
        is_available=has_cuda_varlen,
        missing="it needs torch 2.11 or newer and a GPU of compute capability 8.0 or higher",
    ),
    _flash(3, is_flash_attn_3_available, "flash-attn-3"),
    _flash(2, is_flash_attn_2_available, "flash-attn (extra `flash`)"),
    AttentionBackend(name=VARLEN, devices=("cpu",), offers=_ANY_HEADS | {_BOUNDS, SINKS}),
    AttentionBackend(name="sdpa", devices=("cuda", "cpu"), offers=_ANY_HEADS | {"dropout"}),
    AttentionBackend(name="eager", devices=("cuda", "cpu"), offers=_ANY_HEADS | {"softcap", "dropout", SINKS}),
)
"""Fastest first: `auto` selects the first one that is available and supports device, dtype and model.

`varlen` precedes FlashAttention 3 and 2: it uses FlashAttention 3 internally if installed, is as fast as 2, and is the
only kernel that computes a shared prompt once.
"""


def attention_needs(config: PretrainedConfig, *, with_dropout: bool = False) -> frozenset[str]:
    """Return the features a model requires beyond causal and sliding-window attention, including dropout if active."""
    text = config.get_text_config()
    needs = set()
    if getattr(text, "attn_logit_softcapping", None):
        needs.add("softcap")
    # Names vary by model: attention_dropout, attn_pdrop, attention_probs_dropout_prob, ...
    if with_dropout and any(value for name, value in vars(text).items() if "drop" in name and "att" in name):
        needs.add("dropout")
    if text.model_type in _WITH_SINKS:
        needs.add(SINKS)
    if text.model_type in WITHOUT_BOUNDS:
        needs.add(_BOUNDS)
    return frozenset(needs) | _head_needs(text)


def packed_length(config: PretrainedConfig) -> int | None:
    """Return the tokens up to which packed sequences are exact, or None without a limit.

    In Llama 4, tokens see their own chunk only, and the attention temperature changes at multiples of `floor_scale`.
    Neither has an effect on sequences within the first one.
    """
    text = config.get_text_config()
    if "chunked_attention" not in (getattr(text, "layer_types", None) or ()):
        return None
    chunk: int | None = getattr(text, "attention_chunk_size", None)
    if chunk is None or not getattr(text, "attn_temperature_tuning", False):
        return chunk
    return min(chunk, text.floor_scale - 1)


def attention_note(kernel: str, config: PretrainedConfig, dtype: torch.dtype, *, on_gpu: bool) -> dict[str, str]:
    """Return a note if a GPU must run eager attention, with quadratic cost in the pack length."""
    if kernel != "eager" or not on_gpu:
        return {}
    needs = attention_needs(config)
    rows = [row for row in BACKENDS if "cuda" in row.devices and row.missing and needs <= row.offers]
    fix = "no other kernel supports it: lower --train_max_tokens_per_gpu"
    if rows:
        reason = _why_not(rows[-1], device="cuda", dtype=dtype, needs=needs)
        fix = f"{rows[-1].name}: {reason or 'drop --attn_implementation eager'}"
    return {"Attention": f"eager, because the model needs {' and '.join(sorted(needs))}: slow for long packs; {fix}"}


def _head_needs(text: PretrainedConfig) -> frozenset[str]:
    """Return unusual head size properties of any layer."""
    return frozenset().union(*map(_head_needs_of, layer_configs(text)))


def _head_needs_of(layer: PretrainedConfig) -> set[str]:
    # Attention sees keys of this size, whatever the size of each part in a configuration.
    size = getattr(layer, "qk_head_dim", None) or getattr(layer, "head_dim", None)
    if size is None and getattr(layer, "num_attention_heads", None):
        size = layer.hidden_size // layer.num_attention_heads
    values = getattr(layer, "v_head_dim", None) or size
    needs = {_LARGE_OR_ODD} if any(one and (one > 256 or one % 8) for one in (size, values)) else set()
    return needs | ({_TWO_SIZES} if values != size else set())


def resolve_attention(
    name: str,
    *,
    device: str,
    dtype: torch.dtype,
    needs: frozenset[str] = frozenset(),
    backends: tuple[AttentionBackend, ...] = BACKENDS,
) -> str:
    """Return the attention function name for transformers; `auto` selects the fastest suitable kernel.

    Raises UsageError if the requested kernel is not installed or lacks a required feature.
    """
    candidates = [backend for backend in backends if name in ("auto", backend.name)]
    if not candidates:
        names = ", ".join(dict.fromkeys(backend.name for backend in backends))
        raise UsageError(f"attn_implementation {name!r} is unknown: use auto, {names}")
    reasons = []
    for backend in candidates:
        reason = _why_not(backend, device=device, dtype=dtype, needs=needs)
        if reason is None:
            return backend.name
        reasons.append((device in backend.devices, reason))
    # With two rows of the same name, report the reason from the row for this device.
    raise UsageError(f"attn_implementation {name!r} cannot be used here: {max(reasons)[1]}, or use auto")


def _why_not(backend: AttentionBackend, *, device: str, dtype: torch.dtype, needs: frozenset[str]) -> str | None:
    if device not in backend.devices:
        return f"it runs on {' or '.join(backend.devices)}, not on {device}"
    if not backend.is_available():
        return backend.missing
    if dtype not in backend.dtypes:
        types = " or ".join(str(dtype).removeprefix("torch.") for dtype in backend.dtypes)
        return f"it supports {types}, not {str(dtype).removeprefix('torch.')}; set param_dtype"
    lacking = sorted(needs - backend.offers)
    if lacking:
        return f"the model needs attention {' and '.join(lacking)}, which it does not support"
    return None
