"""The objectives of actor and critic for one micro-batch: losses, corrections and bonuses joined.

Loss and metrics are parts that add up to means over the optimizer step (see aggregation). Nothing here knows about
models, engines or ranks.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from rlhf_cli.algorithms.aggregation import Metrics, StepTotals, aggregate, maximum, sequence_mean, token_mean
from rlhf_cli.algorithms.entropy import EntropyState, next_entropy_state
from rlhf_cli.algorithms.importance_correction import correction_weights, correlation, mismatch
from rlhf_cli.algorithms.kl import kl_estimate
from rlhf_cli.algorithms.policy_loss import TOKEN_METRICS, TokenLoss, cispo, gspo, log_ratio, ppo_clip, reinforce, sapo
from rlhf_cli.algorithms.value_loss import clipped_value_loss, explained_variance
from rlhf_cli.config.plugins import load_target
from rlhf_cli.config.policy import POLICY_LOSSES, ActorCriticPolicyConfig, PolicyConfig
from rlhf_cli.errors import RunError

# Metrics under this prefix are moments, which the finish_ functions turn into a figure once they are complete.
MOMENT = "moment/"


@dataclass(frozen=True)
class LossWeights:
    """Weights that controllers change while a run goes on: of the KL divergence in the loss, of the entropy bonus."""

    kl: float
    entropy: EntropyState


@dataclass(frozen=True)
class PolicyColumns:
    """Values of the trained tokens of a micro-batch, `[K]`, besides the log-probs under training.

    `rollout_K` from the engine that sampled; `cu` int64 `[B+1]` bounds the sequences; `old_K` from the anchor policy,
    None for the first update since the rollout: the model is its own anchor then and the ratio exactly 1; `ref_K` from
    the reference, if the loss has a term of the KL divergence. All log-probs are of logits divided by the sampling
    temperature.
    """

    rollout_K: Tensor
    advantages_K: Tensor
    cu: Tensor
    old_K: Tensor | None = None
    ref_K: Tensor | None = None


def policy_objective(
    logprobs_K: Tensor,
    entropy_K: Tensor | None,
    columns: PolicyColumns,
    *,
    settings: PolicyConfig,
    totals: StepTotals,
    weights: LossWeights,
    max_new_tokens: int,
) -> tuple[Tensor, Metrics]:
    """Return (part of the actor's loss, with gradient; metrics without).

    `logprobs_K` and `entropy_K` come from the model being trained; `entropy_K` may be None where its weight is 0.
    """

    def mean(values_K: Tensor) -> Tensor:
        return aggregate(values_K, columns.cu, totals, kind=settings.loss_agg, max_new_tokens=max_new_tokens)

    anchor_K = logprobs_K.detach() if columns.old_K is None else columns.old_K
    loss_K, flags = _token_loss(logprobs_K, anchor_K, columns, settings)
    weight_K, corrected_K = correction_weights(
        anchor_K,
        columns.rollout_K,
        columns.cu,
        kind=settings.rollout_correction,
        cap=settings.rollout_correction_cap,
        keep_range=settings.rollout_correction_range,
    )
    loss = mean(loss_K * weight_K)
    metrics = {"policy_loss": loss.detach()}
    if entropy_K is not None:
        if weights.entropy.weight:  # without a weight its gradient, which costs as much as the log-probs', is left out
            loss = loss - weights.entropy.weight * mean(entropy_K)
        metrics["entropy"] = token_mean(entropy_K.detach(), totals)
    elif weights.entropy.weight:
        raise ValueError("the entropy has a weight but was not computed")
    if columns.ref_K is not None:
        kl_K = kl_estimate(logprobs_K, columns.ref_K, settings.kl_estimator)
        loss = loss + weights.kl * mean(kl_K)
        metrics["kl"] = sequence_mean(kl_K.detach(), totals)
    metrics |= _ratio_metrics(logprobs_K.detach(), anchor_K, flags, totals)
    metrics |= _correction_metrics(anchor_K, columns.rollout_K, weight_K, corrected_K, totals)
    return loss, metrics


def clip_loss(logprobs_K: Tensor, anchor_K: Tensor, columns: PolicyColumns, settings: PolicyConfig) -> TokenLoss:
    """Return the loss `clip` of each token by the settings, and its metrics."""
    return ppo_clip(
        logprobs_K,
        anchor_K,
        columns.advantages_K,
        eps_clip_low=settings.eps_clip_low,
        eps_clip_high=settings.eps_clip_high,
        dual_clip=settings.dual_clip,
    )


def gspo_loss(logprobs_K: Tensor, anchor_K: Tensor, columns: PolicyColumns, settings: PolicyConfig) -> TokenLoss:
    """Return the loss `gspo` of each token by the settings, and its metrics."""
    return gspo(
        logprobs_K,
        anchor_K,
        columns.advantages_K,
        columns.cu,
        eps_clip_low=settings.eps_clip_low,
        eps_clip_high=settings.eps_clip_high,
    )


def cispo_loss(logprobs_K: Tensor, anchor_K: Tensor, columns: PolicyColumns, settings: PolicyConfig) -> TokenLoss:
    """Return the loss `cispo` of each token by the settings, and its metrics."""
    return cispo(logprobs_K, anchor_K, columns.advantages_K, cispo_eps_high=settings.cispo_eps_high)


def sapo_loss(logprobs_K: Tensor, anchor_K: Tensor, columns: PolicyColumns, settings: PolicyConfig) -> TokenLoss:
    """Return the loss `sapo` of each token by the settings, and its metrics."""
    positive, negative = settings.sapo_tau
    return sapo(logprobs_K, anchor_K, columns.advantages_K, tau_positive=positive, tau_negative=negative)


def reinforce_loss(logprobs_K: Tensor, anchor_K: Tensor, columns: PolicyColumns, _: PolicyConfig) -> TokenLoss:
    """Return the loss `reinforce` of each token by the settings, and its metrics."""
    return reinforce(logprobs_K, anchor_K, columns.advantages_K)


def _token_loss(logprobs_K: Tensor, anchor_K: Tensor, columns: PolicyColumns, settings: PolicyConfig) -> TokenLoss:
    """Return the loss of the settings with its metrics. Raise RunError if a loss of others returns something else."""
    name = settings.policy_loss
    found = load_target(POLICY_LOSSES[name].function if name in POLICY_LOSSES else name)(
        logprobs_K, anchor_K, columns, settings
    )
    if name not in POLICY_LOSSES and (fault := _fault_of_token_loss(found, logprobs_K.shape)):
        raise RunError(f"--policy_loss {name} {fault}")
    loss_K, flags = found
    return loss_K, flags


def _fault_of_token_loss(found: Any, shape: torch.Size) -> str | None:
    """Return why a result of others' code is no loss of each token with its metrics, None if it is one."""
    if not (isinstance(found, tuple) and len(found) == 2 and isinstance(found[1], dict)):
        return "has to return two values: the loss of each token, and a dict of metrics"
    loss_K, flags = found
    if not isinstance(loss_K, Tensor) or loss_K.shape != shape:
        return f"has to return a loss of shape {tuple(shape)}, one value for each token"
    missing = [key for key in TOKEN_METRICS if key not in flags]
    return f"returns no metric {missing[0]!r}; a loss without bounds returns unclipped(ratio_K)" if missing else None


def next_weights(weights: LossWeights, metrics: Mapping[str, float], *, settings: PolicyConfig) -> LossWeights:
    """Return the weights for the next optimizer step, from the metrics of one; every rank, and the driver, comes to the
    same.
    """
    entropy = next_entropy_state(
        weights.entropy,
        entropy=metrics["entropy"],
        target=settings.entropy_target,
        delta=settings.entropy_delta,
        max_coef=settings.entropy_max,
    )
    return replace(weights, entropy=entropy)


def value_objective(
    values_K: Tensor,
    *,
    old_values_K: Tensor,
    returns_K: Tensor,
    cu: Tensor,
    settings: ActorCriticPolicyConfig,
    totals: StepTotals,
    max_new_tokens: int,
) -> tuple[Tensor, Metrics]:
    """Return (part of the critic's loss, with gradient; metrics without); the loss is averaged as the actor's.

    `cu` int64 `[B+1]` bounds the sequences.
    """
    loss_K, clipped_K = clipped_value_loss(values_K, old_values_K, returns_K, value_clip=settings.value_clip)
    loss = aggregate(loss_K, cu, totals, kind=settings.loss_agg, max_new_tokens=max_new_tokens)
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
    """Return how far the model has moved from the anchor: `approx_kl` is k1 and `approx_k3` k3 of KL(anchor ||
    model).
    """
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
    """Return how far engine and trainer disagree, whether or not a correction is applied."""
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
