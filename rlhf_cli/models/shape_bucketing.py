"""Round packs up to few lengths, if every new length costs a compilation.

On a CPU, oneDNN compiles every bfloat16 product for its exact shape, which takes milliseconds and up to a megabyte that
stays allocated; pack lengths keep changing. A run of filler tokens, invisible to other tokens and never read, rounds
the numbers of tokens, read tokens and targets; expert batches in mixtures are not rounded. GPUs, float32 products and
processors without bfloat16 products compile nothing per shape, so packs are unchanged there.
"""

from dataclasses import replace

import torch

from rlhf_cli.models.compat import has_bf16_products
from rlhf_cli.models.packs import PackLike, with_filler

LEAST_STEP = 64
"""Lengths below 8,192 are multiples of this; longer ones of a power of two between 1/128 and 1/64 of the length."""


def rounded_length(length: int) -> int:
    """Return the smallest bucket length >= `length`; 0 for 0."""
    # Keep the 7 leading bits: at most 1/64 filler, and 64 buckets per doubling of the length.
    step = max(LEAST_STEP, 1 << max(length.bit_length() - 7, 0))
    return -(-length // step) * step


def rounded(pack: PackLike, dtype: torch.dtype) -> PackLike:
    """Return the pack for a model with this dtype: with filler, or unchanged.

    The first K targets are the pack's targets.
    """
    if pack.input_ids_T.device.type != "cpu" or dtype != torch.bfloat16 or not has_bf16_products():
        return pack
    num_tokens, num_targets = pack.input_ids_T.numel(), pack.targets_K.numel()
    more_targets = rounded_length(num_targets) - num_targets
    filled = with_filler(pack, rounded_length(num_tokens) - num_tokens)
    return replace(
        filled,
        # Additional targets repeat the last row; callers slice their results off.
        rows_K=torch.cat([pack.rows_K, pack.rows_K[-1:].expand(more_targets)]),
        read_R=_with_others(pack.read_R, filled.input_ids_T.numel()),
        targets_K=torch.cat([pack.targets_K, pack.targets_K.new_zeros(more_targets)]),
    )


def _with_others(read_R: torch.Tensor, num_tokens: int) -> torch.Tensor:
    """Pad the read positions to a bucket length with unread positions."""
    # Unread positions, because LastMLP requires positions without duplicates.
    unread = torch.ones(num_tokens, dtype=torch.bool)
    unread[read_R] = False
    return torch.cat([read_R, unread.nonzero()[: rounded_length(read_R.numel()) - read_R.numel(), 0]])
