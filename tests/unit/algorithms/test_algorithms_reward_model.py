"""Pairwise losses and metrics of reward models."""

import math

import pytest
import torch

from rlhf_cli.algorithms.aggregation import Metrics, combine_metrics
from rlhf_cli.algorithms.reward_model import (
    REWARD_LOSSES,
    pair_accuracy,
    pair_mean,
    pairwise_reward_loss,
    reward_metrics,
)


def loss_and_gradient(chosen: float, rejected: float, *, margin: float | None = None, **kwargs) -> tuple[float, ...]:
    rewards = torch.tensor([chosen, rejected], dtype=torch.float64, requires_grad=True)
    margin_B = None if margin is None else torch.tensor([margin], dtype=torch.float64)
    loss_B = pairwise_reward_loss(rewards[:1], rewards[1:], margin_B=margin_B, **kwargs)
    loss_B.sum().backward()
    assert rewards.grad is not None
    return loss_B.item(), *rewards.grad.tolist()


@pytest.mark.parametrize(
    ("margin", "loss", "gradient"),
    [
        # 1.5 - (1.5 - ln 3) = ln 3, s(ln 3) = 3/4: loss ln(4/3), derivative with respect to the difference -1/4.
        (None, math.log(4 / 3), -1 / 4),
        # ln 3 - 2 ln 3 = -ln 3, s = 1/4.
        (2 * math.log(3), math.log(4), -3 / 4),
        # A negative margin: ln 3 + ln 2 = ln 6, s = 6/7.
        (-math.log(2), math.log(7 / 6), -1 / 7),
    ],
)
def test_sigmoid_by_hand(margin, loss, gradient) -> None:
    found = loss_and_gradient(1.5, 1.5 - math.log(3), margin=margin, kind="sigmoid")
    assert found == pytest.approx((loss, gradient, -gradient))


@pytest.mark.parametrize(("chosen", "rejected"), [(0.3, 1.1), (1.1, 0.3), (-4.0, -4.0), (12.0, -9.0)])
def test_logexp_is_its_formula_and_equals_sigmoid(chosen, rejected) -> None:
    naive = math.log(1 + math.exp(rejected - chosen))
    slope = math.exp(rejected - chosen) / (1 + math.exp(rejected - chosen))
    found = loss_and_gradient(chosen, rejected, kind="logexp")
    assert found == pytest.approx((naive, -slope, slope))
    assert found == loss_and_gradient(chosen, rejected, kind="sigmoid")


def test_logexp_refuses_a_margin_instead_of_dropping_it() -> None:
    with pytest.raises(ValueError, match="logexp does not support a margin"):
        loss_and_gradient(1.0, 0.0, margin=1.0, kind="logexp")


def test_centering_pulls_the_sum_of_both_rewards_to_zero() -> None:
    # 0.01 (2 + 1)^2 = 0.09 is added to the loss, and 2 * 0.01 * 3 = 0.06 to both derivatives.
    plain = loss_and_gradient(2.0, 1.0, kind="sigmoid")
    centered = loss_and_gradient(2.0, 1.0, kind="sigmoid", center_rewards_coefficient=0.01)
    assert [c - p for c, p in zip(centered, plain, strict=True)] == pytest.approx([0.09, 0.06, 0.06])


def test_centering_leaves_opposite_rewards_alone() -> None:
    plain = loss_and_gradient(1.5, -1.5, kind="sigmoid")
    assert loss_and_gradient(1.5, -1.5, kind="sigmoid", center_rewards_coefficient=5.0) == pytest.approx(plain)


@pytest.mark.parametrize("kind", REWARD_LOSSES)
def test_rewards_far_apart_give_a_finite_loss_and_gradient(kind) -> None:
    rewards = torch.tensor([[1000.0, -1000.0], [-1000.0, 1000.0]], requires_grad=True)
    loss_B = pairwise_reward_loss(rewards[0], rewards[1], kind=kind)
    loss_B.sum().backward()
    assert loss_B.tolist() == [0.0, 2000.0]
    assert rewards.grad is not None
    assert rewards.grad.tolist() == [[0.0, -1.0], [0.0, 1.0]]


def test_an_unknown_reward_loss_is_named() -> None:
    with pytest.raises(ValueError, match="sigmoid, logexp, not 'hinge'"):
        loss_and_gradient(1.0, 0.0, kind="hinge")


def test_a_tie_is_worth_half() -> None:
    chosen_B, rejected_B = torch.tensor([2.0, 1.0, -1.0]), torch.tensor([1.0, 2.0, -1.0])
    assert pair_accuracy(chosen_B, rejected_B).tolist() == [1.0, 0.0, 0.5]


def test_metrics_by_hand() -> None:
    metrics = reward_metrics(torch.tensor([3.0, 1.0]), torch.tensor([1.0, 2.0]), num_pairs=2)
    assert {name: value.item() for name, value in metrics.items()} == {
        "chosen_reward": 2.0,
        "rejected_reward": 1.5,
        "reward_margin": 0.5,
        "accuracy": 0.5,
    }


def test_metrics_and_loss_do_not_depend_on_how_the_step_is_cut() -> None:
    generator = torch.Generator().manual_seed(3)
    chosen_B, rejected_B = torch.randn(2, 10, generator=generator, dtype=torch.float64)
    whole = reward_metrics(chosen_B, rejected_B, num_pairs=10)
    loss_B = pairwise_reward_loss(chosen_B, rejected_B, kind="sigmoid", center_rewards_coefficient=0.01)
    loss = 0.0
    parts: Metrics = {}
    for piece in (slice(0, 1), slice(1, 1), slice(1, 7), slice(7, 10)):
        chosen, rejected = chosen_B[piece], rejected_B[piece]
        parts = combine_metrics(parts, reward_metrics(chosen, rejected, num_pairs=10))
        part_B = pairwise_reward_loss(chosen, rejected, kind="sigmoid", center_rewards_coefficient=0.01)
        loss += pair_mean(part_B, 10).item()
    assert {name: value.item() for name, value in parts.items()} == pytest.approx(
        {name: value.item() for name, value in whole.items()}
    )
    assert loss == pytest.approx(loss_B.mean().item())


def test_the_mean_of_no_pairs_is_zero_with_a_graph() -> None:
    empty = torch.zeros(0, requires_grad=True)
    part = pair_mean(empty, 0)
    part.backward()
    assert part.item() == 0.0
