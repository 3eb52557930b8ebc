"""Responses packed with a single copy of their prompt: the assignment, and the model's outputs."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from repeated_tokens import repeated_tokens
from test_prefix_packing import SHAPE
from transformers import Qwen2Config, Qwen2ForCausalLM

from rlhf_cli.backends.roles.groups import FrozenPolicyRole
from rlhf_cli.backends.roles.planner import MicroBatchPlanner
from rlhf_cli.commands.grpo import GRPOConfig
from rlhf_cli.config.train import BatchConfig
from rlhf_cli.data.packing.packs import TokenSequence, pack
from rlhf_cli.data.packing.shared_prompts import pack_groups, plan_groups
from rlhf_cli.models.attention.varlen import SelectTokens
from rlhf_cli.models.policy import PolicyModel
from rlhf_cli.models.vision.pictures import PlacedPicture, picture_of_pixels
from rlhf_cli.options import build_config
from rlhf_cli.runs.online.start_roles import role_settings


def sequence(prompt: list[int], response: list[int], trained: list[int] | None = None) -> TokenSequence:
    mask = np.zeros(len(prompt) + len(response), dtype=bool)
    mask[len(prompt) :] = True if trained is None else np.array(trained, dtype=bool)
    return TokenSequence(np.array(prompt + response, dtype=np.int32), mask)


ONE, TWO = [1, 2, 3, 4], [1, 2, 9]
SCATTERED = [
    sequence(ONE, [5, 6]),
    sequence(TWO, [7]),
    sequence(ONE, [5]),
    sequence(TWO, [4, 4, 4], [1, 0, 1]),
    sequence(ONE, [8, 8, 8]),
]


def flat(plan: list[list[list[int]]]) -> list[int]:
    return [index for bins in plan for members in bins for index in members]


def test_responses_to_a_prompt_become_neighbours_and_the_prompt_counts_once():
    plan = plan_groups(SCATTERED, max_tokens=100, num_ranks=1, quadratic_cost=0.0)
    assert plan == [[[0, 2, 4, 1, 3]]]
    # 4 + 2 + 1 + 3 and 3 + 1 + 3 tokens; repeated prompts would need 18 and 10.
    assert plan_groups(SCATTERED, max_tokens=10, num_ranks=1, quadratic_cost=0.0) == [[[0, 2, 4], [1, 3]]]
    assert pack_groups([SCATTERED[i] for i in (0, 2, 4)]).input_ids_T.tolist() == [1, 2, 3, 4, 5, 6, 5, 8, 8, 8]


@pytest.mark.parametrize("max_sequences", [None, 4])
def test_pictures_of_a_prompt_count_once_by_their_patches(max_sequences):
    picture = picture_of_pixels("red", np.zeros((2, 2, 3), np.uint8))
    # Capacity for 9 tokens; the group has 4 + 2 + 2 tokens.
    placed = (PlacedPicture(picture, 0, 2, token=1, patches=36),)
    groups = [replace(sequence(ONE, [5, 6 + n]), pictures=placed) for n in (0, 1)] + [sequence(TWO, [7])]
    bounds = {"num_ranks": 1, "quadratic_cost": 0.0, "max_sequences": max_sequences}
    assert plan_groups(groups, max_tokens=13, **bounds) == [[[0, 1, 2]]]
    assert plan_groups(groups, max_tokens=12, **bounds) == [[[0, 1], [2]]]


def test_a_group_beyond_the_bound_is_cut_and_nothing_is_lost():
    plan = plan_groups(SCATTERED, max_tokens=7, num_ranks=1, quadratic_cost=0.0)
    assert sorted(flat(plan)) == [0, 1, 2, 3, 4]
    assert all(pack_groups([SCATTERED[i] for i in bins]).input_ids_T.numel() <= 7 for bins in plan[0])


def test_one_group_is_shared_by_all_ranks():
    group = [sequence(ONE, [5 + n]) for n in range(8)]
    plan = plan_groups(group, max_tokens=100, num_ranks=4, quadratic_cost=0.01)
    assert sorted(flat(plan)) == list(range(8))
    assert all(len(bins) == 1 and bins[0] for bins in plan)


@pytest.mark.parametrize("seed", range(3))
def test_every_sequence_is_dealt_once_within_the_bound(seed):
    rng = np.random.default_rng(seed)
    prompts = [rng.integers(1, 9, rng.integers(1, 12)).tolist() for _ in range(5)]
    sequences = [
        sequence(prompts[rng.integers(5)], rng.integers(1, 9, rng.integers(1, 20)).tolist()) for _ in range(40)
    ]
    plan = plan_groups(sequences, max_tokens=40, num_ranks=3, quadratic_cost=0.01)
    assert sorted(flat(plan)) == list(range(40))
    assert len({len(bins) for bins in plan}) == 1
    assert all(pack_groups([sequences[i] for i in bins]).input_ids_T.numel() <= 40 for rank in plan for bins in rank)


def test_a_bound_on_sequences_keeps_prompts_together():
    plan = plan_groups(SCATTERED, max_tokens=100, num_ranks=1, quadratic_cost=0.0, max_sequences=3)
    assert sorted(plan[0]) == [[0, 2, 4], [1, 3]]
    # Limited only by sequences: the same 8 responses to each of 3 prompts in micro-batches of 8, 6 and 16.
    three = [sequence([1, prompt, 3], [n]) for n in range(8) for prompt in range(3)]
    for most, sizes in ((8, [8, 8, 8]), (6, [6, 6, 6, 6]), (16, [12, 12])):
        plan = plan_groups(three, max_tokens=1000, num_ranks=1, quadratic_cost=0.0, max_sequences=most)
        assert [len(members) for members in plan[0]] == sizes
        copies = [pack_groups([three[i] for i in members]).input_ids_T.numel() - len(members) for members in plan[0]]
        assert sum(copies) <= 3 * (3 + len(sizes) - 1)  # a prompt is repeated only if its group is split


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(("num_ranks", "max_sequences"), [(1, 1), (1, 4), (3, 4), (3, 100), (7, 3)])
def test_every_sequence_is_dealt_once_within_both_bounds(seed, num_ranks, max_sequences):
    rng = np.random.default_rng(seed)
    prompts = [rng.integers(1, 9, rng.integers(1, 12)).tolist() for _ in range(5)]
    sequences = [
        sequence(prompts[rng.integers(5)], rng.integers(1, 9, rng.integers(1, 20)).tolist()) for _ in range(40)
    ]
    plan = plan_groups(sequences, max_tokens=60, num_ranks=num_ranks, quadratic_cost=0.01, max_sequences=max_sequences)
    assert sorted(flat(plan)) == list(range(40))
    assert len({len(bins) for bins in plan}) == 1
    for members in (members for bins in plan for members in bins):
        assert len(members) <= max_sequences
        assert pack_groups([sequences[i] for i in members]).input_ids_T.numel() <= 60


def test_ranks_get_even_shares_of_the_sequences():
    group = [sequence(ONE, [5 + n]) for n in range(9)]
    plan = plan_groups(group, max_tokens=100, num_ranks=4, quadratic_cost=0.0, max_sequences=8)
    assert sorted(len(members) for bins in plan for members in bins) == [2, 2, 2, 3]


def test_a_fixed_size_of_micro_batches_leaves_prompts_shared():
    given = {"pretrain": "m", "prompt_data": "d", "output": "o", "reward_funcs": "exact", "micro_train_batch_size": "3"}
    config = build_config(GRPOConfig, given)
    settings = role_settings(config, "actor", config.model, learning_rate=1e-6, total_steps=1)
    assert settings.share_prompts
    deal = MicroBatchPlanner(1, config.batch, 0.01, lambda: settings.share_prompts)
    assert sorted(deal.plan(SCATTERED)[0]) == [[0, 2, 4], [1, 3]]


def test_without_a_common_prompt_nothing_differs():
    apart = [SCATTERED[0], SCATTERED[1]]
    assert torch.equal(pack_groups(apart).input_ids_T, pack(apart).input_ids_T)
    assert pack_groups(apart).keys is None
    assert pack_groups([]).num_sequences == 0


def test_log_probabilities_and_gradients_are_those_of_repeated_prompts():
    torch.manual_seed(0)
    model = PolicyModel(Qwen2ForCausalLM(Qwen2Config(**SHAPE)))
    ordered = [SCATTERED[i] for i in (0, 2, 4, 1, 3)]
    results = []
    for packed in (pack(ordered), pack_groups(ordered)):
        model.zero_grad()
        logprobs_K, _ = model(packed)
        (logprobs_K * torch.arange(1, logprobs_K.numel() + 1)).sum().backward()
        results.append((logprobs_K.detach(), [p.grad.clone() for p in model.parameters()]))
    torch.testing.assert_close(*(logprobs for logprobs, _ in results), atol=1e-5, rtol=1e-5)
    for plain, shared in zip(results[0][1], results[1][1], strict=True):
        torch.testing.assert_close(shared, plain, atol=1e-4, rtol=1e-4)


class Ranks:
    """Ranks that return the id of every trained token, as `FrozenEngine.infer` does with packs."""

    def all_each(self, call, work):
        return [[pack_groups(batch).targets_K.numpy() for batch in share.steps[0]] for share in work]

    all_stored = all_each


@pytest.mark.parametrize(("num_ranks", "max_tokens"), [(1, 100), (2, 12), (3, 7)])
def test_results_of_shared_packs_come_back_to_their_sequences(num_ranks, max_tokens):
    planner = MicroBatchPlanner(num_ranks, BatchConfig(train_max_tokens_per_gpu=max_tokens), 0.01, lambda: True)
    results = FrozenPolicyRole(Ranks(), planner, takes_turns=False).logprobs(SCATTERED)  # type: ignore[arg-type]
    for asked, found in zip(SCATTERED, results, strict=True):
        assert np.asarray(found).tolist() == asked.token_ids[asked.loss_mask].tolist()


def test_columns_stay_with_their_tokens():
    samples = [replace(s, columns={"ids": s.token_ids[s.loss_mask].astype(np.float32)}) for s in SCATTERED]
    planner = MicroBatchPlanner(1, BatchConfig(train_max_tokens_per_gpu=100), 0.01, lambda: True)
    (work,) = planner.steps(samples, [np.arange(5)])
    ((micro_batch,),), (totals,) = work.steps, work.totals
    packed = pack_groups(micro_batch)
    assert np.concatenate([s.columns["ids"] for s in micro_batch]).tolist() == packed.targets_K.tolist()
    assert (totals.num_tokens, totals.num_sequences) == (9, 5)


def test_gradients_of_a_shared_token_are_rounded_to_bfloat16_once():
    keys, index, grads, exact = repeated_tokens()
    (found,) = torch.autograd.grad(SelectTokens.apply(keys, index), keys, grads)
    assert torch.equal(found, exact.bfloat16())
    whole = torch.randn(5, 2, 4, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda keys: SelectTokens.apply(keys, index[:12]), (whole,))
