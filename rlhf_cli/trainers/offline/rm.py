"""Reward models: pairwise objective with a score at each response's last token."""

import math
from dataclasses import dataclass

import torch
from torch import nn

from rlhf_cli.algorithms.aggregation import Metrics, StepTotals, sequence_mean
from rlhf_cli.algorithms.reward_model import pairwise_reward_loss, reward_metrics
from rlhf_cli.data.packing.packs import MicroBatch

MARGIN = "margin"
"""Pair column: how much better the chosen response is."""
SQUARE = "reward_square"


@dataclass(frozen=True)
class RewardObjective:
    """Pairwise reward loss; with `margin_loss`, each pair has a margin."""

    loss: str
    margin_loss: bool
    center_rewards_coefficient: float

    def __call__(self, model: nn.Module, batch: MicroBatch, totals: StepTotals) -> tuple[torch.Tensor, Metrics]:
        """Return this micro-batch's contribution to the mean loss over the step's pairs."""
        rewards_B = model(batch.pack)
        chosen_P, rejected_P = rewards_B[0::2], rewards_B[1::2]
        loss_P = pairwise_reward_loss(
            chosen_P,
            rejected_P,
            kind=self.loss,
            margin_B=batch.columns[MARGIN] if self.margin_loss else None,
            center_rewards_coefficient=self.center_rewards_coefficient,
        )
        loss = sequence_mean(loss_P, totals)
        # Metrics are averaged over micro-batches, and means and mean squares can be averaged, unlike standard
        # deviations.
        both_P = torch.stack([chosen_P, rejected_P]).detach().mean(0)
        squares_P = torch.stack([chosen_P, rejected_P]).detach().square().mean(0)
        moments = {"reward": sequence_mean(both_P, totals), SQUARE: sequence_mean(squares_P, totals)}
        return loss, {
            "loss": loss.detach(),
            **reward_metrics(chosen_P, rejected_P, num_pairs=totals.num_sequences),
            **moments,
        }


def finish_reward_metrics(metrics: dict[str, float]) -> dict[str, float]:
    """Replace the mean square of rewards by their standard deviation."""
    rest = {name: value for name, value in metrics.items() if name != SQUARE}
    # Rounding may make the difference slightly negative if all rewards are equal.
    return rest | {"reward_std": math.sqrt(max(0.0, metrics[SQUARE] - metrics["reward"] ** 2))}
