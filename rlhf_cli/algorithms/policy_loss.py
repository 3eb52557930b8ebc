"""Per-token losses of the policy.

Every loss here takes the log-probs under the model being trained (with gradient), those of the anchor policy
(without) and the advantages, and returns the per-token loss with per-token metrics; means are taken elsewhere.
"""

import torch
from torch import Tensor

from rlhf_cli.algorithms.kl import LOG_RATIO_LIMIT


def log_ratio(logprobs_K: Tensor, old_K: Tensor) -> Tensor:
    """`logprobs - old`, limited to +-20 so that its exponential stays finite."""
    return (logprobs_K - old_K).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)


def ppo_clip(
    logprobs_K: Tensor,
    old_K: Tensor,
    advantages_K: Tensor,
    *,
    eps_low: float,
    eps_high: float,
    dual_clip: float | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Clipped surrogate `-min(r A, clip(r, 1 - eps_low, 1 + eps_high) A)` per token, `r = exp(logprobs - old)`.

    arXiv 1707.06347, eq. 7; eps_high above eps_low is clip-higher (2503.14476). With `dual_clip` c, where A < 0:
    `-max(min(...), c A)` (1912.09729), which bounds the loss of a token whose ratio exploded.

    Metrics `[K]`: `ratio`, and as 0 or 1 `clip_low`, `clip_high`, `clip_dual`: which bound holds the token's gradient
    at zero.
    """
    ratio_K = torch.exp(log_ratio(logprobs_K, old_K))
    surrogate_K = torch.minimum(ratio_K * advantages_K, ratio_K.clamp(1.0 - eps_low, 1.0 + eps_high) * advantages_K)
    negative_K = advantages_K < 0
    dual_K = torch.zeros_like(negative_K)
    if dual_clip is not None:
        bound_K = dual_clip * advantages_K
        dual_K = negative_K & (surrogate_K < bound_K)
        surrogate_K = torch.where(dual_K, bound_K, surrogate_K)
    metrics = {
        "ratio": ratio_K.detach(),
        "clip_low": (negative_K & (ratio_K < 1.0 - eps_low)).float(),
        "clip_high": ((advantages_K > 0) & (ratio_K > 1.0 + eps_high)).float(),
        "clip_dual": dual_K.float(),
    }
    return -surrogate_K, metrics
