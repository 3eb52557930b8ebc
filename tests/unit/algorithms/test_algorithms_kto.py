"""KTO losses on responses labelled desirable or undesirable."""

import math

import pytest
import torch

from rlhf_cli.algorithms.aggregation import Metrics, combine_metrics
from rlhf_cli.algorithms.kto import (
    UNPAIRED_LOSSES,
    UnpairedSettings,
    apo_zero_unpaired_loss,
    balanced_weights,
    finish_kto_metrics,
    kl_baseline,
    kto_loss,
    kto_metrics,
)

LN2, LN3 = math.log(2), math.log(3)


def logistic(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def loss_and_gradient(function, ratio: float, desirable: bool, z0: float, settings) -> tuple[float, float]:
    ratio_B = torch.tensor([ratio], dtype=torch.float64, requires_grad=True)
    loss_B = function(ratio_B, torch.tensor([desirable]), z0, settings)
    loss_B.sum().backward()
    assert ratio_B.grad is not None
    return loss_B.item(), ratio_B.grad.item()


@pytest.mark.parametrize(
    ("ratio", "desirable", "loss", "gradient"),
    [
        # beta 0.5, z0 1: 0.5 (h - 1) = ln 3, s = 3/4 and s' = 3/16. Desirable weight 2, undesirable 3.
        (2 * LN3 + 1, True, 2 * 1 / 4, -2 * 0.5 * 3 / 16),
        (2 * LN3 + 1, False, 3 * 3 / 4, 3 * 0.5 * 3 / 16),
        # At the baseline s = 1/2 and s' = 1/4.
        (1.0, True, 2 * 1 / 2, -2 * 0.5 * 1 / 4),
        (1.0, False, 3 * 1 / 2, 3 * 0.5 * 1 / 4),
        # 0.5 (h - 1) = -ln 2, s = 1/3 and s' = 2/9.
        (1 - 2 * LN2, True, 2 * 2 / 3, -2 * 0.5 * 2 / 9),
        (1 - 2 * LN2, False, 3 * 1 / 3, 3 * 0.5 * 2 / 9),
    ],
)
def test_kto_by_hand(ratio, desirable, loss, gradient) -> None:
    settings = UnpairedSettings(beta=0.5, desirable_weight=2.0, undesirable_weight=3.0)
    assert loss_and_gradient(kto_loss, ratio, desirable, 1.0, settings) == pytest.approx((loss, gradient))


@pytest.mark.parametrize("ratio", [-7.0, -0.3, 0.0, 2.5])
def test_losses_equal_the_formulas_of_the_papers(ratio) -> None:
    settings, z0 = UnpairedSettings(beta=0.3, desirable_weight=1.3, undesirable_weight=0.7), 0.8
    formulas = {
        ("kto", True): lambda h: 1.3 * (1 - logistic(0.3 * (h - z0))),
        ("kto", False): lambda h: 0.7 * (1 - logistic(0.3 * (z0 - h))),
        ("apo_zero_unpaired", True): lambda h: 1.3 * (1 - logistic(0.3 * h)),
        ("apo_zero_unpaired", False): lambda h: 0.7 * logistic(0.3 * h),
    }
    for (name, desirable), formula in formulas.items():
        slope = (formula(ratio + 1e-5) - formula(ratio - 1e-5)) / 2e-5
        found = loss_and_gradient(UNPAIRED_LOSSES[name].function, ratio, desirable, z0, settings)
        assert found == pytest.approx((formula(ratio), slope), rel=1e-7)


def test_only_kto_needs_the_baseline() -> None:
    assert {name: row.needs_baseline for name, row in UNPAIRED_LOSSES.items()} == {
        "kto": True,
        "apo_zero_unpaired": False,
    }
    ratio_B, desirable_B, settings = torch.tensor([0.7, -0.2]), torch.tensor([True, False]), UnpairedSettings()
    near, far = (apo_zero_unpaired_loss(ratio_B, desirable_B, z0, settings) for z0 in (0.0, 50.0))
    assert near.tolist() == far.tolist()


def test_no_gradient_flows_through_the_baseline() -> None:
    ratio_B = torch.tensor([0.4, -0.6], requires_grad=True)
    z0 = (ratio_B * 3.0).sum()
    kto_loss(ratio_B, torch.tensor([True, False]), z0, UnpairedSettings()).sum().backward()
    coupled = ratio_B.grad
    ratio_B.grad = None
    kto_loss(ratio_B, torch.tensor([True, False]), z0.item(), UnpairedSettings()).sum().backward()
    assert torch.equal(coupled, ratio_B.grad)


@pytest.mark.parametrize("name", UNPAIRED_LOSSES)
def test_extreme_log_ratios_give_a_finite_loss_and_gradient(name) -> None:
    ratio_B = torch.tensor([1000.0, -1000.0, 1000.0, -1000.0], requires_grad=True)
    desirable_B = torch.tensor([True, True, False, False])
    loss_B = UNPAIRED_LOSSES[name].function(ratio_B, desirable_B, 0.0, UnpairedSettings(beta=1.0))
    loss_B.sum().backward()
    assert loss_B.tolist() == [0.0, 1.0, 1.0, 0.0]
    assert ratio_B.grad is not None
    assert ratio_B.grad.tolist() == [0.0, 0.0, 0.0, 0.0]


def test_the_baseline_is_limited_after_the_mean_of_the_whole_step() -> None:
    # Clamping each response separately would give 3.5 / 3.
    assert kl_baseline(torch.tensor([3.0, -2.0, 0.5]).mean()).item() == pytest.approx(0.5)


def test_the_baseline_is_never_negative_and_has_no_gradient() -> None:
    below, above = (torch.tensor(mean, requires_grad=True) for mean in (-2.0, 1.0))
    assert (kl_baseline(below).item(), kl_baseline(above).item()) == (0.0, 1.0)
    assert not kl_baseline(above).requires_grad


def test_metrics_by_hand() -> None:
    # beta 0.5, rewards 2, -1 | -2, -3, 0.5; above the baseline of h = 1: yes, no | no, no, tie.
    ratio_B = torch.tensor([4.0, -2.0, -4.0, -6.0, 1.0])
    desirable_B = torch.tensor([True, True, False, False, False])
    metrics = kto_metrics(ratio_B, desirable_B, 1.0, beta=0.5, num_responses=5)
    assert finish_kto_metrics({name: value.item() for name, value in metrics.items()}) == pytest.approx(
        {
            "chosen_reward": 0.5,
            "rejected_reward": -1.5,
            "reward_margin": 2.0,
            "accuracy": (1 + 0 + 1 + 1 + 0.5) / 5,
        }
    )


def test_loss_and_metrics_do_not_depend_on_how_the_step_is_cut() -> None:
    generator = torch.Generator().manual_seed(4)
    ratio_B = torch.randn(12, generator=generator, dtype=torch.float64) * 5
    desirable_B = torch.rand(12, generator=generator) < 0.4
    z0 = kl_baseline(ratio_B.mean())
    settings = UnpairedSettings()
    loss_B = kto_loss(ratio_B, desirable_B, z0, settings)
    whole = kto_metrics(ratio_B, desirable_B, z0, beta=0.1, num_responses=12)
    loss = 0.0
    parts: Metrics = {}
    for piece in (slice(0, 5), slice(5, 5), slice(5, 6), slice(6, 12)):
        loss += kto_loss(ratio_B[piece], desirable_B[piece], z0, settings).sum().item() / 12
        parts = combine_metrics(parts, kto_metrics(ratio_B[piece], desirable_B[piece], z0, beta=0.1, num_responses=12))
    assert loss == pytest.approx(loss_B.mean().item())
    assert {name: value.item() for name, value in parts.items()} == pytest.approx(
        {name: value.item() for name, value in whole.items()}
    )


@pytest.mark.parametrize("label", [True, False])
def test_a_kind_that_is_missing_has_a_mean_of_zero(label) -> None:
    metrics = kto_metrics(torch.tensor([2.0, 4.0]), torch.tensor([label, label]), 0.0, beta=0.5, num_responses=2)
    finished = finish_kto_metrics({name: value.item() for name, value in metrics.items()})
    assert (finished["chosen_reward"], finished["rejected_reward"]) == ((1.5, 0.0) if label else (0.0, 1.5))


def test_recommended_weights_balance_the_two_kinds() -> None:
    # Three undesirable responses per desirable one: w_D / w_U of 3 to 4 gives n_D w_D / (n_U w_U) of 1 to 4/3.
    assert balanced_weights(100, 300) == pytest.approx((3.0, 4.0))
    assert balanced_weights(300, 100) == pytest.approx((1 / 3, 4 / 9))


@pytest.mark.parametrize(("num_desirable", "num_undesirable"), [(0, 5), (5, 0)])
def test_a_dataset_of_one_kind_is_refused(num_desirable, num_undesirable) -> None:
    with pytest.raises(ValueError, match=f"{num_desirable} desirable and {num_undesirable} undesirable"):
        balanced_weights(num_desirable, num_undesirable)
