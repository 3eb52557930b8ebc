"""Advantage estimators for response tokens.

Only trained response tokens are present: tool output and other text that the model did not write is skipped, and "next"
means the next trained token.
"""

from dataclasses import replace

import torch
from torch import Tensor

from rlhf_cli.algorithms.estimators.estimator import Advantages, Estimator, Experience, Turns
from rlhf_cli.algorithms.groups import group_normalised, scale_of
from rlhf_cli.algorithms.ragged import (
    segment_ids,
    segment_lengths,
    segment_sum,
    shift_left,
    suffix_scan,
    suffix_scan_by_segment,
)

# Relative to the squared score range, so rewards of 0 and 1e-6 give the same advantages as 0 and 1.
_WHITEN_EPS = 1e-8


def compute_advantages(estimator: Estimator, experience: Experience, *, settings: object) -> Advantages:
    """Compute the advantages for the policy loss, and the returns for the critic if there is one.

    Advantages are 0 for responses that are not trained on. They are per response if the estimator's are, unless
    whitening or step advantages change tokens.
    """
    assert estimator.advantages is not None, f"{estimator.name} has no advantages"
    result: Advantages = estimator.advantages(experience, settings)
    has_steps = experience.steps_N is not None and estimator.steps == "groups"
    # Arrays over the tokens of all responses cost the driver seconds per iteration.
    if result.per_response_B is not None and not has_steps and not estimator.whiten:
        return replace(result, per_response_B=result.per_response_B.where(experience.trained_B, 0.0))
    advantages_N = result.at_tokens(experience.cu)
    if experience.steps_N is not None and has_steps:
        compared_N = step_advantages(experience.steps_N, experience.cu, experience.groups_B)
        advantages_N = advantages_N + experience.step_weight * compared_N
    # Whiten over trained tokens only: a dropped response, such as a truncated one, must not shift the mean.
    trained_N = experience.trained_B[segment_ids(experience.cu, len(advantages_N))]
    chosen = advantages_N[trained_N]
    final_N = torch.zeros_like(advantages_N)
    final_N[trained_N] = whiten(chosen, scale=experience.scale) if estimator.whiten else chosen
    return replace(result, per_token_N=final_N, per_response_B=None)


def gae(
    rewards_N: Tensor,
    values_N: Tensor,
    cu: Tensor,
    *,
    gamma: float,
    lambd: float | Tensor,
    bootstrap_B: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute generalized advantages and returns, both `[N]` in the dtype of `values_N`.

    `d_t = r_t + gamma V_{t+1} - V_t`, `A_t = d_t + gamma lambd A_{t+1}`, returns `A + V` (arXiv 1506.02438, eq. 16).
    `lambd` may differ between responses, `[B]`. After the last token, `V` is `bootstrap_B`: the value of the state
    where the response was truncated, or 0 for a finished response (the default).
    """
    values = values_N.double()
    deltas_N = rewards_N.double() + gamma * shift_left(values, cu, last_B=bootstrap_B) - values
    if isinstance(lambd, Tensor):
        advantages_N = suffix_scan_by_segment(deltas_N, cu, gamma * lambd)
    else:
        advantages_N = suffix_scan(deltas_N, cu, gamma * lambd)
    return advantages_N.to(values_N.dtype), (advantages_N + values).to(values_N.dtype)


def adaptive_lambdas(cu: Tensor, *, alpha: float) -> Tensor:
    """Return `1 - 1 / (alpha length)` per response, at least 0, float64 `[B]` (VAPO, arXiv 2504.05118, eq. 6)."""
    return (1 - 1 / (alpha * segment_lengths(cu).double())).clamp(min=0.0)


def returns_to_go(rewards_N: Tensor, cu: Tensor, *, gamma: float) -> Tensor:
    """Compute `sum_{s >= t} gamma^(s-t) r_s` at each token (REINFORCE++, arXiv 2501.03262)."""
    return suffix_scan(rewards_N, cu, gamma)


def turn_returns(rewards_N: Tensor, turns: Turns, *, gamma: float) -> Tensor:
    """Compute `sum_{s >= t} gamma^(s-t) r_s` over a response's turns, `[U]`, where `r_s` is the sum over a turn's token
    rewards (GiGPO, arXiv 2505.10978).
    """
    return suffix_scan(segment_sum(rewards_N, turns.cu), turns.cu_responses, gamma)


def step_advantages(steps_N: Tensor, cu: Tensor, groups_B: Tensor) -> Tensor:
    """Compute at each token the sum of normalized step rewards from that token on, `[N]`.

    This is GRPO's process supervision (arXiv 2402.03300, section 4.1.3): all step rewards in a group are normalized
    together. `steps_N` holds each step reward at the last token of the step, NaN elsewhere.
    """
    is_end_N = ~steps_N.isnan()
    normal_S = group_normalised(steps_N[is_end_N], groups_B[segment_ids(cu, len(steps_N))[is_end_N]])
    placed_N = torch.zeros_like(steps_N).masked_scatter(is_end_N, normal_S)
    return returns_to_go(placed_N, cu, gamma=1.0)


def drawn_to_teacher(advantages_N: Tensor, log_ratio_N: Tensor, *, coef: float) -> Tensor:
    """Compute `A - coef (log policy - log teacher)` at each token: on-policy distillation.

    `log_ratio_N` covers the sampled tokens. The expected gradient at a token is the gradient of the reverse KL
    divergence in the preceding state, without differentiating through sampling (arXiv 2306.13649, section 3.1). This is
    the single-step term of arXiv 2306.08543, section 2.2, without the sum over later tokens.
    """
    return advantages_N - coef * log_ratio_N


def over_spans(log_ratio_N: Tensor, spans_N: Tensor) -> Tensor:
    """Return at each token the log-ratio of its span, `[N]`: the sum over the tokens of the span.

    For a teacher with another tokenizer, which assigns a log-prob to the text of a span, not to each of the policy's
    tokens. As the advantage of all its tokens, `log p_teacher(text) - log p_policy(text)` gives the policy gradient of
    the reverse KL divergence over the texts of spans (arXiv 2306.13649, section 3.1, with a span as the action).
    `spans_N` int64 are equal for the tokens of a span. For spans of one token, the result is `log_ratio_N`.
    """
    _, number_N = spans_N.unique(return_inverse=True)
    sums_S = torch.bincount(number_N, weights=log_ratio_N.double())
    return sums_S[number_N].to(log_ratio_N.dtype)


def whiten(x_N: Tensor, *, scale: float | None = None) -> Tensor:
    """Whiten over all tokens: `(x - mean) / sqrt(var + 1e-8 scale^2)` with the unbiased variance.

    A single token becomes 0. `scale` defaults to the range of `x_N`. Pass the score range if `x_N` also contains KL
    penalties: with equal scores, KL values near 0 must not become advantages of 1.
    """
    if x_N.numel() < 2:
        return torch.zeros_like(x_N)
    mean, root = whiten_moments(x_N, scale=scale)
    return ((x_N.double() - mean) / root).to(x_N.dtype)


def whiten_moments(x_N: Tensor, *, scale: float | None = None) -> tuple[Tensor, Tensor]:
    """Return the mean and `sqrt(var + 1e-8 scale^2)` of `whiten`, float64."""
    # float64: a float32 mean over millions of tokens would lose the last digits.
    variance, mean = torch.var_mean(x_N.double(), correction=1)
    eps = _WHITEN_EPS * (scale_of(x_N) if scale is None else scale) ** 2
    return mean, torch.sqrt(variance + eps)
