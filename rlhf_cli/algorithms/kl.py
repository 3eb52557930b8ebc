"""Per-token KL divergence from the reference policy, and the adaptive KL coefficient.

The estimators are from John Schulman (joschu.net/blog/kl-approx). The controller state is the coefficient, one float
that the caller stores and checkpoints.
"""

import math

import torch
from torch import Tensor

from rlhf_cli.config.policy import KLEstimator

# Larger log-ratios all mean "far apart", and float32 exp overflows at 88.
LOG_RATIO_LIMIT = 20.0

# Maximum relative correction per update: the clipped proportional error in arXiv 1909.08593, section 2.2.
_MAX_KL_ERROR = 0.2


def kl_metric(role: str) -> str:
    """Return the metric and sample column for the KL divergence from a frozen policy."""
    return "kl" if role == "ref" else f"{role}_kl"


def kl_estimate(logprobs: Tensor, ref_logprobs: Tensor, kind: KLEstimator) -> Tensor:
    """Estimate KL(policy || reference) per token in nats, in the shape of the sampled-token log-probs.

    With `l = logprobs - ref_logprobs`:
    - k1: `l`, unbiased, may be negative
    - k2: `l^2 / 2`
    - k3: `exp(-l) - 1 + l`, unbiased and never negative; `l` is clamped to +-20, without gradient beyond
    """
    log_ratio = logprobs - ref_logprobs
    if kind == "k1":
        return log_ratio
    if kind == "k2":
        return 0.5 * log_ratio.square()
    if kind == "k3":
        # Clamp both terms: with only the exponent clamped, the gradient below -20 would be +1 and increase the
        # divergence.
        limited = log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
        return torch.expm1(-limited) + limited
    raise ValueError(f"kl_estimator must be k1, k2 or k3, not {kind!r}")


def next_kl_coef(kl_coef: float, *, kl: float, target: float | None, horizon: int, num_sequences: int) -> float:
    """Compute the coefficient for the next iteration. Without a target or with a non-finite KL, it is unchanged.

    `kl` is the mean per-response KL (summed over tokens) on `num_sequences` responses from all ranks: `coef * (1 +
    clip(kl / target - 1, -0.2, 0.2) * num_sequences / horizon)` (arXiv 1909.08593, section 2.2).
    """
    if target is None or not math.isfinite(kl):
        return kl_coef
    error = min(max(kl / target - 1.0, -_MAX_KL_ERROR), _MAX_KL_ERROR)
    # A factor below 0 would flip the penalty's sign when num_sequences exceeds five horizons.
    return kl_coef * max(1.0 + error * num_sequences / horizon, 0.0)
