"""Pack masks for decoders that build masks without position IDs, from which transformers detects sequences."""

import torch
from transformers import PretrainedConfig

MASKED_HERE = frozenset({"gpt_oss"})
"""Model types that take one mask per layer type and support only eager attention."""


def packed_masks(cu_seqlens: torch.Tensor, config: PretrainedConfig, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Build additive attention masks [1, 1, T, T] per layer type: 0 or the smallest value.

    `cu_seqlens` int32 [B + 1] marks the sequence boundaries in the pack.
    """
    place_T = torch.arange(int(cu_seqlens[-1]), device=cu_seqlens.device)
    # Boundaries at the end of each sequence; right=True puts a token at a boundary into the next sequence.
    sequence_T = torch.bucketize(place_T, cu_seqlens[1:], right=True)
    distance_TT = place_T[:, None] - place_T
    seen_TT = (distance_TT >= 0) & (sequence_T[:, None] == sequence_T)
    in_window_TT = seen_TT & (distance_TT < config.sliding_window)
    return {"full_attention": _added(seen_TT, dtype), "sliding_attention": _added(in_window_TT, dtype)}


def _added(seen_TT: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    added_TT = torch.zeros(seen_TT.shape, dtype=dtype, device=seen_TT.device)
    # The minimum instead of -inf: transformers uses it too, and a fully masked row does not become NaN.
    return added_TT.masked_fill_(~seen_TT, torch.finfo(dtype).min)[None, None]
