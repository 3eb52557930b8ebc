"""Checkpoints are continued with another number of ranks and at another ZeRO stage."""

from typing import Any

import pytest
import torch
from continued_ranks import ROUTES, STAGES, by_one
from started_ranks import results_of, start_ranks
from tiny_training import farthest

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(600), pytest.mark.usefixtures("group_of_one")]


@pytest.fixture(scope="module")
def results(tiny_model_dir, tmp_path_factory, group_of_one) -> dict[int, dict[str, Any]]:
    """Return the results of the one-rank run and of rank 0 of the two-rank run."""
    folder = tmp_path_factory.mktemp("continued")
    ranks = start_ranks("continued_ranks", (2,), [tiny_model_dir, folder], folder)
    try:
        of_one = by_one(tiny_model_dir, folder)
    finally:
        (folder / "written_by_one").touch()
    return {1: of_one, 2: results_of(ranks, (2,), folder)[0, 2]}


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize(("stage", "other"), ROUTES)
def test_states_that_one_rank_took_over_and_saved_are_the_same_to_the_bit(results, stage, other, dtype):
    """Optimizer state converted to another stage and back is bitwise equal."""
    turned, straight = results[2][f"turned {stage} {other} {dtype}"], results[2][f"straight {stage} {dtype}"]
    assert turned["metrics"] == straight["metrics"]
    for kind in ("weights", "average"):
        for name, weight in straight[kind].items():
            assert torch.equal(turned[kind][name], weight), (kind, name)


@pytest.mark.parametrize(("stage", "other"), ROUTES)
def test_two_ranks_and_one_and_two_train_as_two_that_never_stopped(results, stage, other):
    """Training over a change of ranks and stage gives the losses, gradients, weights and averages of an uninterrupted
    run.
    """
    end = results[2][f"trained {stage} {other}"]
    metrics = results[1][f"trained {stage} {other}"] + end["metrics"]
    assert_trained_as(results[2][f"whole {stage}"], end | {"metrics": metrics})


@pytest.mark.parametrize("stage", STAGES)
def test_ranks_that_begin_to_share_sequences_and_end_it_train_as_two_that_never_did(results, stage):
    assert_trained_as(results[2][f"whole {stage}"], results[2][f"shared {stage}"])


def assert_trained_as(whole: dict[str, Any], found: dict[str, Any]) -> None:
    """Compare metrics from step 3 on and the final state."""
    for one, expected in zip(found["metrics"], whole["metrics"][2:], strict=True):
        assert one == pytest.approx(expected, rel=1e-4)
    for kind in ("weights", "average"):
        assert farthest(found[kind], whole[kind]) < 1e-6
