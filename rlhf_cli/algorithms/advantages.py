"""Advantages of response tokens.

Only response tokens that are trained are present, so tool output and other text a model did not write leaves no
hole: the value and advantage of the next trained token are the "next" ones. Where rewards come from is elsewhere.
"""

import torch
from torch import Tensor

from rlhf_cli.algorithms.groups import group_normalised, scale_of
from rlhf_cli.algorithms.ragged import segment_ids, shift_left, suffix_scan

WHITEN_EPS = 1e-8


def gae(
    rewards_N: Tensor, values_N: Tensor, cu: Tensor, *, gamma: float, lambd: float, bootstrap_B: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return the generalised advantages and returns, both `[N]` in the type of `values_N`.

    `d_t = r_t + gamma V_{t+1} - V_t`, `A_t = d_t + gamma lambd A_{t+1}`, returns `A + V` (arXiv 1506.02438, eq. 16).
    `V` after the last token is `bootstrap_B`: the value of the state a response was cut at, 0 for a finished one and
    for all if not given.
    """
    values = values_N.double()
    deltas_N = rewards_N.double() + gamma * shift_left(values, cu, last_B=bootstrap_B) - values
    advantages_N = suffix_scan(deltas_N, cu, gamma * lambd)
    return advantages_N.to(values_N.dtype), (advantages_N + values).to(values_N.dtype)


def returns_to_go(rewards_N: Tensor, cu: Tensor, *, gamma: float) -> Tensor:
    """Return `sum_{s >= t} gamma^(s-t) r_s` at each token (REINFORCE++, arXiv 2501.03262)."""
    return suffix_scan(rewards_N, cu, gamma)


def step_advantages(steps_N: Tensor, cu: Tensor, groups_B: Tensor) -> Tensor:
    """Return at each token the sum of the normalised rewards of the steps that end there or later, `[N]`.

    Process supervision of GRPO (arXiv 2402.03300, section 4.1.3): the rewards of all steps of a group are normalised
    together. `steps_N` has the reward of a step at its last token, NaN elsewhere.
    """
    is_end_N = ~steps_N.isnan()
    normal_S = group_normalised(steps_N[is_end_N], groups_B[segment_ids(cu)[is_end_N]])
    placed_N = torch.zeros_like(steps_N).masked_scatter(is_end_N, normal_S)
    return returns_to_go(placed_N, cu, gamma=1.0)


def at_every_token(advantages_B: Tensor, cu: Tensor) -> Tensor:
    """Return one advantage a response, `[N]` at each of its tokens."""
    return advantages_B[segment_ids(cu)]


def drawn_to_teacher(advantages_N: Tensor, log_ratio_N: Tensor, *, coef: float) -> Tensor:
    """Return `A - coef (log policy - log teacher)` at each token: on-policy distillation.

    `log_ratio_N` of the sampled tokens. The expected gradient at a token is of the reverse KL divergence in the state
    before it, in which sampling is not differentiated (arXiv 2306.13649, section 3.1): the single-step part of arXiv
    2306.08543, section 2.2, without the sum over later tokens.
    """
    return advantages_N - coef * log_ratio_N


def whiten(x_N: Tensor, *, scale: float | None = None) -> Tensor:
    """Return `(x - mean) / sqrt(var + 1e-8 scale^2)` with the unbiased variance over all tokens given; one token alone
    becomes 0.

    `scale` is that of `x_N` if not given. Give that of the scores if `x_N` contains more than scores: where all scores
    are equal, KL divergences of nearly 0 must not become advantages of 1.
    """
    if x_N.numel() < 2:
        return torch.zeros_like(x_N)
    variance, mean = torch.var_mean(x_N.double(), correction=1)
    eps = WHITEN_EPS * (scale_of(x_N) if scale is None else scale) ** 2
    return ((x_N.double() - mean) / torch.sqrt(variance + eps)).to(x_N.dtype)
