"""Reward shaping: one score per response becomes one reward per token.

The order is fixed:
1. Normalize reward-model scores.
2. Clip scores.
3. Apply length penalties.
4. Spread the KL penalty over tokens and add the score at the last token.

Users set clip limits for raw scores, so clipping must precede baselines and penalties.
"""

import torch
from torch import Tensor

from rlhf_cli.algorithms.ragged import last_index
from rlhf_cli.config.scoring import RewardConfig


def normalised_scores(scores_B: Tensor, *, mean: float, std: float) -> Tensor:
    """Standardize reward-model scores with the mean and std from the evaluation data."""
    return (scores_B - mean) / std


def clip_scores(scores_B: Tensor, clip_range: tuple[float, float] | None) -> Tensor:
    """Clamp raw scores to `clip_range`, if set."""
    return scores_B if clip_range is None else scores_B.clamp(*clip_range)


def overlong_penalty(lengths_B: Tensor, *, max_length: int, buffer_len: int, factor: float) -> Tensor:
    """Compute the soft overlong penalty from DAPO (arXiv 2503.14476, eq. 13), to be added to the score.

    It is 0 up to `max_length - buffer_len` tokens, then falls linearly to `-factor`; float32 `[B]`.
    """
    excess_B = (lengths_B.float() - (max_length - buffer_len)).clamp(0, buffer_len)
    return -factor * excess_B / buffer_len


def stop_properly(scores_B: Tensor, truncated_B: Tensor, *, coef: float) -> Tensor:
    """Multiply scores of truncated responses by `coef`, or replace them with `coef` if it is negative."""
    penalized_B = scores_B * coef if coef >= 0 else torch.full_like(scores_B, coef)
    return torch.where(truncated_B, penalized_B, scores_B)


def token_rewards(scores_B: Tensor, kl_N: Tensor | None, cu: Tensor, *, kl_coef: float) -> Tensor:
    """Compute `-kl_coef * kl` at every token, plus the score at the last token of each response, float64 `[N]`.

    `kl_N` is None without a reference model. The score of a response without trained tokens is dropped.
    """
    # float64: returns add up thousands of small KL terms.
    rewards_N = torch.zeros(int(cu[-1]), dtype=torch.float64) if kl_N is None else -kl_coef * kl_N.double()
    occupied, ends = last_index(cu)
    # Indexed += ignores repeated indices; `ends` has one entry per response.
    rewards_N[ends] += scores_B[occupied].double()
    return rewards_N


def shaped_scores(
    scores_B: Tensor, lengths_B: Tensor, truncated_B: Tensor, *, reward: RewardConfig, max_new_tokens: int
) -> Tensor:
    """Clip scores and apply the length penalties; `truncated_B` bool marks truncated responses."""
    shaped_B = clip_scores(scores_B, reward.reward_clip_range)
    if reward.stop_properly_penalty_coef is not None:
        shaped_B = stop_properly(shaped_B, truncated_B, coef=reward.stop_properly_penalty_coef)
    if reward.overlong_buffer_len is not None:
        shaped_B = shaped_B + overlong_penalty(
            lengths_B,
            max_length=max_new_tokens,
            buffer_len=reward.overlong_buffer_len,
            factor=reward.overlong_penalty_factor,
        )
    return shaped_B
