"""Losses and metrics for reward models trained on pairs of a chosen and a rejected response.

A loss returns one value per pair; the optimizer step loss is the sum over all pairs in the step divided by the number
of pairs. For accuracy intervals, see `wilson_interval` in answer_statistics.py.
"""

from collections.abc import Callable

from torch import Tensor
from torch.nn.functional import logsigmoid

from rlhf_cli.algorithms.aggregation import Metrics
from rlhf_cli.config.preference import RewardLossName

# (chosen_B, rejected_B, margin_B or None) -> loss_B
_RewardLoss = Callable[[Tensor, Tensor, Tensor | None], Tensor]


def sigmoid_reward_loss(chosen_B: Tensor, rejected_B: Tensor, margin_B: Tensor | None) -> Tensor:
    """Compute the Bradley-Terry loss `-log s(chosen - rejected - margin)` per pair.

    arXiv 2203.02155, eq. 1; the margin, by which the chosen response is better, is from 2307.09288, eq. 2.
    """
    difference_B = chosen_B - rejected_B
    return -logsigmoid(difference_B if margin_B is None else difference_B - margin_B)


def logexp_reward_loss(chosen_B: Tensor, rejected_B: Tensor, margin_B: Tensor | None) -> Tensor:
    """Compute `log(1 + exp(rejected - chosen))` per pair, arXiv 2204.05862.

    The same function as `sigmoid` without a margin, under OpenRLHF's name. OpenRLHF silently ignores a margin here;
    this function raises ValueError.
    """
    if margin_B is not None:
        raise ValueError("the reward loss logexp does not support a margin; use sigmoid, the same loss with a margin")
    return -logsigmoid(chosen_B - rejected_B)


REWARD_LOSSES: dict[RewardLossName, _RewardLoss] = {"sigmoid": sigmoid_reward_loss, "logexp": logexp_reward_loss}


def pairwise_reward_loss(
    chosen_B: Tensor,
    rejected_B: Tensor,
    *,
    kind: str,
    margin_B: Tensor | None = None,
    center_rewards_coefficient: float = 0.0,
) -> Tensor:
    """Compute a loss from `REWARD_LOSSES` per pair, plus `center_rewards_coefficient * (chosen + rejected)^2`.

    The second term keeps the mean reward near zero, which the first leaves undetermined (arXiv 2312.09244, eq. 2).
    """
    if kind not in REWARD_LOSSES:
        raise ValueError(f"the reward loss must be one of {', '.join(REWARD_LOSSES)}, not {kind!r}")
    loss_B = REWARD_LOSSES[kind](chosen_B, rejected_B, margin_B)
    # Pairwise losses only see differences, so the mean reward can drift during training.
    if center_rewards_coefficient:
        loss_B = loss_B + center_rewards_coefficient * (chosen_B + rejected_B).square()
    return loss_B


def pair_mean(values_B: Tensor, num_pairs: int) -> Tensor:
    """Partial mean over the `num_pairs` pairs in the full step. With B = 0 it is zero, with a graph."""
    return values_B.sum() / max(num_pairs, 1)


def pair_accuracy(chosen_B: Tensor, rejected_B: Tensor) -> Tensor:
    """Return 1 if the chosen reward is higher, 0 if it is lower, 0.5 for a tie.

    With ties at chance level, a constant reward scores 0.5, and so does a policy that equals its reference.
    """
    return 0.5 + 0.5 * (chosen_B - rejected_B).detach().sign().float()


def reward_metrics(chosen_B: Tensor, rejected_B: Tensor, *, num_pairs: int) -> Metrics:
    """Compute partial step means of both rewards, the margin and the accuracy."""
    chosen_B, rejected_B = chosen_B.detach(), rejected_B.detach()
    return {
        "chosen_reward": pair_mean(chosen_B, num_pairs),
        "rejected_reward": pair_mean(rejected_B, num_pairs),
        "reward_margin": pair_mean(chosen_B - rejected_B, num_pairs),
        "accuracy": pair_mean(pair_accuracy(chosen_B, rejected_B), num_pairs),
    }
