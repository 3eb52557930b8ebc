"""From one score per response to one reward per token.

The order is fixed: the score of a reward model is normalised, the score is clipped, then shaped by the response's
length, the KL penalty is spread over the tokens, the score is added at the last token. Clipping after a baseline or
after a penalty would clip another quantity than the user's limits are for.
"""

import torch
from torch import Tensor

from rlhf_cli.algorithms.ragged import last_index
from rlhf_cli.config.scoring import OnlineRewardConfig


def normalised_scores(scores_B: Tensor, *, mean: float, std: float) -> Tensor:
    """Return the scores of a reward model less their mean, in units of their spread, both of the data it was evaluated
    on.
    """
    return (scores_B - mean) / std


def clip_scores(scores_B: Tensor, clip_range: tuple[float, float] | None) -> Tensor:
    """Return the raw scores limited to `clip_range`, as they are without one."""
    return scores_B if clip_range is None else scores_B.clamp(*clip_range)


def overlong_penalty(lengths_B: Tensor, *, max_length: int, buffer_len: int, factor: float) -> Tensor:
    """Return 0 up to `max_length - buffer_len` tokens, then falling in a line to `-factor` (DAPO, arXiv 2503.14476, eq.
    13).

    float32 `[B]`; added to the score.
    """
    excess_B = (lengths_B.float() - (max_length - buffer_len)).clamp(0, buffer_len)
    return -factor * excess_B / buffer_len


def stop_properly(scores_B: Tensor, truncated_B: Tensor, *, coef: float) -> Tensor:
    """Multiply the scores of responses that were cut by `coef`, or replace them by `coef` if it is negative."""
    cut_B = scores_B * coef if coef >= 0 else torch.full_like(scores_B, coef)
    return torch.where(truncated_B, cut_B, scores_B)


def token_rewards(scores_B: Tensor, kl_N: Tensor | None, cu: Tensor, *, kl_coef: float) -> Tensor:
    """Return `-kl_coef * kl` at every token and the score on top at the last token of each response, float64 `[N]`.

    `kl_N` None means no reference model. A response without a trained token has nowhere to put its score.
    """
    rewards_N = torch.zeros(int(cu[-1]), dtype=torch.float64) if kl_N is None else -kl_coef * kl_N.double()
    occupied, ends = last_index(cu)
    rewards_N[ends] += scores_B[occupied].double()
    return rewards_N


def shaped_scores(
    scores_B: Tensor, lengths_B: Tensor, truncated_B: Tensor, *, reward: OnlineRewardConfig, max_new_tokens: int
) -> Tensor:
    """Return the clipped scores with what their responses' length does to them; `truncated_B` bool, which were cut."""
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
