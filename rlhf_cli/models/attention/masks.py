"""Masks of packs, for decoders that make masks without the positions by which transformers finds the sequences."""

import torch
from transformers import PretrainedConfig

MASKED_HERE = frozenset({"gpt_oss"})
"""Types of models that take a mask for each kind of layer, and run with plain attention only."""


def packed_masks(cu_seqlens: torch.Tensor, config: PretrainedConfig, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Return what is added to attention scores, [1, 1, T, T], by the kind of layer: 0 or the smallest number.

    `cu_seqlens` int32 [B + 1] bound the sequences of the pack.
    """
    place_T = torch.arange(int(cu_seqlens[-1]), device=cu_seqlens.device)
    sequence_T = torch.bucketize(place_T, cu_seqlens[1:], right=True)
    distance_TT = place_T[:, None] - place_T
    seen_TT = (distance_TT >= 0) & (sequence_T[:, None] == sequence_T)
    in_window_TT = seen_TT & (distance_TT < config.sliding_window)
    return {"full_attention": _added(seen_TT, dtype), "sliding_attention": _added(in_window_TT, dtype)}


def _added(seen_TT: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    added_TT = torch.zeros(seen_TT.shape, dtype=dtype, device=seen_TT.device)
    return added_TT.masked_fill_(~seen_TT, torch.finfo(dtype).min)[None, None]
