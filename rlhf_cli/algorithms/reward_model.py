"""Losses and metrics of a reward model trained on pairs of a chosen and a rejected response.

A loss is one value a pair; the loss of an optimizer step is its sum over all pairs of the step divided by their
number. Left out on purpose: the interval of an accuracy (`wilson_interval` in answer_statistics.py).
"""

from collections.abc import Callable

from torch import Tensor
from torch.nn.functional import logsigmoid

from rlhf_cli.algorithms.aggregation import Metrics
from rlhf_cli.config.preference import RewardLossName

# (chosen_B, rejected_B, margin_B or None) -> loss_B
RewardLoss = Callable[[Tensor, Tensor, Tensor | None], Tensor]


def sigmoid_reward_loss(chosen_B: Tensor, rejected_B: Tensor, margin_B: Tensor | None) -> Tensor:
    """Return `-log s(chosen - rejected - margin)` per pair: Bradley-Terry.

    arXiv 2203.02155, eq. 1; the margin, by how much the chosen response is better, 2307.09288, eq. 2.
    """
    difference_B = chosen_B - rejected_B
    return -logsigmoid(difference_B if margin_B is None else difference_B - margin_B)


def logexp_reward_loss(chosen_B: Tensor, rejected_B: Tensor, margin_B: Tensor | None) -> Tensor:
    """Return `log(1 + exp(rejected - chosen))` per pair, arXiv 2204.05862.

    It is the same function as `sigmoid` without a margin, under the name OpenRLHF gives it; OpenRLHF drops a margin
    here without a word. ValueError if there is one.
    """
    if margin_B is not None:
        raise ValueError("the reward loss logexp takes no margin; sigmoid is the same loss with one")
    return -logsigmoid(chosen_B - rejected_B)


REWARD_LOSSES: dict[RewardLossName, RewardLoss] = {"sigmoid": sigmoid_reward_loss, "logexp": logexp_reward_loss}


def pairwise_reward_loss(
    chosen_B: Tensor,
    rejected_B: Tensor,
    *,
    kind: str,
    margin_B: Tensor | None = None,
    center_rewards_coefficient: float = 0.0,
) -> Tensor:
    """Return the loss per pair: a row of `REWARD_LOSSES`, plus `center_rewards_coefficient * (chosen + rejected)^2`.

    The second term holds the mean of the rewards at zero, which the first leaves open (arXiv 2312.09244, eq. 2).
    """
    if kind not in REWARD_LOSSES:
        raise ValueError(f"the reward loss must be one of {', '.join(REWARD_LOSSES)}, not {kind!r}")
    loss_B = REWARD_LOSSES[kind](chosen_B, rejected_B, margin_B)
    if center_rewards_coefficient:
        loss_B = loss_B + center_rewards_coefficient * (chosen_B + rejected_B).square()
    return loss_B


def pair_mean(values_B: Tensor, num_pairs: int) -> Tensor:
    """Part of the mean over the `num_pairs` pairs of the whole step. Zero, still with a graph, where B is 0."""
    return values_B.sum() / max(num_pairs, 1)


def pair_accuracy(chosen_B: Tensor, rejected_B: Tensor) -> Tensor:
    """Return 1 if the chosen reward is the higher one, 0 if it is the lower one, 0.5 if they are equal.

    A tie is worth what tossing a coin is worth: a constant reward scores 0.5, as does a policy that is its reference.
    """
    return 0.5 + 0.5 * (chosen_B - rejected_B).detach().sign().float()


def reward_metrics(chosen_B: Tensor, rejected_B: Tensor, *, num_pairs: int) -> Metrics:
    """Return the parts of the means over the step of both rewards, their difference and the accuracy."""
    chosen_B, rejected_B = chosen_B.detach(), rejected_B.detach()
    return {
        "chosen_reward": pair_mean(chosen_B, num_pairs),
        "rejected_reward": pair_mean(rejected_B, num_pairs),
        "reward_margin": pair_mean(chosen_B - rejected_B, num_pairs),
        "accuracy": pair_mean(pair_accuracy(chosen_B, rejected_B), num_pairs),
    }
