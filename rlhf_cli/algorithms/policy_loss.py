"""Per-token policy losses.

Each loss receives log-probs under the model (with gradient), log-probs under the anchor policy (without), the columns
of the micro-batch and the policy settings. It returns the per-token loss and per-token metrics `[K]`: `ratio`, and
`clip_low`, `clip_high`, `clip_dual` as 0 or 1 for the bound that stops the gradient. Aggregation is in aggregation.py.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from rlhf_cli.algorithms.kl import LOG_RATIO_LIMIT
from rlhf_cli.algorithms.ragged import segment_ids, segment_mean, segment_sum
from rlhf_cli.config.policy import PolicyConfig

TokenLoss = tuple[Tensor, dict[str, Tensor]]

_LEAST_REST = 1e-8
"""Least probability of all other tokens in a divergence."""

_LEAST_LOG_RATIO = -18.42
"""Least log-ratio of a response in `vespo`: a ratio of 1e-8, as in the authors' code."""

TOKEN_METRICS = ("ratio", "clip_low", "clip_high", "clip_dual")


@dataclass(frozen=True)
class PolicyColumns:
    """Per-token columns for a micro-batch with K trained tokens in B sequences.

    - `rollout_K`: log-probs from the rollout engine.
    - `cu`: sequence boundaries, int64 `[B+1]`.
    - `old_K`: log-probs under the anchor policy. None on the first update after a rollout: the model is the anchor, and
      the ratio is exactly 1.
    - `frozen_K`: log-probs from the frozen policy of each KL term, by role: `{"ref": ...}`.
    - `kept_K`: True for tokens with high entropy; None if all are trained (`token_selection.py`).
    - `covariant_K`: True for tokens that `clip_cov` or `kl_cov` selects; None selects none.
    - `prompt_tokens_K`: trained tokens of the prompt in the iteration, for `prompt_mean`.
    - `correct_K`: 1 for tokens in correct responses, otherwise 0, for `correct_nll_coef`.

    All log-probs are computed from logits divided by the sampling temperature.

    Example with two sequences of 2 and 3 tokens: K = 5, `cu = [0, 2, 5]`, and `rollout_K`, `advantages_K` have shape
    `[5]`.
    """

    rollout_K: Tensor
    advantages_K: Tensor
    cu: Tensor
    old_K: Tensor | None = None
    frozen_K: Mapping[str, Tensor] = field(default_factory=dict)
    kept_K: Tensor | None = None
    covariant_K: Tensor | None = None
    prompt_tokens_K: Tensor | None = None
    correct_K: Tensor | None = None


def log_ratio(logprobs_K: Tensor, old_K: Tensor) -> Tensor:
    """Compute `logprobs - old`, clamped to +-20 so that exp stays finite."""
    return (logprobs_K - old_K).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)


def ppo_clip(logprobs_K: Tensor, anchor_K: Tensor, columns: PolicyColumns, settings: PolicyConfig) -> TokenLoss:
    """Compute the clipped surrogate `-min(r A, clip(r, 1 - eps_clip_low, 1 + eps_clip_high) A)` per token.

    `r = exp(logprobs - anchor)`: arXiv 1707.06347, eq. 7. `eps_clip_high` above `eps_clip_low` is clip-higher
    (2503.14476). With `dual_clip` c, tokens with A < 0 use `-max(min(...), c A)` (1912.09729), which bounds the loss
    when a ratio explodes.
    """
    return _clipped(torch.exp(log_ratio(logprobs_K, anchor_K)), columns, settings, dual_clip=settings.dual_clip)


def gspo(logprobs_K: Tensor, anchor_K: Tensor, columns: PolicyColumns, settings: PolicyConfig) -> TokenLoss:
    """Compute the clipped surrogate with the sequence ratio `s = exp(mean_t(logprobs - anchor))` at each token.

    arXiv 2507.18071, token form of eq. 13: `sg(s) exp(logprobs - sg(logprobs))` has value s, and its gradient with
    respect to a token log-prob is s. Use it with the mean over sequences.
    """
    log_s_B = segment_mean((logprobs_K - anchor_K).detach(), columns.cu).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    # The second factor is 1: it carries the gradient, since the sequence ratio is detached.
    ratio_K = log_s_B.exp()[segment_ids(columns.cu, len(logprobs_K))] * torch.exp(logprobs_K - logprobs_K.detach())
    return _clipped(ratio_K, columns, settings, dual_clip=None)


def cispo(logprobs_K: Tensor, anchor_K: Tensor, columns: PolicyColumns, settings: PolicyConfig) -> TokenLoss:
    """Compute `-sg(min(r, cispo_eps_high)) A logprobs` (arXiv 2506.13585, eq. 4).

    A large ratio is capped, but every token keeps a gradient. `clip_high` marks capped ratios.
    """
    ratio_K, highest = torch.exp(log_ratio(logprobs_K, anchor_K)).detach(), settings.cispo_eps_high
    metrics = unclipped(ratio_K) | {"clip_high": (ratio_K > highest).float()}
    # The ratio is detached, so the gradient flows only through the log-probs.
    return -ratio_K.clamp(max=highest) * columns.advantages_K * logprobs_K, metrics


def sapo(logprobs_K: Tensor, anchor_K: Tensor, columns: PolicyColumns, settings: PolicyConfig) -> TokenLoss:
    """Compute `-(4 / tau) sigmoid(tau (r - 1)) A` (arXiv 2511.20347, eq. 5): a soft gate instead of clipping.

    `tau` is the first of `sapo_tau` if A > 0, else the second. On-policy, the gradient equals REINFORCE.
    """
    ratio_K, advantages_K = torch.exp(log_ratio(logprobs_K, anchor_K)), columns.advantages_K
    tau_K = torch.where(advantages_K > 0, *settings.sapo_tau)
    return -4.0 / tau_K * torch.sigmoid(tau_K * (ratio_K - 1.0)) * advantages_K, unclipped(ratio_K.detach())


def dppo_tv(logprobs_K: Tensor, anchor_K: Tensor, columns: PolicyColumns, settings: PolicyConfig) -> TokenLoss:
    """Compute `-r A`, without gradient for tokens whose probability has left the rollout engine's by more than a limit.

    With the probabilities p of the model and q of the engine, a token with A > 0 stops at `p - q > high`, one with
    A < 0 at `q - p > low`: the total variation between the token and all others (arXiv 2602.04879). Unlike a ratio,
    this neither stops rare tokens early nor likely ones late.
    """
    moved_K = logprobs_K.detach().exp() - columns.rollout_K.exp()
    low, high = settings.dppo_limits
    return _stopped(logprobs_K, anchor_K, columns, low_K=moved_K < -low, high_K=moved_K > high)


def dppo_kl(logprobs_K: Tensor, anchor_K: Tensor, columns: PolicyColumns, settings: PolicyConfig) -> TokenLoss:
    """Compute `-r A` as `dppo_tv` does, with the limits for `q log(q / p) + (1 - q) log((1 - q) / (1 - p))`.

    This is the KL divergence, in nats, of the engine from the model between the token and all others (arXiv
    2602.04879).
    """
    divergence_K = binary_kl(columns.rollout_K, logprobs_K.detach())
    rises_K = logprobs_K.detach() > columns.rollout_K
    low, high = settings.dppo_limits
    low_K, high_K = ~rises_K & (divergence_K > low), rises_K & (divergence_K > high)
    return _stopped(logprobs_K, anchor_K, columns, low_K=low_K, high_K=high_K)


def binary_kl(engine_K: Tensor, model_K: Tensor) -> Tensor:
    """Compute the KL divergence between "this token" and "another token" from log-probs, in nats."""
    # In float32, 1 - p of a nearly certain token is only rounding.
    rest_engine_K, rest_model_K = ((1 - one.double().exp()).clamp(min=_LEAST_REST) for one in (engine_K, model_K))
    own_K = engine_K.double().exp() * (engine_K.double() - model_K.double())
    return (own_K + rest_engine_K * (rest_engine_K.log() - rest_model_K.log())).to(model_K.dtype)


def gmpo(logprobs_K: Tensor, anchor_K: Tensor, columns: PolicyColumns, settings: PolicyConfig) -> TokenLoss:
    """Compute `-g A` with the geometric mean g of the response's ratios (arXiv 2507.20673, eq. 4).

    Log-ratios are first clipped at `+ gmpo_log_clip` for A > 0 and at `- gmpo_log_clip` for A < 0; clipped tokens have
    no gradient. As in `gspo`, the token form has the gradient of the sequence form with the mean over sequences.
    """
    limit, advantages_K = settings.gmpo_log_clip, columns.advantages_K
    log_ratio_K = log_ratio(logprobs_K, anchor_K).detach()
    low_K, high_K = (advantages_K < 0) & (log_ratio_K < -limit), (advantages_K > 0) & (log_ratio_K > limit)
    clipped_K = torch.where(low_K | high_K, log_ratio_K.clamp(-limit, limit), log_ratio_K)
    mean_K = segment_mean(clipped_K, columns.cu)[segment_ids(columns.cu, len(logprobs_K))].exp()
    # The factor is 1: it carries the gradient of tokens that are not clipped.
    factor_K = torch.where(low_K | high_K, 1.0, torch.exp(logprobs_K - logprobs_K.detach()))
    metrics = unclipped(mean_K) | {"clip_low": low_K.float(), "clip_high": high_K.float()}
    return -mean_K * factor_K * advantages_K, metrics


def topr(logprobs_K: Tensor, anchor_K: Tensor, columns: PolicyColumns, _: PolicyConfig) -> TokenLoss:
    """Compute `-A logprobs` for A > 0 and `-min(s, 1) A logprobs` for A < 0 (tapered REINFORCE, arXiv 2503.14286).

    `s = exp(sum_t(logprobs - anchor))`, without gradient, is the ratio of the response: a response that has already
    become less likely is pushed down less. `clip_low` marks tokens with `s < 1` and A < 0.
    """
    log_s_B = segment_sum((logprobs_K - anchor_K).detach(), columns.cu).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    s_K, is_negative_K = log_s_B.exp()[segment_ids(columns.cu, len(logprobs_K))], columns.advantages_K < 0
    weight_K = torch.where(is_negative_K, s_K.clamp(max=1.0), 1.0)
    metrics = unclipped(s_K) | {"clip_low": (is_negative_K & (s_K < 1)).float()}
    return -weight_K * columns.advantages_K * logprobs_K, metrics


def vespo(logprobs_K: Tensor, anchor_K: Tensor, columns: PolicyColumns, settings: PolicyConfig) -> TokenLoss:
    """Compute `-phi(w) A logprobs` with `phi(w) = w^k exp(lambda (1 - w))`, without gradient through phi (arXiv
    2602.10693).

    `w = exp(sum_t(logprobs - anchor))` is the ratio of the response. phi is 1 at w = 1, has its maximum at
    w = k / lambda, and falls smoothly to 0 on both sides, instead of clipping.
    """
    log_ratio_K = log_ratio(logprobs_K, anchor_K).detach()
    log_w_B = segment_sum(log_ratio_K, columns.cu).clamp(_LEAST_LOG_RATIO, LOG_RATIO_LIMIT)
    log_w_K = log_w_B[segment_ids(columns.cu, len(logprobs_K))]
    is_negative_K = columns.advantages_K < 0
    k_K, lambda_K = (
        torch.where(is_negative_K, negative, positive)
        for positive, negative in (settings.vespo_k, settings.vespo_lambda)
    )
    phi_K = torch.exp(k_K * log_w_K + lambda_K * (1 - log_w_K.exp()))
    return -phi_K * columns.advantages_K * logprobs_K, unclipped(log_w_K.exp())


def clip_cov(logprobs_K: Tensor, anchor_K: Tensor, columns: PolicyColumns, settings: PolicyConfig) -> TokenLoss:
    """Compute `ppo_clip`, 0 for the tokens that `clip_cov_tokens` draws (arXiv 2505.22617, eq. 11)."""
    loss_K, metrics = _clipped(torch.exp(log_ratio(logprobs_K, anchor_K)), columns, settings, dual_clip=None)
    return loss_K if columns.covariant_K is None else loss_K.masked_fill(columns.covariant_K, 0.0), metrics


def kl_cov(logprobs_K: Tensor, anchor_K: Tensor, columns: PolicyColumns, settings: PolicyConfig) -> TokenLoss:
    """Compute `-r A`, plus `kl_cov_coef |logprobs - anchor|` for the tokens with the highest covariance of log-prob and
    advantage (arXiv 2505.22617, eq. 13; the absolute value is that of the authors' code).
    """
    log_ratio_K = log_ratio(logprobs_K, anchor_K)
    ratio_K = torch.exp(log_ratio_K)
    loss_K = -ratio_K * columns.advantages_K
    if columns.covariant_K is not None:
        loss_K = loss_K + settings.kl_cov_coef * log_ratio_K.abs() * columns.covariant_K
    return loss_K, unclipped(ratio_K.detach())


def _stopped(
    logprobs_K: Tensor, anchor_K: Tensor, columns: PolicyColumns, *, low_K: Tensor, high_K: Tensor
) -> TokenLoss:
    """Return `-r A`, 0 where a token with A < 0 is in `low_K` or one with A > 0 in `high_K`."""
    ratio_K, advantages_K = torch.exp(log_ratio(logprobs_K, anchor_K)), columns.advantages_K
    low_K, high_K = low_K & (advantages_K < 0), high_K & (advantages_K > 0)
    metrics = unclipped(ratio_K.detach()) | {"clip_low": low_K.float(), "clip_high": high_K.float()}
    return -(ratio_K * advantages_K).masked_fill(low_K | high_K, 0.0), metrics


def reinforce(logprobs_K: Tensor, anchor_K: Tensor, columns: PolicyColumns, _: PolicyConfig) -> TokenLoss:
    """Compute `-A logprobs`, independent of the ratio to the anchor."""
    return -columns.advantages_K * logprobs_K, unclipped(torch.exp(log_ratio(logprobs_K, anchor_K)).detach())


def _clipped(ratio_K: Tensor, columns: PolicyColumns, settings: PolicyConfig, *, dual_clip: float | None) -> TokenLoss:
    advantages_K, lowest, highest = columns.advantages_K, 1.0 - settings.eps_clip_low, 1.0 + settings.eps_clip_high
    surrogate_K = torch.minimum(ratio_K * advantages_K, ratio_K.clamp(lowest, highest) * advantages_K)
    negative_K = advantages_K < 0
    dual_K = torch.zeros_like(negative_K)
    if dual_clip is not None:
        bound_K = dual_clip * advantages_K
        dual_K = negative_K & (surrogate_K < bound_K)
        surrogate_K = torch.where(dual_K, bound_K, surrogate_K)
    # A bound counts only if it stops the gradient: the lower one for A < 0, the upper one for A > 0.
    metrics = {
        "ratio": ratio_K.detach(),
        "clip_low": (negative_K & (ratio_K < lowest)).float(),
        "clip_high": ((advantages_K > 0) & (ratio_K > highest)).float(),
        "clip_dual": dual_K.float(),
    }
    return -surrogate_K, metrics


def unclipped(ratio_K: Tensor) -> dict[str, Tensor]:
    """Return metrics for a loss without clipping."""
    return {"ratio": ratio_K, **{name: torch.zeros_like(ratio_K) for name in ("clip_low", "clip_high", "clip_dual")}}
