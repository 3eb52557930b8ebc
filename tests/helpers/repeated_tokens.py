"""Tokens with keys used by many sequences, and the resulting gradients."""

import torch


def repeated_tokens() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return keys of 5 tokens, an index that repeats them 64 times, bfloat16 gradients, and float64 sums."""
    torch.manual_seed(0)
    keys = torch.randn(5, 2, 4, dtype=torch.bfloat16, requires_grad=True)
    index = torch.tensor([*range(5)] * 64 + [3, 3])
    grads = torch.rand(len(index), 2, 4).bfloat16()
    exact = torch.zeros(5, 2, 4, dtype=torch.float64).index_add_(0, index, grads.double())
    return keys, index, grads, exact
