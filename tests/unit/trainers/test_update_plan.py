"""The samples of each optimizer step of an iteration, if groups must stay together."""

import numpy as np
import pytest

from rlhf_cli.config.roles import CriticConfig
from rlhf_cli.config.train import BatchConfig
from rlhf_cli.trainers.online.update_plan import count_steps, plan_updates

GROUPS = np.repeat([3, 0, 7, 5], [4, 4, 3, 1])


def plan(groups_B: np.ndarray, size: int, *, epochs: int = 1, iteration: int = 1) -> list[np.ndarray]:
    batch = BatchConfig(train_batch_size=size, max_epochs=epochs)
    return plan_updates(len(groups_B), batch, CriticConfig(), iteration=iteration, groups_B=groups_B).actor


@pytest.mark.parametrize("size", [1, 3, 4, 5, 12, 100])
def test_every_pass_sees_each_sample_once_in_equal_steps_of_at_most_that_size(size):
    steps = plan(GROUPS, size, epochs=2)
    assert len(steps) == 2 * -(-12 // size)
    for epoch in (steps[: len(steps) // 2], steps[len(steps) // 2 :]):
        assert sorted(np.concatenate(epoch).tolist()) == list(range(12))
        sizes = [step.size for step in epoch]
        assert max(sizes) <= min(sizes) + 1
        assert max(sizes) <= size


@pytest.mark.parametrize("is_grouped", [False, True])
@pytest.mark.parametrize(
    ("left", "sampled", "sizes"),
    [
        (16, 16, [8, 8]),
        (9, 16, [5, 4]),  # never 8 and 1
        (4, 16, [2, 2]),  # the number of steps in the schedule
        (1, 16, [1]),
        (20, 20, [7, 7, 6]),
        (8, 8, [8]),
    ],
)
def test_responses_that_are_left_are_spread_over_the_planned_steps(left, sampled, sizes, is_grouped):
    batch = BatchConfig(train_batch_size=8, max_epochs=2)
    groups_B = np.arange(left) // 4 if is_grouped else None
    found = plan_updates(left, batch, CriticConfig(), iteration=3, groups_B=groups_B, num_sampled=sampled)
    assert [step.size for step in found.actor] == 2 * sizes
    if left > 1:
        assert len(found.actor) == count_steps(sampled, batch, CriticConfig(), iterations=1).actor


def test_groups_stay_together_and_their_order_changes():
    groups_B = np.repeat(np.arange(50), 4)
    steps = plan(groups_B, 8, epochs=2)
    assert all(np.unique(groups_B[step]).size == 2 for step in steps)
    orders = [np.concatenate(steps[:25]).tolist(), np.concatenate(steps[25:]).tolist()]
    orders.append(np.concatenate(plan(groups_B, 8, iteration=2)).tolist())
    assert len({tuple(order) for order in [*orders, list(range(200))]}) == 4
    assert np.array_equal(steps[0], plan(groups_B, 8)[0])
