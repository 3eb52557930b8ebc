"""Per-token policy losses.

Each loss receives log-probs under the model (with gradient), log-probs under the anchor policy (without) and
advantages. It returns the per-token loss and per-token metrics `[K]`: `ratio`, and `clip_low`, `clip_high`, `clip_dual`
as 0 or 1 for the bound that stops the gradient. Aggregation is in aggregation.py.
"""

import torch
from torch import Tensor

from rlhf_cli.algorithms.kl import LOG_RATIO_LIMIT
from rlhf_cli.algorithms.ragged import segment_ids, segment_mean

TokenLoss = tuple[Tensor, dict[str, Tensor]]

TOKEN_METRICS = ("ratio", "clip_low", "clip_high", "clip_dual")


def log_ratio(logprobs_K: Tensor, old_K: Tensor) -> Tensor:
    """Compute `logprobs - old`, clamped to +-20 so that exp stays finite."""
    return (logprobs_K - old_K).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)


def ppo_clip(
    logprobs_K: Tensor,
    old_K: Tensor,
    advantages_K: Tensor,
    *,
    eps_clip_low: float,
    eps_clip_high: float,
    dual_clip: float | None = None,
) -> TokenLoss:
    """Compute the clipped surrogate `-min(r A, clip(r, 1 - eps_clip_low, 1 + eps_clip_high) A)` per token.

    `r = exp(logprobs - old)`: arXiv 1707.06347, eq. 7. `eps_clip_high` above `eps_clip_low` is clip-higher
    (2503.14476). With `dual_clip` c, tokens with A < 0 use `-max(min(...), c A)` (1912.09729), which bounds the loss
    when a ratio explodes.
    """
    ratio_K = torch.exp(log_ratio(logprobs_K, old_K))
    return _clipped(ratio_K, advantages_K, eps_clip_low=eps_clip_low, eps_clip_high=eps_clip_high, dual_clip=dual_clip)


def gspo(
    logprobs_K: Tensor, old_K: Tensor, advantages_K: Tensor, cu: Tensor, *, eps_clip_low: float, eps_clip_high: float
) -> TokenLoss:
    """Compute the clipped surrogate with the sequence ratio `s = exp(mean_t(logprobs - old))` at each token.

    arXiv 2507.18071, token form of eq. 13: `sg(s) exp(logprobs - sg(logprobs))` has value s, and its gradient with
    respect to a token log-prob is s. Use it with the mean over sequences. `cu` `[B+1]` marks sequence boundaries.
    """
    log_s_B = segment_mean((logprobs_K - old_K).detach(), cu).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    # The second factor is 1: it carries the gradient, since the sequence ratio is detached.
    ratio_K = log_s_B.exp()[segment_ids(cu)] * torch.exp(logprobs_K - logprobs_K.detach())
    return _clipped(ratio_K, advantages_K, eps_clip_low=eps_clip_low, eps_clip_high=eps_clip_high, dual_clip=None)


def cispo(logprobs_K: Tensor, old_K: Tensor, advantages_K: Tensor, *, cispo_eps_high: float) -> TokenLoss:
    """Compute `-sg(min(r, cispo_eps_high)) A logprobs` (arXiv 2506.13585, eq. 4).

    A large ratio is capped, but every token keeps a gradient. `clip_high` marks capped ratios.
    """
    ratio_K = torch.exp(log_ratio(logprobs_K, old_K)).detach()
    metrics = unclipped(ratio_K) | {"clip_high": (ratio_K > cispo_eps_high).float()}
    # The ratio is detached, so the gradient flows only through the log-probs.
    return -ratio_K.clamp(max=cispo_eps_high) * advantages_K * logprobs_K, metrics


def sapo(
    logprobs_K: Tensor, old_K: Tensor, advantages_K: Tensor, *, tau_positive: float, tau_negative: float
) -> TokenLoss:
    """Compute `-(4 / tau) sigmoid(tau (r - 1)) A` (arXiv 2511.20347, eq. 5): a soft gate instead of clipping.

    `tau` is `tau_positive` if A > 0, else `tau_negative`. On-policy, the gradient equals REINFORCE.
    """
    ratio_K = torch.exp(log_ratio(logprobs_K, old_K))
    tau_K = torch.where(advantages_K > 0, tau_positive, tau_negative)
    return -4.0 / tau_K * torch.sigmoid(tau_K * (ratio_K - 1.0)) * advantages_K, unclipped(ratio_K.detach())


def reinforce(logprobs_K: Tensor, old_K: Tensor, advantages_K: Tensor) -> TokenLoss:
    """Compute `-A logprobs`, independent of the ratio to the anchor."""
    return -advantages_K * logprobs_K, unclipped(torch.exp(log_ratio(logprobs_K, old_K)).detach())


def _clipped(
    ratio_K: Tensor, advantages_K: Tensor, *, eps_clip_low: float, eps_clip_high: float, dual_clip: float | None
) -> TokenLoss:
    surrogate_K = torch.minimum(
        ratio_K * advantages_K, ratio_K.clamp(1.0 - eps_clip_low, 1.0 + eps_clip_high) * advantages_K
    )
    negative_K = advantages_K < 0
    dual_K = torch.zeros_like(negative_K)
    if dual_clip is not None:
        bound_K = dual_clip * advantages_K
        dual_K = negative_K & (surrogate_K < bound_K)
        surrogate_K = torch.where(dual_K, bound_K, surrogate_K)
    # A bound counts only if it stops the gradient: the lower one for A < 0, the upper one for A > 0.
    metrics = {
        "ratio": ratio_K.detach(),
        "clip_low": (negative_K & (ratio_K < 1.0 - eps_clip_low)).float(),
        "clip_high": ((advantages_K > 0) & (ratio_K > 1.0 + eps_clip_high)).float(),
        "clip_dual": dual_K.float(),
    }
    return -surrogate_K, metrics


def unclipped(ratio_K: Tensor) -> dict[str, Tensor]:
    """Return metrics for a loss without clipping."""
    return {"ratio": ratio_K, **{name: torch.zeros_like(ratio_K) for name in ("clip_low", "clip_high", "clip_dual")}}
