"""Losses on single responses labelled desirable or undesirable: KTO and the unpaired form of APO-zero.

A loss is one value a response; the loss of an optimizer step is its sum over all responses of the step divided by
their number. What couples the responses of a step, the baseline `z0`, is an argument: it is measured over the whole
step beforehand, so that cutting the step into micro-batches changes nothing.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from rlhf_cli.algorithms.aggregation import Metrics
from rlhf_cli.algorithms.reward_model import pair_accuracy

# arXiv 2402.01306 recommends `(n_D w_D) / (n_U w_U)` within these bounds.
MIN_BALANCE, MAX_BALANCE = 1.0, 4.0 / 3.0


@dataclass(frozen=True, slots=True)
class UnpairedSettings:
    """`beta` scales log-ratios to rewards; the weights multiply the losses of the two kinds of responses."""

    beta: float = 0.1
    desirable_weight: float = 1.0
    undesirable_weight: float = 1.0


# (log_ratios_B, desirable_B, z0, settings) -> loss_B
UnpairedFunction = Callable[[Tensor, Tensor, Tensor | float, UnpairedSettings], Tensor]


@dataclass(frozen=True, slots=True)
class UnpairedLoss:
    """One loss on single responses. `needs_baseline`: whether z0 has to be measured on mismatched responses."""

    name: str
    function: UnpairedFunction
    needs_baseline: bool


def kto_loss(log_ratios_B: Tensor, desirable_B: Tensor, z0: Tensor | float, settings: UnpairedSettings) -> Tensor:
    """Return `w_D (1 - s(beta (h - z0)))` for desirable responses, `w_U (1 - s(beta (z0 - h)))` for undesirable ones.

    `h = logprobs - ref`; arXiv 2402.01306, up to a constant. `log_ratios_B` is h, summed over a response's tokens, with
    gradient; `desirable_B` bool; `z0` the baseline of the whole step, through which no gradient flows.
    """
    baseline = z0.detach() if isinstance(z0, Tensor) else z0
    reward_B = settings.beta * (log_ratios_B - baseline)
    # 1 - s(x) is s(-x), which keeps its digits where x is large.
    good_B = settings.desirable_weight * torch.sigmoid(-reward_B)
    bad_B = settings.undesirable_weight * torch.sigmoid(reward_B)
    return torch.where(desirable_B, good_B, bad_B)


def apo_zero_unpaired_loss(
    log_ratios_B: Tensor, desirable_B: Tensor, z0: Tensor | float, settings: UnpairedSettings
) -> Tensor:
    """Return `w_D (1 - s(beta h))` for desirable responses, `w_U s(beta h)` for undesirable ones: APO-zero in halves.

    arXiv 2408.06266, eq. 7; TRL's name for it. It is KTO with a baseline of 0, whatever `z0` is.
    """
    return kto_loss(log_ratios_B, desirable_B, 0.0, settings)


UNPAIRED_LOSSES = {
    row.name: row
    for row in (
        UnpairedLoss("kto", kto_loss, needs_baseline=True),
        UnpairedLoss("apo_zero_unpaired", apo_zero_unpaired_loss, needs_baseline=False),
    )
}


def kl_baseline(mean_log_ratio: Tensor) -> Tensor:
    """z0: the sum of all parts, not below 0.

    The limit holds the mean of the step, not its parts: limiting each micro-batch or rank on its own gives a baseline
    that is too high and depends on how the step was cut.
    """
    return mean_log_ratio.detach().clamp(min=0.0)


SHARE = "desirable"
"""Metric: the share of desirable responses."""


def kto_metrics(
    log_ratios_B: Tensor, desirable_B: Tensor, z0: Tensor | float, *, beta: float, num_responses: int
) -> Metrics:
    """Return the parts of means over all responses, `num_responses`, for `finish_kto_metrics`: rewards `beta h` of both
    kinds, the share of desirable ones, and the accuracy.

    `accuracy` is the share of all responses on their side of the baseline: desirable ones above it, undesirable ones
    below, a tie half.
    """
    reward_B = beta * log_ratios_B.detach()
    above_B = pair_accuracy(log_ratios_B, torch.zeros_like(log_ratios_B) + z0)
    parts = {
        "chosen_reward": torch.where(desirable_B, reward_B, 0.0),
        "rejected_reward": torch.where(desirable_B, 0.0, reward_B),
        SHARE: desirable_B.float(),
        "accuracy": torch.where(desirable_B, above_B, 1.0 - above_B),
    }
    return {name: part_B.sum() / num_responses for name, part_B in parts.items()}


def finish_kto_metrics(metrics: dict[str, float]) -> dict[str, float]:
    """Return the metrics with the mean reward of each kind over that kind, and their difference.

    With no response of one kind its mean is 0 and `reward_margin` has no meaning.
    """
    share = metrics[SHARE]
    chosen = metrics["chosen_reward"] / share if share > 0 else 0.0
    rejected = metrics["rejected_reward"] / (1.0 - share) if share < 1 else 0.0
    rest = {name: value for name, value in metrics.items() if name != SHARE}
    return rest | {"chosen_reward": chosen, "rejected_reward": rejected, "reward_margin": chosen - rejected}


def balanced_weights(num_desirable: int, num_undesirable: int) -> tuple[float, float]:
    """Return the least and greatest `desirable_weight / undesirable_weight` that arXiv 2402.01306 recommends for a
    dataset.

    The bounds of `(n_D w_D) / (n_U w_U)` are 1 and 4/3. ValueError if one kind is missing.
    """
    if num_desirable < 1 or num_undesirable < 1:
        raise ValueError(
            "kto needs desirable and undesirable responses: there are "
            f"{num_desirable} desirable and {num_undesirable} undesirable ones"
        )
    ratio = num_undesirable / num_desirable
    return MIN_BALANCE * ratio, MAX_BALANCE * ratio
