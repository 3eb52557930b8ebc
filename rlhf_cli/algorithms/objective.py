"""The objectives of actor and critic for one micro-batch: losses, corrections and bonuses joined.

Loss and metrics are parts that add up to means over the optimizer step (see aggregation). Nothing here knows about
models, engines or ranks.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from rlhf_cli.algorithms.aggregation import Metrics, StepTotals, maximum, token_mean
from rlhf_cli.algorithms.correction import correction_weights, correlation, mismatch
from rlhf_cli.algorithms.policy_loss import log_ratio, ppo_clip
from rlhf_cli.algorithms.value_loss import clipped_value_loss, explained_variance
from rlhf_cli.config.online import PolicyConfig

# Metrics under this prefix are moments, which the finish_ functions turn into a figure once they are complete.
MOMENT = "moment/"


def policy_objective(
    logprobs_K: Tensor,
    entropy_K: Tensor | None,
    *,
    old_K: Tensor | None,
    rollout_K: Tensor,
    advantages_K: Tensor,
    cu_trained: Tensor,
    settings: PolicyConfig,
    totals: StepTotals,
) -> tuple[Tensor, Metrics]:
    """(part of the actor's loss, with gradient; metrics without).

    `logprobs_K` and `entropy_K` come from the model being trained, `old_K` from the anchor policy, `rollout_K` from the
    engine that sampled; `cu_trained` `[B+1]` bounds the sequences. `old_K` None means that this is the first update
    since the rollout: the model is its own anchor and the ratio is exactly 1. `entropy_K` may be None where its
    coefficient is 0. All log-probs are of logits divided by the sampling temperature.
    """
    anchor_K = logprobs_K.detach() if old_K is None else old_K
    low, high = settings.eps_clip_low_high or (settings.eps_clip, settings.eps_clip)
    loss_K, flags = ppo_clip(
        logprobs_K, anchor_K, advantages_K, eps_low=low, eps_high=high, dual_clip=settings.dual_clip
    )
    weight_K, corrected_K = correction_weights(
        anchor_K,
        rollout_K,
        cu_trained,
        kind=settings.rollout_correction,
        cap=settings.rollout_correction_cap,
        keep_range=settings.rollout_correction_range,
    )
    policy_loss = token_mean(loss_K * weight_K, totals)
    loss = policy_loss
    metrics = {"policy_loss": policy_loss.detach()}
    if entropy_K is not None:
        entropy = token_mean(entropy_K, totals)
        loss = loss - settings.entropy_loss_coef * entropy
        metrics["entropy"] = entropy.detach()
    elif settings.entropy_loss_coef:
        raise ValueError("entropy_loss_coef is not 0 but the entropy was not computed")
    metrics |= _ratio_metrics(logprobs_K.detach(), anchor_K, flags, totals)
    metrics |= _correction_metrics(anchor_K, rollout_K, weight_K, corrected_K, totals)
    return loss, metrics


def value_objective(
    values_K: Tensor, *, old_values_K: Tensor, returns_K: Tensor, settings: PolicyConfig, totals: StepTotals
) -> tuple[Tensor, Metrics]:
    """(part of the critic's loss, with gradient; metrics without)."""
    loss_K, clipped_K = clipped_value_loss(values_K, old_values_K, returns_K, value_clip=settings.value_clip)
    loss = token_mean(loss_K, totals)
    returns, errors = returns_K.double(), (returns_K - values_K.detach()).double()
    return loss, {
        "value_loss": loss.detach(),
        "value_clip": token_mean(clipped_K, totals),
        "value_mean": token_mean(values_K.detach(), totals),
        "return_mean": token_mean(returns_K, totals),
        f"{MOMENT}return_mean": token_mean(returns, totals),
        f"{MOMENT}return_square": token_mean(returns.square(), totals),
        f"{MOMENT}error_mean": token_mean(errors, totals),
        f"{MOMENT}error_square": token_mean(errors.square(), totals),
    }


def finish_policy_metrics(metrics: Mapping[str, float]) -> dict[str, float]:
    """Complete metrics of the actor's step: moments replaced by `rollout_prob_correlation`."""
    figures, moments = _split_moments(metrics)
    return figures | {"rollout_prob_correlation": correlation(**moments)}


def finish_value_metrics(metrics: Mapping[str, float]) -> dict[str, float]:
    """Complete metrics of the critic's step: moments replaced by `explained_variance`."""
    figures, moments = _split_moments(metrics)
    return figures | {"explained_variance": explained_variance(**moments)}


def _split_moments(metrics: Mapping[str, float]) -> tuple[dict[str, float], dict[str, float]]:
    figures = {name: float(value) for name, value in metrics.items() if not name.startswith(MOMENT)}
    moments = {name[len(MOMENT) :]: float(value) for name, value in metrics.items() if name.startswith(MOMENT)}
    return figures, moments


def _ratio_metrics(logprobs_K: Tensor, anchor_K: Tensor, flags: dict[str, Tensor], totals: StepTotals) -> Metrics:
    """How far the model has moved from the anchor: `approx_kl` is k1 and `approx_k3` k3 of KL(anchor || model)."""
    log_ratio_K = log_ratio(logprobs_K, anchor_K)
    return {
        "clip_low": token_mean(flags["clip_low"], totals),
        "clip_high": token_mean(flags["clip_high"], totals),
        "clip_dual": token_mean(flags["clip_dual"], totals),
        "approx_kl": token_mean(-log_ratio_K, totals),
        "approx_k3": token_mean(torch.expm1(log_ratio_K) - log_ratio_K, totals),
        "ratio_mean": token_mean(flags["ratio"], totals),
        "ratio_max": maximum(flags["ratio"]),
    }


def _correction_metrics(
    anchor_K: Tensor, rollout_K: Tensor, weight_K: Tensor, corrected_K: Tensor, totals: StepTotals
) -> Metrics:
    """How far engine and trainer disagree; there whether or not a correction is applied."""
    apart = mismatch(anchor_K, rollout_K)
    x_K, y_K = apart["old_prob"], apart["rollout_prob"]
    return {
        "rollout_weight_mean": token_mean(weight_K, totals),
        "rollout_corrected": token_mean(corrected_K, totals),
        "rollout_k3": token_mean(apart["k3"], totals),
        "rollout_diff_max": maximum(apart["diff"]),
        f"{MOMENT}x_mean": token_mean(x_K, totals),
        f"{MOMENT}y_mean": token_mean(y_K, totals),
        f"{MOMENT}xx_mean": token_mean(x_K.square(), totals),
        f"{MOMENT}yy_mean": token_mean(y_K.square(), totals),
        f"{MOMENT}xy_mean": token_mean(x_K * y_K, totals),
    }
