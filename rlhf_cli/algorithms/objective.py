"""Actor and critic objectives for a micro-batch: losses, corrections and bonuses combined.

Losses and metrics are partial sums; added up, they are means over the optimizer step (see aggregation). This module is
independent of models, engines and ranks.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from rlhf_cli.algorithms.aggregation import Metrics, StepTotals, aggregate, maximum, sequence_mean, token_mean
from rlhf_cli.algorithms.entropy import EntropyState, next_entropy_state
from rlhf_cli.algorithms.importance_correction import correction_weights, correlation, mismatch, off_policy_mask
from rlhf_cli.algorithms.kl import kl_estimate, kl_metric
from rlhf_cli.algorithms.policy_loss import TOKEN_METRICS, PolicyColumns, TokenLoss, log_ratio
from rlhf_cli.algorithms.value_loss import clipped_value_loss, explained_variance
from rlhf_cli.config.plugins import load_target
from rlhf_cli.config.policy import POLICY_LOSSES, LossAgg, PolicyConfig
from rlhf_cli.config.roles import KLTerm
from rlhf_cli.errors import RunError

# Metrics with this prefix are raw moments. They add up over micro-batches and ranks; a variance or correlation does
# not, so the finish_ functions compute it from the complete sums.
_MOMENT = "moment/"


@dataclass(frozen=True)
class LossWeights:
    """Weights of loss terms at an optimizer step: KL penalties by role, and the entropy bonus."""

    kl: Mapping[str, KLTerm]
    entropy: EntropyState


@dataclass(frozen=True)
class TokenTerms:
    """Parts of the actor loss per token, `[K]`, before the mean over the optimizer step.

    - `anchor_K`: log-probs that ratios are relative to.
    - `loss_K`, `flags`: policy loss and its metrics (policy_loss.py).
    - `weight_K`, `corrected_K`: rollout correction (importance_correction.py).
    - `kl_K`: KL estimate by role.
    """

    anchor_K: Tensor
    loss_K: Tensor
    flags: Mapping[str, Tensor]
    weight_K: Tensor
    corrected_K: Tensor
    kl_K: Mapping[str, Tensor]


def token_terms(
    logprobs_K: Tensor, columns: PolicyColumns, *, settings: PolicyConfig, weights: LossWeights
) -> TokenTerms:
    """Compute the parts of the actor loss per token, with gradient."""
    # No old_K: this is the first update since the rollout, and a second forward pass would return the same log-probs.
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
    if settings.off_policy_mask_threshold is not None:
        excluded_K = off_policy_mask(
            logprobs_K,
            columns.rollout_K,
            columns.advantages_K,
            columns.cu,
            threshold=settings.off_policy_mask_threshold,
        )
        weight_K, corrected_K = weight_K.masked_fill(excluded_K, 0.0), corrected_K.masked_fill(excluded_K, 1.0)
    if columns.kept_K is not None:
        weight_K = weight_K.masked_fill(~columns.kept_K, 0.0)
    kl_K = {role: kl_estimate(logprobs_K, columns.frozen_K[role], term.estimator) for role, term in weights.kl.items()}
    if settings.unbiased_kl:
        # With gradient: the samples come from the anchor, and the model decides how likely each is (arXiv 2512.02556).
        ratio_K = torch.exp(log_ratio(logprobs_K, anchor_K))
        kl_K = {role: ratio_K * one_K for role, one_K in kl_K.items()}
    return TokenTerms(anchor_K, loss_K, flags, weight_K, corrected_K, kl_K)


def policy_objective(
    logprobs_K: Tensor,
    entropy_K: Tensor | None,
    columns: PolicyColumns,
    *,
    settings: PolicyConfig,
    totals: StepTotals,
    weights: LossWeights,
    max_new_tokens: int,
    observed_O: Tensor | None = None,
) -> tuple[Tensor, Metrics]:
    """Compute (partial actor loss, with gradient; metrics, without).

    `logprobs_K` and `entropy_K` come from the model being trained. `entropy_K` may be None if the entropy weight is 0.
    `observed_O` are observation log-probs (ECHO, arXiv 2605.24517). This term and the one for correct responses (VAPO,
    2504.05118, eq. 10) are means over their tokens in the step, independent of `loss_agg`.
    """

    def mean(values_K: Tensor) -> Tensor:
        return aggregate(
            values_K,
            columns.cu,
            totals,
            kind=settings.loss_agg,
            max_new_tokens=max_new_tokens,
            prompt_tokens_K=columns.prompt_tokens_K,
        )

    terms = token_terms(logprobs_K, columns, settings=settings, weights=weights)
    # Weight tokens before aggregation: zero-weight tokens must still count in the denominator.
    loss = mean(terms.loss_K * terms.weight_K)
    metrics = {"policy_loss": loss.detach()}
    if entropy_K is not None:
        # At weight 0, skip the term: the backward pass for entropy is as expensive as for log-probs.
        if weights.entropy.weight:
            loss = loss - weights.entropy.weight * mean(entropy_K)
        metrics["entropy"] = token_mean(entropy_K.detach(), totals)
    elif weights.entropy.weight:
        raise ValueError("the entropy has a weight but was not computed")
    for role, term in weights.kl.items():
        loss = loss + term.coef * mean(terms.kl_K[role])
        metrics[kl_metric(role)] = sequence_mean(terms.kl_K[role].detach(), totals)
    if columns.correct_K is not None:
        nll = _mean_nll(logprobs_K * columns.correct_K, totals.num_correct)
        loss = loss + settings.correct_nll_coef * nll
        metrics["correct_nll"] = nll.detach()
    if observed_O is not None:
        nll = _mean_nll(observed_O, totals.num_observed)
        loss = loss + settings.observation_nll_coef * nll
        metrics["observation_nll"] = nll.detach()
    metrics |= _ratio_metrics(logprobs_K.detach(), terms.anchor_K, terms.flags, totals)
    selected = {"entropy_kept": columns.kept_K, "covariant": columns.covariant_K}
    metrics |= {name: token_mean(mask_K.float(), totals) for name, mask_K in selected.items() if mask_K is not None}
    metrics |= _correction_metrics(terms.anchor_K, columns.rollout_K, terms.weight_K, terms.corrected_K, totals)
    return loss, metrics


def _mean_nll(logprobs_K: Tensor, num_tokens: int) -> Tensor:
    """Partial mean over `num_tokens` tokens; 0 with a graph if there are none."""
    return -logprobs_K.sum() / max(num_tokens, 1)


def _token_loss(logprobs_K: Tensor, anchor_K: Tensor, columns: PolicyColumns, settings: PolicyConfig) -> TokenLoss:
    """Compute the configured per-token loss and metrics.

    Raises RunError if a user-defined loss returns an invalid result.
    """
    name = settings.policy_loss
    # The table names functions as strings, because config modules must import without torch.
    result = load_target(POLICY_LOSSES[name].function if name in POLICY_LOSSES else name)(
        logprobs_K, anchor_K, columns, settings
    )
    # Only user code is checked: built-in losses have tests, and this runs for every micro-batch.
    if name not in POLICY_LOSSES and (problem := _token_loss_problem(result, logprobs_K.shape)):
        raise RunError(f"--policy_loss {name} {problem}")
    loss_K, flags = result
    return loss_K, flags


def _token_loss_problem(result: Any, shape: torch.Size) -> str | None:
    """Return why a user-defined loss result is invalid, or None if it is valid."""
    if not (isinstance(result, tuple) and len(result) == 2 and isinstance(result[1], dict)):
        return "must return two values: the per-token loss and a dict of metrics"
    loss_K, flags = result
    if not isinstance(loss_K, Tensor) or loss_K.shape != shape:
        return f"must return a loss of shape {tuple(shape)}, one value per token"
    missing = [key for key in TOKEN_METRICS if key not in flags]
    return f"returns no metric {missing[0]!r}; without clipping, return unclipped(ratio_K)" if missing else None


def next_weights(weights: LossWeights, metrics: Mapping[str, float], *, settings: PolicyConfig) -> LossWeights:
    """Compute the weights for the next optimizer step from reduced metrics.

    Every rank and the driver compute the same result, so the weights are never communicated.
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
    value_clip: float,
    loss_agg: LossAgg,
    totals: StepTotals,
    max_new_tokens: int,
) -> tuple[Tensor, Metrics]:
    """Compute (partial critic loss, with gradient; metrics, without). The loss is averaged like the actor loss.

    `cu` int64 `[B+1]` marks sequence boundaries.
    """
    loss_K, clipped_K = clipped_value_loss(values_K, old_values_K, returns_K, value_clip=value_clip)
    loss = aggregate(loss_K, cu, totals, kind=loss_agg, max_new_tokens=max_new_tokens)
    # float64: explained variance subtracts squared means from mean squares, which cancels most float32 digits.
    returns, errors = returns_K.double(), (returns_K - values_K.detach()).double()
    return loss, {
        "value_loss": loss.detach(),
        "value_clip": token_mean(clipped_K, totals),
        "value_mean": token_mean(values_K.detach(), totals),
        "return_mean": token_mean(returns_K, totals),
        f"{_MOMENT}return_mean": token_mean(returns, totals),
        f"{_MOMENT}return_square": token_mean(returns.square(), totals),
        f"{_MOMENT}error_mean": token_mean(errors, totals),
        f"{_MOMENT}error_square": token_mean(errors.square(), totals),
    }


def finish_policy_metrics(metrics: Mapping[str, float]) -> dict[str, float]:
    """Replace the moments in the actor metrics with `rollout_prob_correlation`."""
    means, moments = _split_moments(metrics)
    return means | {"rollout_prob_correlation": correlation(**moments)}


def finish_value_metrics(metrics: Mapping[str, float]) -> dict[str, float]:
    """Replace the moments in the critic metrics with `explained_variance`."""
    means, moments = _split_moments(metrics)
    return means | {"explained_variance": explained_variance(**moments)}


def _split_moments(metrics: Mapping[str, float]) -> tuple[dict[str, float], dict[str, float]]:
    means = {name: float(value) for name, value in metrics.items() if not name.startswith(_MOMENT)}
    moments = {name[len(_MOMENT) :]: float(value) for name, value in metrics.items() if name.startswith(_MOMENT)}
    return means, moments


def _ratio_metrics(logprobs_K: Tensor, anchor_K: Tensor, flags: Mapping[str, Tensor], totals: StepTotals) -> Metrics:
    """Measure how far the model has moved from the anchor.

    `approx_kl` and `approx_k3` are the k1 and k3 estimates of KL(anchor || model).
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
    """Measure the mismatch between rollout-engine and trainer probabilities, with or without a correction."""
    apart = mismatch(anchor_K, rollout_K)
    x_K, y_K = apart["old_prob"], apart["rollout_prob"]
    return {
        "rollout_weight_mean": token_mean(weight_K, totals),
        "rollout_corrected": token_mean(corrected_K, totals),
        "rollout_k3": token_mean(apart["k3"], totals),
        "rollout_diff_max": maximum(apart["diff"]),
        f"{_MOMENT}x_mean": token_mean(x_K, totals),
        f"{_MOMENT}y_mean": token_mean(y_K, totals),
        f"{_MOMENT}xx_mean": token_mean(x_K.square(), totals),
        f"{_MOMENT}yy_mean": token_mean(y_K.square(), totals),
        f"{_MOMENT}xy_mean": token_mean(x_K * y_K, totals),
    }
