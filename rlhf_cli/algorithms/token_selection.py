"""Chooses tokens among all trained tokens of an optimizer step, before the step.

The choice depends on values of the whole step. It is made once, from log-probs and entropies of a pass without
gradient over all micro-batches and ranks, and is then a constant of each token: micro-batches do not change it.
"""

import torch
from torch import Tensor

from rlhf_cli.config.policy import PolicyConfig

_BITS = 31


def high_entropy_tokens(entropy_N: Tensor, fraction: float) -> Tensor:
    """Return which tokens have an entropy of at least the quantile `1 - fraction`, bool `[N]` (arXiv 2506.01939)."""
    if not entropy_N.numel():
        return torch.ones_like(entropy_N, dtype=torch.bool)
    # torch.quantile is limited to 2^24 values.
    ascending_N = entropy_N.double().sort().values
    place = (1 - fraction) * (len(ascending_N) - 1)
    low = int(place)
    high = min(low + 1, len(ascending_N) - 1)
    return entropy_N.double() >= ascending_N[low] + (place - low) * (ascending_N[high] - ascending_N[low])


def covariances(logprobs_N: Tensor, advantages_N: Tensor) -> Tensor:
    """Return `(logprob - mean) (A - mean)` per token, float64 `[N]`: its mean is the fall of the entropy in a policy
    gradient step, up to the step size (arXiv 2505.22617, eq. 8).
    """
    logprobs_N, advantages_N = logprobs_N.double(), advantages_N.double()
    return (logprobs_N - logprobs_N.mean()) * (advantages_N - advantages_N.mean())


def clip_cov_tokens(covariances_N: Tensor, clipped_N: Tensor, keys_N: Tensor, settings: PolicyConfig) -> Tensor:
    """Draw `clip_cov_ratio N` tokens, at least one, with covariances within `clip_cov_range`, bool `[N]`.

    Tokens that the ratio clips are not drawn. The tokens with the smallest `keys_N`, which are random, are drawn.
    """
    low, high = settings.clip_cov_range
    chosen_N = (covariances_N > low) & (covariances_N < high) & ~clipped_N.bool()
    candidates = chosen_N.nonzero().squeeze(1)
    count = max(1, int(settings.clip_cov_ratio * len(keys_N)))
    drawn = candidates[keys_N[candidates].argsort(stable=True)[:count]]
    return torch.zeros_like(chosen_N).index_fill(0, drawn, True)


def kl_cov_tokens(covariances_N: Tensor, settings: PolicyConfig) -> Tensor:
    """Return which tokens have the `kl_cov_ratio N` highest covariances, at least one, bool `[N]`."""
    count = min(max(1, int(settings.kl_cov_ratio * len(covariances_N))), len(covariances_N))
    return torch.zeros_like(covariances_N, dtype=torch.bool).index_fill(0, covariances_N.topk(count).indices, True)


def random_keys(rollout_K: Tensor, targets_K: Tensor, *, seed: int) -> Tensor:
    """Return a pseudo-random number below 2^31 per token, int64 `[K]`.

    It is a hash of the seed, the token and the bits of the engine's log-prob, which every layout of the step has alike.
    """
    hashed_K = rollout_K.float().contiguous().view(torch.int32).long() * 0x9E3779B1 + targets_K.long() * 0x85EBCA77
    hashed_K = (hashed_K + seed * 0xC2B2AE3D) & ((1 << 62) - 1)
    for shift in (29, 17):
        hashed_K = ((hashed_K ^ (hashed_K >> shift)) * 0x27D4EB2F165667C5) & ((1 << 62) - 1)
    return hashed_K >> _BITS
