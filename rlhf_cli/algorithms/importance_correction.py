"""Importance-sampling correction for the mismatch between rollout-engine and trainer probabilities.

`old` are trainer log-probs for the sampled tokens under the weights that sampled them; `rollout` are engine log-probs.
They differ because of kernels, precision and sampling truncation. Correction weights have no gradient.
"""

import math

import torch
from torch import Tensor

from rlhf_cli.algorithms.policy_loss import log_ratio
from rlhf_cli.algorithms.ragged import segment_ids, segment_mean
from rlhf_cli.config.policy import RolloutCorrection


def correction_weights(
    old_K: Tensor,
    rollout_K: Tensor,
    cu: Tensor,
    *,
    kind: RolloutCorrection,
    cap: float,
    keep_range: tuple[float, float],
) -> tuple[Tensor, Tensor]:
    """Compute (per-token loss weight, 1 where the weight was capped or zeroed), both `[K]`.

    With `w = exp(old - rollout)`:
    - token_clip: `min(w, cap)`, truncated importance sampling
    - token_mask: `w` inside `keep_range`, 0 outside (IcePop, arXiv 2510.18855)
    - seq_mask: `w` for sequences with `exp(mean(old - rollout))` inside `keep_range`, 0 for other sequences
    - off: 1

    Zero-weight tokens still count in the loss denominator.
    """
    # Clamped to +-20 like the policy ratio, so that a token the engine considers impossible stays finite.
    log_weight_K = log_ratio(old_K.detach(), rollout_K)
    if kind == "off":
        return torch.ones_like(log_weight_K), torch.zeros_like(log_weight_K)
    if kind == "token_clip":
        weight_K = log_weight_K.exp()
        return weight_K.clamp(max=cap), (weight_K > cap).float()
    if kind == "token_mask":
        gate_K = log_weight_K.exp()
    elif kind == "seq_mask":
        gate_K = segment_mean(log_weight_K, cu)[segment_ids(cu, len(log_weight_K))].exp()
    else:
        raise ValueError(f"rollout_correction must be token_clip, token_mask, seq_mask or off, not {kind!r}")
    outside_K = (gate_K < keep_range[0]) | (gate_K > keep_range[1])
    # seq_mask gates by sequence, but kept tokens still get per-token weights.
    return log_weight_K.exp().masked_fill(outside_K, 0.0), outside_K.float()


def off_policy_mask(
    logprobs_K: Tensor, rollout_K: Tensor, advantages_K: Tensor, cu: Tensor, *, threshold: float
) -> Tensor:
    """Return which tokens to exclude, bool `[K]`: A < 0, in sequences with `mean(rollout - logprobs) > threshold`.

    DeepSeek-V3.2, arXiv 2512.02556, eq. 9: a bad response that the model would no longer give teaches nothing.
    """
    fallen_B = segment_mean(rollout_K - logprobs_K.detach(), cu)
    return (advantages_K < 0) & (fallen_B > threshold)[segment_ids(cu, len(rollout_K))]


def mismatch(old_K: Tensor, rollout_K: Tensor) -> dict[str, Tensor]:
    """Compute the per-token mismatch `[K]` between trainer and engine.

    - `k3`: estimate of KL(rollout || old)
    - `diff`: |old - rollout|
    - `old_prob`, `rollout_prob`: probabilities in float64, for the correlation moments
    """
    old_K = old_K.detach()
    log_weight_K = log_ratio(old_K, rollout_K)
    return {
        "k3": torch.expm1(log_weight_K) - log_weight_K,
        "diff": (old_K - rollout_K).abs(),
        "old_prob": old_K.double().exp(),
        "rollout_prob": rollout_K.double().exp(),
    }


def correlation(*, x_mean: float, y_mean: float, xx_mean: float, yy_mean: float, xy_mean: float) -> float:
    """Compute the Pearson correlation from global means of `x, y, x^2, y^2, xy`.

    Returns 1 if both are constant, as for a greedy model, and 0 if only one is.
    """
    x_variance, y_variance = xx_mean - x_mean**2, yy_mean - y_mean**2
    # Variances of probabilities are differences of float64 means up to 1: anything smaller is rounding.
    tiny = 1e-14
    if x_variance <= tiny or y_variance <= tiny:
        return 1.0 if x_variance <= tiny and y_variance <= tiny else 0.0
    return (xy_mean - x_mean * y_mean) / math.sqrt(x_variance * y_variance)
