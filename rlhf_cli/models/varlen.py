"""The `varlen` attention function for transformers: causal attention inside each sequence of a flat pack.

CUDA uses PyTorch's variable-length flash kernel, a CPU the operator of `varlen_cpu`. It serves training and scoring of
packs only: no KV cache, no padding, no attention dropout, caps or sinks.
"""

import inspect
from functools import cache
from typing import Any

import torch
from transformers import AttentionInterface

from rlhf_cli.models.varlen_cpu import varlen_attention

VARLEN = "varlen"
"""Name under which transformers knows the function."""


def varlen_attention_forward(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attention output [1, T, heads, head size] of query [1, heads, T, size], key and value [1, kv heads, T, size].

    Takes from `kwargs` what transformers passes to every attention function: `cu_seq_lens_q` (int32 [B + 1]),
    `max_length_q`, `scaling`, `sliding_window` (tokens a position sees, itself included). The mask is ignored: the
    bounds say it all. Raises ValueError for what the kernels cannot do, so that nothing is left out silently.
    """
    del module, attention_mask
    if kwargs.get("cu_seq_lens_q") is None:
        raise ValueError("attention 'varlen' is for packed sequences; use 'sdpa' for generation and padded batches")
    for feature in ("softcap", "s_aux", "position_bias", "dropout"):
        if kwargs.get(feature) is not None and not (feature == "dropout" and kwargs["dropout"] == 0):
            raise ValueError(f"attention 'varlen' has no {feature}: use attn_implementation eager")
    attend = _attend_cuda if query.is_cuda else _attend_cpu
    output_THD = attend(
        query[0].transpose(0, 1),
        key[0].transpose(0, 1),
        value[0].transpose(0, 1),
        cu_seqlens=kwargs["cu_seq_lens_q"],
        max_seqlen=kwargs["max_length_q"],
        scale=kwargs.get("scaling"),
        window=kwargs.get("sliding_window"),
    )
    return output_THD.unsqueeze(0), None


@cache
def _takes_enable_gqa() -> bool:
    """Whether varlen_attn wants to be told that there are fewer KV heads; older releases find out alone."""
    from torch.nn.attention.varlen import varlen_attn

    return "enable_gqa" in inspect.signature(varlen_attn).parameters


def _attend_cuda(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    cu_seqlens: torch.Tensor,
    max_seqlen: int,
    scale: float | None,
    window: int | None,
) -> torch.Tensor:
    from torch.nn.attention.varlen import varlen_attn

    # The kernel counts keys to the left of the query, transformers counts the query too.
    left = -1 if window is None else window - 1
    heads = {"enable_gqa": query.shape[1] != key.shape[1]} if _takes_enable_gqa() else {}
    return varlen_attn(
        query,
        key,
        value,
        cu_seqlens,
        cu_seqlens,
        max_seqlen,
        max_seqlen,
        scale=scale,
        window_size=(left, 0),
        **heads,
    )


def _attend_cpu(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    cu_seqlens: torch.Tensor,
    max_seqlen: int,
    scale: float | None,
    window: int | None,
) -> torch.Tensor:
    del max_seqlen
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    return varlen_attention(query, key, value, cu_seqlens, scale, window or 0)


# Not registered as a mask: transformers then builds none.
AttentionInterface.register(VARLEN, varlen_attention_forward)
