"""Flat packs and the assignment of sequences to micro-batches and ranks."""

import itertools
import time

import numpy as np
import pytest
import torch

from rlhf_cli.data.packing.packs import TokenSequence, pack, plan_packs
from rlhf_cli.errors import UsageError


def sequence(tokens: list[int], trained: list[int]) -> TokenSequence:
    mask = np.zeros(len(tokens), dtype=bool)
    mask[trained] = True
    return TokenSequence(np.array(tokens, dtype=np.int32), mask)


def test_pack_lays_sequences_end_to_end():
    packed = pack([sequence([5, 6, 7], [1, 2]), sequence([8], []), sequence([9, 10, 11, 12], [3])])
    assert packed.input_ids_T.tolist() == [5, 6, 7, 8, 9, 10, 11, 12]
    assert packed.position_ids_T.tolist() == [0, 1, 2, 0, 0, 1, 2, 3]
    assert packed.cu_seqlens.tolist() == [0, 3, 4, 8]
    assert packed.max_seqlen == 4
    assert packed.cu_trained.tolist() == [0, 2, 2, 3]
    assert packed.targets_K.tolist() == [6, 7, 12]
    assert packed.rows_K.tolist() == [0, 1, 6]
    assert packed.num_sequences == 3


def test_pack_has_the_types_kernels_expect():
    packed = pack([sequence([5, 6], [1])])
    assert packed.input_ids_T.dtype == packed.position_ids_T.dtype == packed.rows_K.dtype == torch.int64
    assert packed.cu_seqlens.dtype == torch.int32
    assert packed.cu_trained.dtype == torch.int64
    moved = packed.to("meta")
    assert moved.rows_K.is_meta
    assert moved.cu_seqlens.is_meta
    assert moved.max_seqlen == 2


def test_idle_pack_has_one_token_and_nothing_to_train():
    packed = pack([])
    assert packed.input_ids_T.shape == (1,)
    assert packed.cu_seqlens.tolist() == [0, 1]
    assert packed.targets_K.tolist() == packed.rows_K.tolist() == []
    assert packed.cu_trained.tolist() == [0]
    assert packed.num_sequences == 0


def test_first_token_is_never_a_target():
    with pytest.raises(AssertionError, match="first token"):
        sequence([5, 6], [0])


def test_num_trained_counts_targets():
    assert sequence([1, 2, 3, 4], [1, 3]).num_trained == 2
    assert len(sequence([1, 2, 3, 4], [1, 3])) == 4


def assert_is_a_plan(plan, lengths, *, max_tokens, num_ranks, max_sequences=None):
    bins = [members for rank in plan for members in rank]
    assert len(plan) == num_ranks
    assert len({len(rank) for rank in plan}) == 1
    assert sorted(itertools.chain(*bins)) == list(range(len(lengths)))
    assert all(sum(lengths[i] for i in members) <= max_tokens for members in bins)
    assert max_sequences is None or all(len(members) <= max_sequences for members in bins)
    assert sum(not members for members in bins) == max(0, len(bins) - len(lengths))


def fewest_bins(lengths, max_tokens, max_sequences):
    """Return the minimum number of bins by brute force."""
    best = len(lengths)

    def place(rest, rooms):
        nonlocal best
        if len(rooms) >= best:
            return
        if not rest:
            best = len(rooms)
            return
        for number, (room, count) in enumerate(rooms):
            if room >= rest[0] and count < max_sequences:
                place(rest[1:], [*rooms[:number], (room - rest[0], count + 1), *rooms[number + 1 :]])
        place(rest[1:], [*rooms, (max_tokens - rest[0], 1)])

    place(lengths, [])
    return best


@pytest.mark.parametrize("seed", range(150))
def test_small_plans_have_the_fewest_micro_batches(seed):
    random = np.random.default_rng(seed)
    max_tokens = int(random.integers(5, 40))
    lengths = random.integers(1, max_tokens + 1, size=random.integers(1, 10)).tolist()
    num_ranks = int(random.integers(1, 4))
    max_sequences = int(random.integers(1, 5)) if random.random() < 0.4 else None
    quadratic_cost = float(random.choice([0, 0.01, 1]))
    plan = plan_packs(
        lengths,
        max_tokens=max_tokens,
        num_ranks=num_ranks,
        max_sequences=max_sequences,
        quadratic_cost=quadratic_cost,
    )
    assert_is_a_plan(plan, lengths, max_tokens=max_tokens, num_ranks=num_ranks, max_sequences=max_sequences)
    assert len(plan[0]) == -(-fewest_bins(lengths, max_tokens, max_sequences or 99) // num_ranks)


def test_exact_search_finds_a_filling_that_greedy_ones_miss():
    lengths = [2, 3, 3, 3, 4, 4, 5, 6]
    plan = plan_packs(lengths, max_tokens=10, num_ranks=3)
    filled = sorted(sorted(lengths[i] for i in rank[0]) for rank in plan)
    assert filled == [[2, 3, 5], [3, 3, 4], [4, 6]]
    assert all(len(rank) == 1 for rank in plan)


def test_pictures_take_the_room_of_their_patches_if_that_is_more_than_their_tokens():
    # Four patches per token: capacity 6, 5 and 4 tokens; 100 patches exceed a micro-batch and fill one.
    plan = plan_packs([2, 5, 4, 3], patches=[24, 0, 16, 100], max_tokens=10, num_ranks=1)
    assert plan == [[[0, 2], [1], [3]]]
    assert plan_packs([2, 5, 4, 3], patches=[8, 0, 16, 12], max_tokens=10, num_ranks=1) == plan_packs(
        [2, 5, 4, 3], max_tokens=10, num_ranks=1
    )


@pytest.mark.parametrize("seed", range(20))
def test_plans_of_pictures_keep_both_bounds_with_the_fewest_micro_batches(seed):
    random = np.random.default_rng(seed)
    max_tokens, num_ranks = int(random.integers(5, 40)), int(random.integers(1, 4))
    lengths = random.integers(1, max_tokens + 1, size=random.integers(1, 10))
    patches = random.integers(0, 8 * max_tokens, size=lengths.size) * (random.random(lengths.size) < 0.5)
    plan = plan_packs(lengths, patches=patches, max_tokens=max_tokens, num_ranks=num_ranks)
    assert_is_a_plan(plan, lengths, max_tokens=max_tokens, num_ranks=num_ranks)
    for members in itertools.chain(*plan):
        assert sum(patches[members]) <= 4 * max_tokens or len(members) == 1
    rooms = [max(length, min(-(-its // 4), max_tokens)) for length, its in zip(lengths, patches, strict=True)]
    assert len(plan[0]) == -(-fewest_bins(rooms, max_tokens, 99) // num_ranks)


@pytest.mark.parametrize("seed", range(30))
def test_large_plans_keep_every_bound(seed):
    random = np.random.default_rng(seed)
    max_tokens = int(random.integers(100, 3000))
    shape = random.choice(["uniform", "lognormal", "nearly full", "half"])
    size = int(random.integers(1, 600))
    lengths = {
        "uniform": lambda: random.integers(1, max_tokens + 1, size=size),
        "lognormal": lambda: np.clip(random.lognormal(4, 1, size=size), 1, max_tokens).astype(int),
        "nearly full": lambda: random.integers(max_tokens - 5, max_tokens + 1, size=size),
        "half": lambda: random.integers(max_tokens // 2 - 3, max_tokens // 2 + 4, size=size),
    }[shape]().tolist()
    num_ranks = int(random.integers(1, 17))
    limit = int(random.integers(1, 9)) if random.random() < 0.3 else None
    plan = plan_packs(
        lengths, max_tokens=max_tokens, num_ranks=num_ranks, max_sequences=limit, quadratic_cost=float(random.random())
    )
    assert_is_a_plan(plan, lengths, max_tokens=max_tokens, num_ranks=num_ranks, max_sequences=limit)
    at_least = -(-sum(lengths) // max_tokens)
    assert len(plan[0]) <= -(-max(at_least * 2, -(-len(lengths) // (limit or len(lengths)))) // num_ranks) + 1


def test_seven_sequences_on_eight_ranks_leave_one_rank_idle():
    plan = plan_packs([3, 4, 5, 6, 7, 8, 9], max_tokens=100, num_ranks=8)
    assert sorted(rank[0] for rank in plan) == [[], [0], [1], [2], [3], [4], [5], [6]]
    assert all(len(rank) == 1 for rank in plan)


def test_no_sequences_need_no_micro_batches():
    assert plan_packs([], max_tokens=10, num_ranks=3) == [[], [], []]


def test_cost_is_balanced_by_flops_not_by_tokens():
    # With cost L + L^2 the sequence of 8 (72) weighs as much as six of 3 (12 each); by tokens 8 + 3 + 3 = 4 * 3.5.
    lengths = [8, 3, 3, 3, 3, 3, 3]
    plan = plan_packs(lengths, max_tokens=100, num_ranks=2, quadratic_cost=1.0)
    assert sorted(rank[0] for rank in plan) == [[0], [1, 2, 3, 4, 5, 6]]
    by_tokens = plan_packs(lengths, max_tokens=100, num_ranks=2)
    assert sorted(sum(lengths[i] for i in rank[0]) for rank in by_tokens) == [12, 14]


@pytest.mark.parametrize("quadratic_cost", [0.0, 1e-4, 1e-3])
def test_many_sequences_are_balanced_over_ranks_and_micro_batches(quadratic_cost):
    random = np.random.default_rng(1)
    lengths = np.clip(random.lognormal(6, 0.8, size=2048), 16, 4096).astype(int)
    costs = lengths + quadratic_cost * lengths.astype(float) ** 2
    plan = plan_packs(lengths, max_tokens=16_384, num_ranks=8, quadratic_cost=quadratic_cost)
    assert_is_a_plan(plan, lengths, max_tokens=16_384, num_ranks=8)
    bin_costs = np.array([[costs[members].sum() for members in rank] for rank in plan])
    assert bin_costs.sum(axis=1).max() / bin_costs.sum(axis=1).min() < 1.01
    assert (bin_costs.max(axis=0) / bin_costs.min(axis=0)).max() < 1.1
    assert lengths.sum() / (16_384 * bin_costs.size) > 0.9


def test_plans_are_the_same_every_time():
    lengths = np.random.default_rng(2).integers(1, 500, size=300)
    plans = [plan_packs(lengths, max_tokens=1000, num_ranks=4, quadratic_cost=0.01) for _ in range(2)]
    assert plans[0] == plans[1]


def test_a_sequence_longer_than_the_bound_is_named():
    with pytest.raises(UsageError, match=r"sequence of 11 tokens .* micro-batch of 10.*train_max_tokens_per_gpu"):
        plan_packs([3, 11, 2], max_tokens=10, num_ranks=1)


@pytest.mark.parametrize("longest", [2_000, 16_000])
def test_planning_a_large_step_takes_little_time(longest):
    lengths = np.random.default_rng(3).integers(1, longest, size=4096)
    best = min(timed(lambda: plan_packs(lengths, max_tokens=16_384, num_ranks=64)) for _ in range(3))
    assert best < 0.4  # about 0.05 s on an idle machine; the limit allows for a busy one


def timed(function) -> float:
    start = time.process_time()
    function()
    return time.process_time() - start
