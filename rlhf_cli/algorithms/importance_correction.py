"""What corrects for the rollout engine and the trainer disagreeing on probabilities, and how much they disagree.

`old` are the trainer's log-probs of the sampled tokens under the weights that sampled them, `rollout` the engine's
own. They differ by kernels, precision and sampling truncation. Weights carry no gradient.
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
    """Return (weight of each token's loss, 1 if the weight was capped or set to zero), both `[K]`.

    With `w = exp(old - rollout)`: token_clip `min(w, cap)` (truncated importance sampling); token_mask `w` inside
    `keep_range`, 0 outside (IcePop, arXiv 2510.18855); seq_mask `w` for all tokens of a sequence whose
    `exp(mean(old - rollout))` is inside `keep_range`, 0 for the others; off 1. Tokens of weight 0 still count in the
    number of tokens a loss is divided by.
    """
    log_weight_K = log_ratio(old_K.detach(), rollout_K)
    if kind == "off":
        return torch.ones_like(log_weight_K), torch.zeros_like(log_weight_K)
    if kind == "token_clip":
        weight_K = log_weight_K.exp()
        return weight_K.clamp(max=cap), (weight_K > cap).float()
    if kind == "token_mask":
        gate_K = log_weight_K.exp()
    elif kind == "seq_mask":
        gate_K = segment_mean(log_weight_K, cu)[segment_ids(cu)].exp()
    else:
        raise ValueError(f"rollout_correction must be token_clip, token_mask, seq_mask or off, not {kind!r}")
    outside_K = (gate_K < keep_range[0]) | (gate_K > keep_range[1])
    return log_weight_K.exp().masked_fill(outside_K, 0.0), outside_K.float()


def mismatch(old_K: Tensor, rollout_K: Tensor) -> dict[str, Tensor]:
    """Return the per-token disagreement `[K]`: `k3` estimate of KL(rollout || old), `diff` = |old - rollout|, and the
    probabilities `old_prob` and `rollout_prob`, float64 for the moments of their correlation.
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
    """Return the Pearson correlation from global means of `x, y, x^2, y^2, xy`; 1 if neither varies, else 0 if one does
    not.

    Equal constants agree as well as can be, as from a greedy model.
    """
    x_variance, y_variance = xx_mean - x_mean**2, yy_mean - y_mean**2
    tiny = 1e-14
    if x_variance <= tiny or y_variance <= tiny:
        return 1.0 if x_variance <= tiny and y_variance <= tiny else 0.0
    return (xy_mean - x_mean * y_mean) / math.sqrt(x_variance * y_variance)
