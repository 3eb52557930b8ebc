"""Losses for single responses labeled desirable or undesirable: KTO and unpaired APO-zero.

A loss returns one value per response; the optimizer step loss is the sum over all responses in the step divided by the
number of responses. The baseline `z0` couples them: it is measured over the full step first, so micro-batching changes
nothing.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from rlhf_cli.algorithms.aggregation import Metrics
from rlhf_cli.algorithms.reward_model import pair_accuracy

# arXiv 2402.01306 recommends `(n_D w_D) / (n_U w_U)` within these bounds.
_MIN_BALANCE, _MAX_BALANCE = 1.0, 4.0 / 3.0


@dataclass(frozen=True, slots=True)
class UnpairedSettings:
    """`beta` scales log-ratios to rewards; the weights scale the losses for desirable and undesirable responses."""

    beta: float = 0.1
    desirable_weight: float = 1.0
    undesirable_weight: float = 1.0


# (log_ratios_B, desirable_B, z0, settings) -> loss_B
_UnpairedFunction = Callable[[Tensor, Tensor, Tensor | float, UnpairedSettings], Tensor]


@dataclass(frozen=True, slots=True)
class _UnpairedLoss:
    """A loss for single responses. `needs_baseline`: whether z0 is measured on mismatched prompt-response pairs."""

    name: str
    function: _UnpairedFunction
    needs_baseline: bool


def kto_loss(log_ratios_B: Tensor, desirable_B: Tensor, z0: Tensor | float, settings: UnpairedSettings) -> Tensor:
    """Compute `w_D (1 - s(beta (h - z0)))` for desirable, `w_U (1 - s(beta (z0 - h)))` for undesirable responses.

    `h = logprobs - ref`; arXiv 2402.01306, up to a constant. `log_ratios_B` is h summed over response tokens, with
    gradient; `desirable_B` is bool; `z0` is the baseline for the full step, without gradient.
    """
    baseline = z0.detach() if isinstance(z0, Tensor) else z0
    reward_B = settings.beta * (log_ratios_B - baseline)
    # 1 - s(x) as s(-x): no cancellation for large x.
    good_B = settings.desirable_weight * torch.sigmoid(-reward_B)
    bad_B = settings.undesirable_weight * torch.sigmoid(reward_B)
    return torch.where(desirable_B, good_B, bad_B)


def apo_zero_unpaired_loss(
    log_ratios_B: Tensor, desirable_B: Tensor, z0: Tensor | float, settings: UnpairedSettings
) -> Tensor:
    """Compute `w_D (1 - s(beta h))` for desirable, `w_U s(beta h)` for undesirable responses: APO-zero, split in two.

    arXiv 2408.06266, eq. 7, under TRL's name. Equal to KTO with baseline 0; `z0` is ignored.
    """
    return kto_loss(log_ratios_B, desirable_B, 0.0, settings)


UNPAIRED_LOSSES = {
    row.name: row
    for row in (
        _UnpairedLoss("kto", kto_loss, needs_baseline=True),
        _UnpairedLoss("apo_zero_unpaired", apo_zero_unpaired_loss, needs_baseline=False),
    )
}


def kl_baseline(mean_log_ratio: Tensor) -> Tensor:
    """Compute z0: the sum of all partial means, at least 0.

    Clamp only the complete sum. Clamping each micro-batch or rank first gives a baseline that is too high and depends
    on micro-batching.
    """
    return mean_log_ratio.detach().clamp(min=0.0)


_SHARE = "desirable"
"""Metric name: fraction of desirable responses."""


def kto_metrics(
    log_ratios_B: Tensor, desirable_B: Tensor, z0: Tensor | float, *, beta: float, num_responses: int
) -> Metrics:
    """Compute partial means over `num_responses` for `finish_kto_metrics`.

    These are the reward `beta h` for each kind, the fraction of desirable responses, and the accuracy: the fraction on
    the correct side of the baseline (desirable above, undesirable below). A tie counts one half.
    """
    reward_B = beta * log_ratios_B.detach()
    above_B = pair_accuracy(log_ratios_B, torch.zeros_like(log_ratios_B) + z0)
    parts = {
        "chosen_reward": torch.where(desirable_B, reward_B, 0.0),
        "rejected_reward": torch.where(desirable_B, 0.0, reward_B),
        _SHARE: desirable_B.float(),
        "accuracy": torch.where(desirable_B, above_B, 1.0 - above_B),
    }
    return {name: part_B.sum() / num_responses for name, part_B in parts.items()}


def finish_kto_metrics(metrics: dict[str, float]) -> dict[str, float]:
    """Convert reward sums to means per kind, and add the margin between both.

    If one kind is absent, its mean is 0 and `reward_margin` is meaningless.
    """
    # Divide after the reduction: a micro-batch or rank may contain only one kind.
    share = metrics[_SHARE]
    chosen = metrics["chosen_reward"] / share if share > 0 else 0.0
    rejected = metrics["rejected_reward"] / (1.0 - share) if share < 1 else 0.0
    rest = {name: value for name, value in metrics.items() if name != _SHARE}
    return rest | {"chosen_reward": chosen, "rejected_reward": rejected, "reward_margin": chosen - rejected}


def balanced_weights(num_desirable: int, num_undesirable: int) -> tuple[float, float]:
    """Return the range of `desirable_weight / undesirable_weight` that arXiv 2402.01306 recommends for a dataset.

    It bounds `(n_D w_D) / (n_U w_U)` by 1 and 4/3. Raises ValueError if one kind is absent.
    """
    if num_desirable < 1 or num_undesirable < 1:
        raise ValueError(
            "kto needs both desirable and undesirable responses, and the data contains "
            f"{num_desirable} desirable and {num_undesirable} undesirable responses"
        )
    ratio = num_undesirable / num_desirable
    return _MIN_BALANCE * ratio, _MAX_BALANCE * ratio
