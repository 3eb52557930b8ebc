"""Sequence and tensor parallel ranks compute the same as one rank: gradients, steps at all ZeRO stages, roles."""

from pathlib import Path
from typing import Any

import pytest
import torch
from preference_training import TASKS
from reward_models import save_reward_model
from shared_sequences import RANKS_TOGETHER
from split_layers import OBJECTIVES, STAGES
from started_ranks import results_of, start_ranks
from tiny_training import CLOSE, LEARNING_RATE, NOISE, farthest
from transformers import Qwen3Config, Qwen3ForCausalLM

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(900)]

ROLES = ("gspo", "adapter", "critic", "reward")


@pytest.fixture(scope="module")
def results(tiny_model_dir, tiny_llama_dir, tmp_path_factory) -> dict[tuple[int, int], dict[str, Any]]:
    """Return the results of each rank, by (rank, number of ranks)."""
    folder = tmp_path_factory.mktemp("shared")
    judge = str(save_reward_model(tmp_path_factory.mktemp("judge")))
    words = [tiny_model_dir, tiny_llama_dir, judge, save_normed(folder / "normed"), folder]
    return results_of(start_ranks("shared_sequences", RANKS_TOGETHER, words, folder), RANKS_TOGETHER, folder)


def save_normed(folder: Path) -> str:
    """Save a random float32 Qwen3, which has query and key norms, with tied embeddings."""
    torch.manual_seed(3)
    shape = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "head_dim": 8, "vocab_size": 64}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "initializer_range": 0.2}
    Qwen3ForCausalLM(Qwen3Config(**shape, **heads, tie_word_embeddings=True)).save_pretrained(folder)
    return str(folder)


def assert_equal_steps(alone: dict[str, Any], together: dict[str, Any]) -> None:
    for one, other in zip(alone["metrics"], together["metrics"], strict=True):
        assert other == pytest.approx(one, rel=1e-5, abs=1e-6)  # rewards are differences of sums
    assert farthest(alone["weights"], together["weights"]) < CLOSE


@pytest.mark.parametrize("place", [(0, 3), (1, 3), (2, 3), (0, 4), (3, 4)])
def test_shared_packs_give_the_results_and_gradients_of_one_rank(results, place):
    found = results[place]["distances"]
    assert {name.split(", ")[-1] for name in found} == ({"3 ranks"} if place[1] == 3 else {"2 ranks", "4 ranks"})
    for case, (distance, of_gradients) in found.items():
        assert distance < 1e-5, case
        assert of_gradients < 1e-5, case


@pytest.mark.parametrize("place", [(0, 3), (3, 4)])
def test_shared_packs_in_bf16_are_as_exact_as_the_packs_of_one_rank(results, place):
    for case, (alone, shared) in results[place]["bf16"].items():
        for of_one_rank, of_several in zip(alone, shared, strict=True):
            assert of_several < 2 * of_one_rank + 0.01, case


@pytest.mark.parametrize(
    "name", [*(f"steps {stage} fp32" for stage in range(4)), "steps as one group", *TASKS, "distill"]
)
def test_steps_over_shared_sequences_are_those_of_one_rank(results, name):
    for rank in range(4):
        assert_equal_steps(results[0, 1][name], results[rank, 4][name])


@pytest.mark.parametrize("stage", range(4))
def test_ranks_that_do_not_divide_the_heads_take_the_steps_of_one_rank(results, stage):
    for rank in range(3):
        assert_equal_steps(results[0, 1][f"steps {stage} fp32"], results[rank, 3][f"steps {stage} fp32"])


@pytest.mark.parametrize("stage", range(4))
def test_steps_in_bf16_are_those_of_one_rank_but_for_rounding(results, stage):
    alone, together = (results[0, num_ranks][f"steps {stage} bf16"] for num_ranks in (1, 4))
    for one, other in zip(alone["metrics"], together["metrics"], strict=True):
        assert other == pytest.approx(one, rel=0.02)
    for name in (name for name in alone["weights"] if NOISE not in name):
        weight = alone["weights"][name].float()
        apart = (weight - together["weights"][name].float()).abs()
        assert apart.mean() < CLOSE, name
        # A small gradient may change its sign, and a weight may round differently.
        assert apart.max() < 3 * LEARNING_RATE + 2**-7 * weight.abs().max(), name


@pytest.mark.parametrize("role", ROLES)
def test_roles_that_share_sequences_answer_as_one_rank(results, role):
    alone = results[0, 1][role]
    for answers in ("before", "base"):
        together = {n: values for rank in range(4) for n, values in results[rank, 4][role].get(answers, {}).items()}
        assert together.keys() == alone.get(answers, {}).keys()
        for number, values in alone.get(answers, {}).items():
            torch.testing.assert_close(together[number], values, rtol=0, atol=5e-6)


@pytest.mark.parametrize("role", ROLES[:3])
def test_roles_that_share_sequences_learn_as_one_rank(results, role):
    alone, together = results[0, 1][role], results[3, 4][role]
    assert_equal_steps(alone, together)
    if "average" in alone:
        assert farthest(alone["average"], results[0, 4][role]["average"]) < CLOSE


def test_a_reference_answers_for_all_pairs_on_every_rank(results):
    expected = results[0, 1]["precomputed"]
    for rank in range(4):
        torch.testing.assert_close(results[rank, 4]["precomputed"], expected, rtol=0, atol=5e-6)


@pytest.mark.parametrize(
    "name",
    [
        *(f"split {stage}" for stage in STAGES),
        *(f"split {name}" for name in (*OBJECTIVES, "distill")),
        "split and offloaded",
    ],
)
def test_steps_with_split_layers_are_those_of_one_rank(results, name):
    """Compare loss, gradient norm and weights, including a step in which one of two groups is idle."""
    for rank in range(4):
        assert_equal_steps(results[0, 1][name], results[rank, 4][name])
        assert farthest(results[0, 4][name]["weights"], results[rank, 4][name]["weights"]) == 0


def test_ranks_that_split_layers_count_the_bytes_of_whole_ones(results):
    assert {results[0, ranks][f"split {stage}"]["bytes"] for ranks in (1, 4) for stage in STAGES} == {
        results[0, 1]["split 1"]["bytes"]
    }


@pytest.mark.parametrize("role", ["split actor", "split critic"])
def test_roles_with_split_layers_answer_and_learn_as_one_rank(results, role):
    alone = results[0, 1][role]
    together = {number: values for rank in range(4) for number, values in results[rank, 4][role]["before"].items()}
    assert together.keys() == alone["before"].keys()
    for number, values in alone["before"].items():
        torch.testing.assert_close(together[number], values, rtol=0, atol=5e-6)
    assert_equal_steps(alone, results[3, 4][role])


def test_engines_get_split_layers_whole_under_the_models_own_names(results):
    alone, pushed = (results[0, num_ranks]["split actor"]["pushed"] for num_ranks in (1, 4))
    assert {name: weight.shape for name, weight in pushed.items()} == {n: w.shape for n, w in alone.items()}
    assert farthest(alone, pushed) < CLOSE


@pytest.mark.parametrize("stage", STAGES)
def test_a_checkpoint_of_split_layers_goes_on_to_the_bit_and_has_whole_weights(results, stage):
    for rank in range(4):
        found = results[rank, 4][f"split and resumed {stage}"]
        assert found == dict.fromkeys(("metrics", "weights", "merged", "shapes"), True)
