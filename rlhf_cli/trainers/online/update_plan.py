"""Assigns samples to an iteration's optimizer steps, as a pure function of seed and iteration."""

import zlib
from dataclasses import dataclass

import numpy as np

from rlhf_cli.config.roles import CriticConfig
from rlhf_cli.config.train import BatchConfig
from rlhf_cli.data.sampling import epoch_order

Steps = list[np.ndarray]
"""Sample indices per optimizer step."""


@dataclass(frozen=True)
class UpdatePlan:
    """Optimizer steps of an iteration; `actor` is empty while only the critic trains."""

    actor: Steps
    critic: Steps

    @property
    def on_policy(self) -> bool:
        """Whether the actor takes a single step from the policy that sampled."""
        return len(self.actor) <= 1


def plan_updates(
    num_samples: int,
    batch: BatchConfig,
    settings: CriticConfig,
    *,
    iteration: int,
    groups_B: np.ndarray | None = None,
    num_sampled: int | None = None,
) -> UpdatePlan:
    """Plan the steps over `num_samples` samples. Actor and critic use the same order per epoch.

    All `num_sampled` responses, by default `num_samples`, determine the number of steps. If some are excluded, each
    step is
    smaller: one Adam step moves weights about equally far for one response as for a full batch, and the learning-rate
    schedule counts the same number of steps per iteration.

    With `groups_B`, int [num_samples], groups are shuffled instead of samples. A group is in one step, or two if it
    does not fit, so that its prompt is computed once there.
    """
    count = min(-(-(num_sampled or num_samples) // batch.train_batch_size), num_samples)
    if groups_B is not None:
        return UpdatePlan(_steps_of_groups(groups_B, batch, count=count, iteration=iteration), critic=[])
    steps = critic = _steps(num_samples, batch, count=count, iteration=iteration)
    if settings.critic_update_steps is not None:
        critic = _steps(num_samples, batch, count=min(settings.critic_update_steps, num_samples), iteration=iteration)
    return UpdatePlan(actor=[] if iteration <= settings.critic_only_iterations else steps, critic=critic)


def _steps(num_samples: int, batch: BatchConfig, *, count: int, iteration: int) -> Steps:
    orders = _orders(num_samples, batch, iteration=iteration)
    return [step for order in orders for step in np.array_split(order, count)]


def _steps_of_groups(groups_B: np.ndarray, batch: BatchConfig, *, count: int, iteration: int) -> Steps:
    by_group = np.argsort(groups_B, kind="stable")
    members = np.split(by_group, np.flatnonzero(np.diff(groups_B[by_group])) + 1)
    orders = _orders(len(members), batch, iteration=iteration)
    samples = [np.concatenate([members[group] for group in order]) for order in orders]
    return [step for epoch in samples for step in np.array_split(epoch, count)]


def _orders(number: int, batch: BatchConfig, *, iteration: int) -> list[np.ndarray]:
    """Return each epoch's order."""
    seed = _seed(batch, iteration)
    return [epoch_order(number, epoch=epoch, seed=seed) for epoch in range(batch.max_epochs)]


def _seed(batch: BatchConfig, iteration: int) -> int:
    return zlib.crc32(f"{batch.seed}/{iteration}".encode())


@dataclass(frozen=True)
class StepCounts:
    """Number of optimizer steps in a run, for the learning-rate schedules."""

    actor: int
    critic: int


def count_steps(num_samples: int, batch: BatchConfig, settings: CriticConfig, *, iterations: int) -> StepCounts:
    """Return the number of steps for `iterations` iterations with `num_samples` samples each."""
    last = plan_updates(num_samples, batch, settings, iteration=iterations)
    return StepCounts(
        actor=(iterations - settings.critic_only_iterations) * len(last.actor), critic=iterations * len(last.critic)
    )
