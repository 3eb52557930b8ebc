"""Optimizers and the learning rate schedule, compared with manual calculations."""

import math

import pytest
import torch
from tiny_training import LEARNING_RATE, OPTIM, make_engine
from torch import nn
from transformers import get_scheduler

from rlhf_cli.backends.training import optimizers
from rlhf_cli.backends.training.optimizers import make_schedule, set_rates
from rlhf_cli.config.train import DeepSpeedConfig, OptimConfig

SCHEDULES: dict[str, list[float]] = {
    # Ten steps, two of them warm-up. Step k of the remaining eight has decayed by (k - 1) / 8.
    "cosine_with_min_lr": [0.5, 1.0] + [0.1 + 0.9 * (1 + math.cos(math.pi * k / 8)) / 2 for k in range(8)],
    "cosine": [0.5, 1.0] + [(1 + math.cos(math.pi * k / 8)) / 2 for k in range(8)],
    "linear": [0.5, 1.0, 1.0, 7 / 8, 6 / 8, 5 / 8, 4 / 8, 3 / 8, 2 / 8, 1 / 8],
    "constant": [1.0] * 10,
    "constant_with_warmup": [0.5] + [1.0] * 9,
    # 1 / sqrt of the step number in units of the warm-up.
    "inverse_sqrt": [0.5, 1.0] + [math.sqrt(2 / k) for k in range(2, 10)],
    # Decays to 1e-7 with power 1; the peak is 1e-3.
    "polynomial": [0.5, 1.0] + [(1 - 1e-4) * (1 - k / 8) + 1e-4 for k in range(8)],
}


def rates_of(optim: OptimConfig, *, total_steps: int = 10) -> list[float]:
    """Return the learning rate of each step as a fraction of the peak."""
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=LEARNING_RATE)
    schedule = make_schedule(optimizer, optim, total_steps=total_steps)
    rates = []
    for _ in range(total_steps):
        rates.append(schedule.get_last_lr()[0] / LEARNING_RATE)
        optimizer.step()
        schedule.step()
    return rates


@pytest.mark.parametrize("warm_up", [{"lr_warmup_ratio": 0.2}, {"warmup_steps": 2}], ids=str)
@pytest.mark.parametrize("name", SCHEDULES)
def test_the_learning_rate_of_every_step_by_hand(name, warm_up):
    optim = OptimConfig(lr_scheduler=name, min_lr_ratio=0.1, **warm_up)
    assert rates_of(optim) == pytest.approx(SCHEDULES[name], abs=1e-9)


def test_no_steps_of_warm_up_begin_at_the_peak_and_many_never_reach_it():
    assert rates_of(OptimConfig(lr_scheduler="linear", warmup_steps=0)) == pytest.approx(
        [1 - k / 10 for k in range(10)]
    )
    rates = rates_of(OptimConfig(lr_scheduler="linear", warmup_steps=20))
    assert rates == pytest.approx([step / 20 for step in range(1, 11)])


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_run_of_one_step_has_the_peak(name):
    assert rates_of(OptimConfig(lr_scheduler=name), total_steps=1) == pytest.approx([1.0])


@pytest.mark.parametrize("name", ["linear", "cosine"])
def test_without_warm_up_the_rates_are_those_of_transformers(name):
    parameter = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
    schedule = get_scheduler(name, parameter, num_warmup_steps=0, num_training_steps=10)
    expected = [schedule.lr_lambdas[0](position) for position in range(10)]
    assert rates_of(OptimConfig(lr_scheduler=name, warmup_steps=0)) == pytest.approx(expected)


def test_rates_of_a_checkpoint_give_way_to_those_of_the_schedule():
    optim = OptimConfig(lr_scheduler="linear", warmup_steps=0)
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=LEARNING_RATE)
    schedule = make_schedule(optimizer, optim, total_steps=10)
    schedule.load_state_dict(schedule.state_dict() | {"last_epoch": 4})
    optimizer.param_groups[0]["lr"] = LEARNING_RATE * 0.5  # the learning rate of older releases in step 5
    set_rates(optimizer, schedule)
    assert optimizer.param_groups[0]["lr"] == pytest.approx(LEARNING_RATE * 0.6)


class Weight(nn.Module):
    """One weight whose gradient is the input."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.weight * x


@pytest.mark.usefixtures("group_of_one")
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_epsilon_is_added_to_the_root_of_the_second_moment(stage):
    """The first step is g / (|g| + eps) times the learning rate: 3/4 of it for g = 0.03 and eps = 0.01."""
    model = Weight()
    engine = make_engine(model, stage, optim=OPTIM.model_copy(update={"adam_eps": 0.01, "l2": 0.0}))
    engine.train_step([torch.tensor([0.03])], lambda model, x: (model(x).sum(), {}))
    (weight,) = [weight.item() for _, weight in engine.named_weights(model)]
    assert weight == pytest.approx(1 - LEARNING_RATE * 3 / 4, rel=1e-6)


@pytest.mark.parametrize("name", ["adamw", "adamw_bf16", "muon"])
def test_freed_memory_is_kept_from_the_first_step_on(name, monkeypatch, group_of_one):
    module, kept = nn.Linear(2, 2), []
    monkeypatch.setattr(optimizers, "keep_freed_memory", lambda: kept.append("kept"))
    optim = OptimConfig(optim=name)
    optimizer = optimizers.make_optimizer(module, DeepSpeedConfig(), learning_rate=LEARNING_RATE, optim=optim)
    assert kept == []
    module(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    assert kept == ["kept"]
