"""Ranks that share sequences compute as one rank does: log-probs, values, gradients, and steps at every ZeRO stage."""

from typing import Any

import pytest
from preference_training import TASKS
from started_ranks import results_of, start_ranks
from tiny_training import CLOSE, farthest

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]

RANKS_PER_SEQUENCE = {1: 1, 3: 3, 4: 2}
"""By number of ranks; four ranks are two groups that compute different sequences."""


@pytest.fixture(scope="module")
def results(tiny_model_dir, tiny_llama_dir, tmp_path_factory) -> dict[tuple[int, int], dict[str, Any]]:
    """The findings of each rank, by (rank, number of ranks)."""
    folder = tmp_path_factory.mktemp("shared")
    words = [tiny_model_dir, tiny_llama_dir, str(folder)]
    processes = {
        num_ranks: start_ranks("shared_sequences.py", num_ranks, [*words, str(size)], folder)
        for num_ranks, size in RANKS_PER_SEQUENCE.items()
    }
    return results_of(processes, folder)


@pytest.mark.parametrize("place", [(0, 3), (1, 3), (2, 3), (0, 4), (3, 4)])
def test_shared_packs_give_the_results_and_gradients_of_one_rank(results, place):
    for case, (distance, of_gradients) in results[place]["distances"].items():
        assert distance < 1e-5, case
        assert of_gradients < 1e-5, case


@pytest.mark.parametrize("name", [*(f"steps {stage}" for stage in range(4)), *TASKS, "distill"])
def test_steps_over_shared_sequences_are_those_of_one_rank(results, name):
    alone = results[0, 1][name]
    for rank in range(4):
        together = results[rank, 4][name]
        for one, other in zip(alone["metrics"], together["metrics"], strict=True):
            assert other == pytest.approx(one, rel=1e-5, abs=1e-6)  # rewards are differences of sums
        assert farthest(alone["weights"], together["weights"]) < CLOSE
