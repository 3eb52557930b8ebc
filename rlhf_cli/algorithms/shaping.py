"""From one score per response to one reward per token.

The order is fixed: the score of a reward model is normalised, the score is clipped, the KL penalty is spread over the
tokens, the score is added at the last token. Clipping after a baseline or after the penalty would clip something else
than what the user set limits for.
"""

from torch import Tensor

from rlhf_cli.algorithms.ragged import last_index


def normalised_scores(scores_B: Tensor, *, mean: float, std: float) -> Tensor:
    """Scores of a reward model less their mean, in units of their spread, both of the data it was evaluated on."""
    return (scores_B - mean) / std


def clip_scores(scores_B: Tensor, clip_range: tuple[float, float]) -> Tensor:
    """Raw scores limited to `clip_range`."""
    low, high = clip_range
    return scores_B.clamp(low, high)


def token_rewards(scores_B: Tensor, kl_N: Tensor | None, cu: Tensor, *, kl_coef: float) -> Tensor:
    """`-kl_coef * kl` at every token and the score on top at the last token of each response, float32 `[N]`.

    `kl_N` None means no reference model. A response without a trained token has nowhere to put its score.
    """
    rewards_N = scores_B.new_zeros(int(cu[-1])).float() if kl_N is None else -kl_coef * kl_N.float()
    occupied, ends = last_index(cu)
    rewards_N[ends] += scores_B[occupied].float()
    return rewards_N


def shaped_rewards(
    scores_B: Tensor, kl_N: Tensor | None, cu: Tensor, *, clip_range: tuple[float, float], kl_coef: float
) -> Tensor:
    """Token rewards `[N]` from raw scores, in the fixed order described above."""
    return token_rewards(clip_scores(scores_B, clip_range), kl_N, cu, kl_coef=kl_coef)
