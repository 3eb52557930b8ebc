"""Packs rounded up to few lengths where every new length costs a compilation.

On a CPU oneDNN compiles each product in bfloat16 for the very shape of its operands, which takes some milliseconds and
up to a megabyte that it keeps, and packs have ever new lengths. A run of filler tokens that nobody else sees, and of
which nothing is used, makes tokens, tokens that are read and targets few numbers each; the tokens of each expert of a
mixture stay as they come. GPUs, products in float32 and processors without products in bfloat16 compile nothing by
shape: packs stay as they are there.
"""

from dataclasses import replace

import torch

from rlhf_cli.models.compat import has_bf16_products
from rlhf_cli.models.packs import PackLike, with_filler

LEAST_STEP = 64
"""Lengths below 8,192 are multiples of it, longer ones of the power of two that is 1/128 to 1/64 of them."""


def rounded_length(length: int) -> int:
    """Return the smallest bucket length >= `length`; 0 for 0."""
    step = max(LEAST_STEP, 1 << max(length.bit_length() - 7, 0))
    return -(-length // step) * step


def rounded(pack: PackLike, dtype: torch.dtype) -> PackLike:
    """Return the pack as a model of this type takes it: with filler behind its tokens, or the pack itself. Its first K
    targets are the pack's own.
    """
    if pack.input_ids_T.device.type != "cpu" or dtype != torch.bfloat16 or not has_bf16_products():
        return pack
    num_tokens, num_targets = pack.input_ids_T.numel(), pack.targets_K.numel()
    more_targets = rounded_length(num_targets) - num_targets
    filled = with_filler(pack, rounded_length(num_tokens) - num_tokens)
    return replace(
        filled,
        rows_K=torch.cat([pack.rows_K, pack.rows_K[-1:].expand(more_targets)]),
        read_R=_with_others(pack.read_R, filled.input_ids_T.numel()),
        targets_K=torch.cat([pack.targets_K, pack.targets_K.new_zeros(more_targets)]),
    )


def _with_others(read_R: torch.Tensor, num_tokens: int) -> torch.Tensor:
    """Return a rounded number of positions: the positions that are read, and some others."""
    unread = torch.ones(num_tokens, dtype=torch.bool)
    unread[read_R] = False
    return torch.cat([read_R, unread.nonzero()[: rounded_length(read_R.numel()) - read_R.numel(), 0]])
