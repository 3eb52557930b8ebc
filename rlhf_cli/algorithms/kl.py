"""Divergence from the reference policy per token, and the coefficient it is weighted with.

Estimators are John Schulman's (joschu.net/blog/kl-approx). The state of a controller is the coefficient itself, one
float, which the caller keeps and checkpoints.
"""

import math

import torch
from torch import Tensor

from rlhf_cli.config.policy import KLEstimator

# exp of a log-ratio beyond this means no more than "very far", and overflows float32 at 88.
LOG_RATIO_LIMIT = 20.0

# Largest relative correction per update: the clip of the proportional error in arXiv 1909.08593, section 2.2.
MAX_KL_ERROR = 0.2


def kl_estimate(logprobs: Tensor, ref_logprobs: Tensor, kind: KLEstimator) -> Tensor:
    """Return an estimate of KL(policy || reference) per token, nats, in the shape of the log-probs of sampled tokens.

    With `l = logprobs - ref_logprobs`: k1 `l` (unbiased, may be negative), k2 `l^2 / 2`, k3 `exp(-l) - 1 + l`
    (unbiased and never negative; beyond +-20 `l` counts as +-20, without gradient).
    """
    log_ratio = logprobs - ref_logprobs
    if kind == "k1":
        return log_ratio
    if kind == "k2":
        return 0.5 * log_ratio.square()
    if kind == "k3":
        # Both terms: with the exponent alone limited, the gradient below -20 would be +1 and widen the divergence.
        limited = log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
        return torch.expm1(-limited) + limited
    raise ValueError(f"kl_estimator must be k1, k2 or k3, not {kind!r}")


def next_kl_coef(kl_coef: float, *, kl: float, target: float | None, horizon: int, num_sequences: int) -> float:
    """Return the coefficient for the next iteration; unchanged if there is no target, or the divergence is not finite.

    `kl` is the mean over responses of the KL summed over their tokens, measured on `num_sequences` responses of all
    ranks: `coef * (1 + clip(kl / target - 1, -0.2, 0.2) * num_sequences / horizon)` (arXiv 1909.08593, section 2.2).
    """
    if target is None or not math.isfinite(kl):
        return kl_coef
    error = min(max(kl / target - 1.0, -MAX_KL_ERROR), MAX_KL_ERROR)
    return kl_coef * max(1.0 + error * num_sequences / horizon, 0.0)
