"""Two real ranks compute the same as one rank at every ZeRO stage, and resume exactly."""

from pathlib import Path
from typing import Any

import pytest
import torch
from rank_scenarios import HYBRIDS, SAVED, STAGES
from safetensors.torch import load_file
from started_ranks import results_of, start_ranks
from tiny_training import CLOSE, LEARNING_RATE, farthest
from tiny_vision import save_tiny_vision

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]

HYBRIDS_AT_STAGES = [f"{kind} {stage}" for kind in HYBRIDS for stage in (2, 3)]


@pytest.fixture(scope="module")
def results(tiny_model_dir, tiny_moe_dir, tiny_hybrid_dir, tmp_path_factory) -> dict[tuple[int, int], dict[str, Any]]:
    """Return the results of each rank, by (rank, number of ranks)."""
    folder = tmp_path_factory.mktemp("ranks")
    vision = save_tiny_vision("qwen3_vl", folder / "vision")
    words = [tiny_model_dir, tiny_moe_dir, vision, *map(tiny_hybrid_dir, HYBRIDS), folder]
    return results_of(start_ranks("rank_scenarios", (1, 2), words, folder), (1, 2), folder)


def assert_equal_steps(one: dict[str, Any], other: dict[str, Any]) -> None:
    for alone, together in zip(one["metrics"], other["metrics"], strict=True):
        assert alone == pytest.approx(together, rel=1e-5)
    assert farthest(one["weights"], other["weights"]) < CLOSE


@pytest.mark.parametrize(
    "name",
    [
        *(f"steps {stage}" for stage in STAGES),
        "zpg",
        "overlap",
        "router loss",
        *(f"steps {hybrid}" for hybrid in HYBRIDS_AT_STAGES),
    ],
)
def test_two_ranks_take_the_steps_of_one(results, name):
    """Compare loss, gradient norm, learning rate and weights, including a step in which one rank is idle."""
    assert_equal_steps(results[0, 1][name], results[0, 2][name])
    assert results[0, 2][name]["metrics"] == results[1, 2][name]["metrics"]
    assert farthest(results[0, 2][name]["weights"], results[1, 2][name]["weights"]) == 0
    assert results[0, 1][name]["sizes"][-1] == 1
    assert sorted(results[rank, 2][name]["sizes"][-1] for rank in (0, 1)) == [0, 1]


@pytest.mark.parametrize("stage", STAGES)
def test_two_ranks_with_pictures_on_one_of_them_take_the_steps_of_one(results, stage):
    for rank in (0, 1):
        assert_equal_steps(results[0, 1][f"vision {stage}"], results[rank, 2][f"vision {stage}"])
    assert_equal_steps(results[0, 1]["vision 0"], results[0, 2][f"vision {stage}"])


def test_two_actor_ranks_with_pictures_on_one_of_them_compute_and_learn_as_one(results):
    alone, *together = (found["vision actor"] for found in results.values())
    assert [alone["pictures"], *sorted(found["pictures"] for found in together)] == [2, 0, 2]
    answers = together[0]["before"] | together[1]["before"]
    assert answers.keys() == alone["before"].keys()
    for number, logprobs in alone["before"].items():
        torch.testing.assert_close(answers[number], logprobs, atol=1e-5, rtol=0)
    for found in together:
        assert_equal_steps(alone, found)


@pytest.mark.parametrize("stage", [2, 3])
def test_two_ranks_learn_from_a_teacher_as_one(results, stage):
    """Stage 2 partitions the teacher's weights, stage 3 the student's."""
    for rank in (0, 1):
        assert_equal_steps(results[0, 1][f"distill {stage}"], results[rank, 2][f"distill {stage}"])


@pytest.mark.parametrize("stage", [2, 3])
def test_two_ranks_with_a_solution_each_learn_its_steps_as_one(results, stage):
    """The loss is a mean over all labelled steps; the ranks have different numbers of them, and one is idle at the
    end.
    """
    for rank in (0, 1):
        assert_equal_steps(results[0, 1][f"prm {stage}"], results[rank, 2][f"prm {stage}"])


@pytest.mark.parametrize("stage", STAGES[1:])
def test_stages_take_the_same_steps(results, stage):
    for place in results:
        assert_equal_steps(results[place]["steps 0"], results[place][f"steps {stage}"])


@pytest.mark.parametrize("saved", [*(" ".join(map(str, saved)) for saved in SAVED), *HYBRIDS_AT_STAGES])
def test_every_rank_goes_on_from_a_checkpoint_bit_for_bit(results, saved):
    name = f"resume {saved}"
    for place, found in results.items():
        resumed = found[name]
        assert (resumed["metrics"], resumed["weights"], resumed["random numbers"]) == (True, True, True), place
    drawn = [results[rank, 2][name]["drawn"] for rank in (0, 1)]
    assert not torch.equal(*drawn)  # each rank has its own random state


@pytest.mark.parametrize("stage", STAGES)
def test_ranks_and_stages_round_at_random_and_agree_within_the_rounding(results, stage):
    """Two ranks draw other noise than one: weights differ by a few bf16 steps or by Adam steps."""
    alone = results[0, 1]["resume 0 bf16 adamw_bf16"]
    found = [results[place][f"resume {stage} bf16 adamw_bf16"] for place in results]
    assert farthest(found[1]["result"], found[2]["result"]) == 0
    for other in found:
        for one, same in zip(alone["steps"], other["steps"], strict=True):
            assert one["loss"] == pytest.approx(same["loss"], rel=0.01)
        for name, weight in alone["result"].items():
            bound = 8 * LEARNING_RATE + 2**-5 * weight.float().abs()
            assert ((other["result"][name].float() - weight.float()).abs() <= bound).all(), name


@pytest.mark.parametrize(("stage", "dtype"), [(0, "fp32"), (1, "fp32"), (2, "fp32"), (1, "bf16")])
def test_muon_puts_matrices_together_that_are_cut_between_ranks(results, stage, dtype):
    alone, *together = (results[place][f"resume {stage} {dtype} muon"] for place in results)
    assert farthest(together[0]["result"], together[1]["result"]) == 0
    bound = 1e-5 if dtype == "fp32" else 8 * LEARNING_RATE
    assert farthest(alone["result"], together[0]["result"]) < bound
    for one, same in zip(alone["steps"], together[0]["steps"], strict=True):
        assert one == pytest.approx(same, rel=1e-5 if dtype == "fp32" else 0.02)


@pytest.mark.parametrize("stage", STAGES)
def test_a_loss_that_is_infinite_on_one_rank_is_skipped_by_all(results, stage):
    for place, found in results.items():
        assert found[f"spoiled {stage}"] == {"skipped": [0.0, 1.0, 1.0], "weights": True}, place


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_averages_of_weights_are_those_of_one_rank(results, stage):
    alone, together = (results[0, num_ranks][f"average {stage}"] for num_ranks in (1, 2))
    assert farthest(alone, together) < CLOSE
    assert bool(results[1, 2][f"average {stage}"]) == (stage == 3)  # else the first rank keeps all of it


def test_a_partitioned_reference_moves_to_where_the_first_rank_says(results, tiny_model_dir):
    start = load_file(Path(tiny_model_dir) / "model.safetensors")
    for place in results:
        for name, weight in results[place]["moved"].items():
            torch.testing.assert_close(weight, 0.5 * start[name].float(), rtol=0, atol=1e-6)


@pytest.mark.parametrize("stage", STAGES[1:])
def test_bf16_gradients_add_up_over_ranks_in_float32(results, stage):
    assert {place: found[f"sum {stage}"] for place, found in results.items()} == {(0, 1): 257, (0, 2): 257, (1, 2): 257}


def test_a_partitioned_critic_learns_as_a_whole_one(results):
    for alone, together in zip(results[0, 1]["critic"], results[1, 2]["critic"], strict=True):
        assert alone == pytest.approx(together, rel=1e-5)
    first, second = results[0, 1]["critic"]
    assert second["value_loss"] < first["value_loss"]


def test_a_partitioned_reference_gives_the_same_logprobs(results):
    expected = results[0, 1]["inference"]
    assert [len(logprobs) for logprobs in expected][1] == 0
    for place in results:
        for one, other in zip(results[place]["inference"], expected, strict=True):
            assert torch.allclose(one, other, atol=1e-5)


def test_reference_columns_over_ranks_are_those_of_one(results):
    expected = results[0, 1]["reference columns"]
    for rank in range(2):
        torch.testing.assert_close(results[rank, 2]["reference columns"], expected, atol=1e-4, rtol=1e-5)


def test_evaluation_over_ranks_is_the_global_mean(results):
    assert results[0, 2]["evaluation"] == results[1, 2]["evaluation"]
    assert results[0, 2]["evaluation"] == pytest.approx(results[0, 1]["evaluation"], rel=1e-5)


def test_metrics_are_summed_or_maxima_and_one_vote_is_enough(results):
    assert results[0, 1]["reduced"] == {"sum": 1.0, "largest_max": 0.0}
    assert results[0, 2]["reduced"] == results[1, 2]["reduced"] == {"sum": 3.0, "largest_max": 2.0}
    assert [found["votes"] for found in results.values()] == [[False, True]] * 3


def test_every_rank_goes_by_what_the_first_one_decides(results):
    assert [found["decisions"] for found in results.values()] == [[0, "rank 0 refuses"]] * 3
