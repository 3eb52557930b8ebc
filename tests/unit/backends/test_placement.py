"""Layouts for 1, 8, 128 and 1,024 GPUs, as a pure function of the settings."""

import os
from typing import Any

import pytest
from online_settings import resolve

from rlhf_cli.backends.cluster.placement import (
    ENGINE,
    JUDGE,
    Layout,
    Seat,
    check_layout,
    describe,
    on_nodes,
    plan_layout,
)
from rlhf_cli.backends.cluster.ray_cluster import Cluster
from rlhf_cli.errors import UsageError
from rlhf_cli.runs.busy_machine import crowd_notice, load_notice

ROLES = ("actor", "critic", "ref")
JUDGED = (*ROLES, "reward")


def layout_of(
    node_gpus: list[int], *, roles: tuple[str, ...] = ROLES, engines: int = 1, tensor_parallel: int = 1, **placement
) -> Layout:
    config = resolve("ppo", vllm_num_engines=engines, vllm_tensor_parallel_size=tensor_parallel, **placement)
    return plan_layout(config.layout_settings(roles), node_gpus=node_gpus)


def shape(nodes: int, gpus: int, *roles: str) -> dict[str, Any]:
    """Return settings that give each role this many nodes and GPUs per node."""
    return {f"{role}_num_nodes": nodes for role in roles} | {f"{role}_num_gpus_per_node": gpus for role in roles}


def users(layout: Layout) -> list[list[str]]:
    return [layout.users(i, gpu) for i, island in enumerate(layout.islands) for gpu in range(island.num_gpus)]


def gpus_taken(layout: Layout, num_nodes: int) -> list[int]:
    return [sum(island.num_gpus for island in layout.islands if island.node == node) for node in range(num_nodes)]


def assert_sound(layout: Layout, node_gpus: list[int]) -> None:
    """Check invariants of every layout: node capacity, complete ranks, topology of seats, shared GPUs."""
    assert all(taken <= free for taken, free in zip(gpus_taken(layout, len(node_gpus)), node_gpus, strict=True))
    assert layout.num_gpus == sum(gpus_taken(layout, len(node_gpus)))
    for role in {seat.role for seat in layout.seats}:
        assert [seat.rank for seat in layout.of(role)] == list(range(len(layout.of(role))))
        places = [(seat.island, gpu) for seat in layout.of(role) for gpu in seat.gpus]
        assert len(set(places)) == len(places), f"two ranks of {role} share a GPU"
    for seat in layout.seats:
        assert all(0 <= gpu < layout.islands[seat.island].num_gpus for gpu in seat.gpus)
        assert seat.shared == any(len(layout.users(seat.island, gpu)) > 1 for gpu in seat.gpus)
    assert all(users(layout)), "a GPU is asked for that nobody uses"


def test_one_gpu_is_shared_by_all_when_colocated():
    layout = layout_of([1], colocate_all_models=True)
    assert_sound(layout, [1])
    assert users(layout) == [["actor", "critic", "ref", ENGINE]]
    assert layout.of(ENGINE) == [Seat(ENGINE, 0, 0, (0,), True)]
    assert describe(layout, unit="GPU") == ["node 0: 1 GPU for actor + critic + ref + engine"]


def test_one_gpu_is_shared_with_a_reward_model_when_colocated():
    layout = layout_of([1], roles=JUDGED, colocate_all_models=True)
    assert_sound(layout, [1])
    assert users(layout) == [["actor", "critic", "ref", "reward", ENGINE]]
    assert describe(layout, unit="GPU") == ["node 0: 1 GPU for actor + critic + ref + reward + engine"]


def test_four_gpus_do_not_hold_five_roles_that_are_apart():
    with pytest.raises(UsageError) as caught:
        layout_of([4], roles=JUDGED)
    assert str(caught.value).startswith(
        "rollout engines: 1 x 1 GPUs required (nodes x GPUs per node); the cluster has 1 x 4, of which none are not "
        "used by other roles; let roles share GPUs with --colocate_all_models"
    )
    with pytest.raises(UsageError, match=r"reward: 1 x 1 GPUs required .* or lower --reward_num_nodes or"):
        layout_of([3], roles=JUDGED)
    assert_sound(layout_of([4], roles=JUDGED, colocate_critic_reward=True), [4])


def test_one_gpu_does_not_hold_roles_that_are_apart():
    with pytest.raises(UsageError) as caught:
        layout_of([1])
    assert str(caught.value) == (
        "critic: 1 x 1 GPUs required (nodes x GPUs per node); the cluster has 1 x 1, of which none are not used by "
        "other roles; let roles share GPUs with --colocate_all_models, or lower --critic_num_nodes or "
        "--critic_num_gpus_per_node"
    )


def test_eight_gpus_apart_belong_to_one_role_each():
    layout = layout_of([8], **shape(1, 2, *ROLES), engines=2)
    assert_sound(layout, [8])
    assert users(layout) == [["actor"]] * 2 + [["critic"]] * 2 + [["ref"]] * 2 + [[ENGINE]] * 2
    assert not any(seat.shared for seat in layout.seats)
    assert describe(layout, unit="GPU") == [
        "node 0: 2 GPUs for actor",
        "node 0: 2 GPUs for critic",
        "node 0: 2 GPUs for ref",
        "node 0: 2 GPUs for engine",
    ]


def test_actor_and_reference_on_the_same_gpus_leave_room_for_others():
    layout = layout_of([8], **shape(1, 2, "actor", "ref"), **shape(1, 2, "critic"), engines=4, colocate_actor_ref=True)
    assert_sound(layout, [8])
    assert users(layout) == [["actor", "ref"]] * 2 + [["critic"]] * 2 + [[ENGINE]] * 4
    assert [seat.shared for role in ("actor", "ref", "critic", ENGINE) for seat in layout.of(role)] == (
        [True] * 4 + [False] * 6
    )


def test_critic_and_reward_model_on_the_same_gpus_of_eight():
    sizes = shape(1, 2, "actor", "ref") | shape(1, 3, "critic", "reward")
    layout = layout_of([8], **sizes, roles=JUDGED, engines=3, colocate_actor_ref=True, colocate_critic_reward=True)
    assert_sound(layout, [8])
    assert users(layout) == [["actor", "ref"]] * 2 + [["critic", "reward"]] * 3 + [[ENGINE]] * 3
    assert all(seat.shared for seat in layout.of("reward"))


def test_a_reward_model_apart_has_gpus_of_its_own():
    layout = layout_of([8], **shape(1, 2, "reward"), roles=JUDGED, engines=3)
    assert_sound(layout, [8])
    assert users(layout) == [["actor"], ["critic"], ["ref"], ["reward"], ["reward"]] + [[ENGINE]] * 3


def test_a_teacher_has_gpus_of_its_own_or_shares_all():
    roles = ("actor", "teacher")
    apart = layout_of([8], **shape(1, 2, "actor"), **shape(1, 4, "teacher"), roles=roles, engines=2)
    assert_sound(apart, [8])
    assert users(apart) == [["actor"]] * 2 + [["teacher"]] * 4 + [[ENGINE]] * 2
    together = layout_of(
        [8], **shape(1, 2, "actor"), **shape(1, 4, "teacher"), roles=roles, engines=2, colocate_all_models=True
    )
    assert_sound(together, [8])
    assert users(together) == [["actor", "teacher", ENGINE]] * 2 + [["teacher"]] * 2


def test_eight_colocated_gpus_carry_tensor_parallel_engines():
    layout = layout_of([8], **shape(1, 8, *ROLES), engines=4, tensor_parallel=2, colocate_all_models=True)
    assert_sound(layout, [8])
    assert [seat.gpus for seat in layout.of(ENGINE)] == [(0, 1), (2, 3), (4, 5), (6, 7)]
    assert users(layout) == [["actor", "critic", "ref", ENGINE]] * 8


def test_a_run_without_critic_and_reference_takes_no_gpus_for_them():
    layout = layout_of([2], roles=("actor",), colocate_actor_ref=True, colocate_critic_reward=True)
    assert_sound(layout, [2])
    assert users(layout) == [["actor"], [ENGINE]]


def test_128_gpus_apart_with_islands_inside_nodes():
    nodes = [8] * 16
    layout = layout_of(
        nodes, **shape(4, 8, "actor"), **shape(4, 8, "critic"), **shape(2, 8, "ref"), engines=12, tensor_parallel=4
    )
    assert_sound(layout, nodes)
    assert layout.num_gpus == 128
    assert [len(layout.of(role)) for role in (*ROLES, ENGINE)] == [32, 32, 16, 12]
    assert {len(seat.gpus) for seat in layout.of(ENGINE)} == {4}
    # One island of 8 GPUs per node of a role, one of 4 per engine; islands do not cross nodes.
    assert sorted(island.num_gpus for island in layout.islands) == [4] * 12 + [8] * 10
    assert describe(layout, unit="GPU") == [
        "nodes 0-3: 8 GPUs each for actor",
        "nodes 4-7: 8 GPUs each for critic",
        "nodes 8-9: 8 GPUs each for ref",
        "nodes 10-15: 8 GPUs each for engine",
    ]


def test_128_gpus_shared_by_all():
    nodes = [8] * 16
    layout = layout_of(nodes, **shape(16, 8, *ROLES), engines=16, tensor_parallel=8, colocate_all_models=True)
    assert_sound(layout, nodes)
    assert [island.node for island in layout.islands] == list(range(16))
    assert [seat.island for seat in layout.of(ENGINE)] == list(range(16))
    assert users(layout) == [["actor", "critic", "ref", ENGINE]] * 128
    assert describe(layout, unit="GPU") == ["nodes 0-15: 8 GPUs each for actor + critic + ref + engine"]


def test_128_gpus_shared_by_all_with_a_reward_model():
    nodes = [8] * 16
    layout = layout_of(
        nodes, **shape(16, 8, *JUDGED), roles=JUDGED, engines=16, tensor_parallel=8, colocate_all_models=True
    )
    assert_sound(layout, nodes)
    assert users(layout) == [[*JUDGED, ENGINE]] * 128


def test_128_gpus_with_critic_and_reward_model_together():
    nodes = [8] * 16
    layout = layout_of(
        nodes,
        **shape(4, 8, "actor", "ref"),
        **shape(4, 8, "critic", "reward"),
        roles=JUDGED,
        engines=16,
        tensor_parallel=4,
        colocate_actor_ref=True,
        colocate_critic_reward=True,
    )
    assert_sound(layout, nodes)
    assert describe(layout, unit="GPU") == [
        "nodes 0-3: 8 GPUs each for actor + ref",
        "nodes 4-7: 8 GPUs each for critic + reward",
        "nodes 8-15: 8 GPUs each for engine",
    ]


def test_128_gpus_with_actor_and_reference_together():
    nodes = [8] * 16
    layout = layout_of(
        nodes,
        **shape(8, 8, "actor", "ref"),
        **shape(4, 8, "critic"),
        engines=16,
        tensor_parallel=2,
        colocate_actor_ref=True,
    )
    assert_sound(layout, nodes)
    assert layout.num_gpus == 128
    assert layout.of("actor")[37].gpus == layout.of("ref")[37].gpus
    assert layout.of("actor")[37].island == layout.of("ref")[37].island
    # Four engines of 2 GPUs on each of the last four nodes.
    assert gpus_taken(layout, 16) == [8] * 16
    assert {layout.islands[seat.island].node for seat in layout.of(ENGINE)} == {12, 13, 14, 15}


def test_1024_gpus_apart_for_every_role():
    nodes = [8] * 128
    layout = layout_of(
        nodes,
        **shape(48, 8, "actor", "ref"),
        **shape(16, 8, "critic"),
        **shape(8, 8, "reward"),
        roles=JUDGED,
        engines=112,
        tensor_parallel=4,
        colocate_actor_ref=True,
    )
    assert_sound(layout, nodes)
    assert layout.num_gpus == 1024
    assert [len(layout.of(role)) for role in (*JUDGED, ENGINE)] == [384, 128, 384, 64, 112]
    assert describe(layout, unit="GPU") == [
        "nodes 0-47: 8 GPUs each for actor + ref",
        "nodes 48-63: 8 GPUs each for critic",
        "nodes 64-71: 8 GPUs each for reward",
        "nodes 72-127: 8 GPUs each for engine",
    ]


def test_1024_gpus_shared_by_all():
    nodes = [8] * 128
    layout = layout_of(
        nodes, **shape(128, 8, *JUDGED), roles=JUDGED, engines=128, tensor_parallel=8, colocate_all_models=True
    )
    assert_sound(layout, nodes)
    assert users(layout) == [[*JUDGED, ENGINE]] * 1024
    assert describe(layout, unit="GPU") == ["nodes 0-127: 8 GPUs each for actor + critic + ref + reward + engine"]


def test_1024_gpus_in_nodes_of_many_sizes_lose_none():
    nodes = [16] * 8 + [8] * 96 + [4] * 32
    layout = layout_of(
        nodes,
        **shape(8, 16, "actor"),
        **shape(32, 4, "critic"),
        **shape(48, 8, "ref"),
        engines=192,
        tensor_parallel=2,
    )
    assert_sound(layout, nodes)
    assert gpus_taken(layout, len(nodes)) == nodes
    assert {layout.islands[seat.island].node for seat in layout.of("critic")} == set(range(104, 136))
    with pytest.raises(UsageError, match=r"rollout engines: 193 x 2 GPUs required .* has 8 x 16 \+ 96 x 8 \+ 32 x 4"):
        layout_of(
            nodes,
            **shape(8, 16, "actor"),
            **shape(32, 4, "critic"),
            **shape(48, 8, "ref"),
            engines=193,
            tensor_parallel=2,
        )


def test_engines_fill_what_is_left_of_nodes_before_they_break_into_whole_ones():
    layout = layout_of([8, 8, 8], **shape(1, 6, "actor"), roles=("actor",), engines=2, tensor_parallel=2)
    assert_sound(layout, [8, 8, 8])
    assert [layout.islands[seat.island].node for seat in layout.of(ENGINE)] == [0, 1]


def test_an_engine_is_not_split_over_nodes():
    with pytest.raises(UsageError) as caught:
        layout_of([4, 4], **shape(1, 3, "actor", "critic"), roles=("actor", "critic"), tensor_parallel=2)
    assert str(caught.value) == (
        "rollout engines: 1 x 2 GPUs required (nodes x GPUs per node); the cluster has 2 x 4, of which 2 x 1 are not "
        "used by other roles; let roles share GPUs with --colocate_all_models, or lower --vllm_num_engines or "
        "--vllm_tensor_parallel_size"
    )


def test_ranks_of_a_node_are_not_split_over_nodes():
    with pytest.raises(UsageError, match=r"actor: 1 x 8 GPUs required .* has 1 x 6 \+ 1 x 4, of which 1 x 6"):
        layout_of([6, 4], **shape(1, 8, "actor"), roles=("actor",))


def test_too_few_gpus_for_a_role_of_several_nodes_counts_what_it_would_take_itself_as_free():
    with pytest.raises(UsageError, match=r"actor: 4 x 8 GPUs required .* has 3 x 8, of which 3 x 8 are not used"):
        layout_of([8, 8, 8], **shape(4, 8, "actor"), roles=("actor",))


@pytest.mark.parametrize(
    ("placement", "node_gpus", "expected"),
    [
        (
            {"colocate_all_models": True, **shape(1, 4, "actor"), **shape(1, 2, "critic"), **shape(1, 1, "ref")},
            [8],
            [["actor", "critic", "ref", ENGINE], ["actor", "critic", ENGINE], ["actor", ENGINE], ["actor", ENGINE]],
        ),
        (
            {"colocate_actor_ref": True, **shape(2, 1, "ref"), **shape(1, 2, "actor")},
            [2, 1, 2, 4],
            [["actor", "ref"], ["actor"], ["ref"], ["critic"], *[[ENGINE]] * 4],
        ),
        (
            {"colocate_all_models": True, **shape(1, 4, "actor"), **shape(2, 4, "critic")},
            [4, 4],
            [["actor", "critic", "ref", ENGINE], *[["actor", "critic", ENGINE]] * 3, *[["critic"]] * 4],
        ),
    ],
)
def test_roles_that_share_may_be_of_unequal_size(placement, node_gpus, expected):
    layout = layout_of(node_gpus, engines=4, **placement)
    assert users(layout) == expected
    assert_sound(layout, node_gpus)


def test_a_rank_that_sits_alone_among_roles_that_share_has_its_gpu_to_itself():
    layout = layout_of([4], **shape(1, 2, "critic"), colocate_critic_reward=True, roles=("actor", "critic", "reward"))
    assert [seat.shared for seat in layout.of("critic")] == [True, False]
    assert [seat.shared for seat in layout.of("reward")] == [True]


def test_shared_engines_that_do_not_cover_the_actor_are_told_the_right_number():
    with pytest.raises(
        UsageError, match=r"3 engines with 2 GPUs do not match the actor's 8 GPUs.* --vllm_num_engines 4 "
    ):
        layout_of([8], **shape(1, 8, *ROLES), engines=3, tensor_parallel=2, colocate_all_models=True)


def test_shared_engines_of_a_size_that_does_not_divide_a_node_are_refused():
    with pytest.raises(UsageError, match="--vllm_tensor_parallel_size 4 does not divide the 6 GPUs per node"):
        layout_of([6, 6], **shape(2, 6, *ROLES), engines=3, tensor_parallel=4, colocate_all_models=True)


def test_processes_of_a_machine_without_gpus_are_named_so():
    layout = layout_of([1024], **shape(1, 2, "actor"), roles=("actor",))
    assert describe(layout, unit="process") == ["node 0: 2 processes for actor", "node 0: 1 process for engine"]


def test_a_layout_is_described_with_the_nodes_that_the_cluster_chose():
    layout = layout_of([1024, 1024], **shape(1, 2, "actor"), roles=("actor", "critic"))
    assert describe(on_nodes(layout, [1, 0, 1]), unit="process") == [
        "node 1: 2 processes for actor",
        "node 0: 1 process for critic",
        "node 1: 1 process for engine",
    ]


def test_nodes_alike_but_not_next_to_each_other_are_listed():
    layout = layout_of([2, 4, 2], **shape(2, 2, "actor"), roles=("actor",), engines=1, tensor_parallel=4)
    assert describe(layout, unit="GPU") == ["nodes 0, 2: 2 GPUs each for actor", "node 1: 4 GPUs for engine"]


def test_threads_are_shared_unless_the_user_says_how_many(monkeypatch):
    alone, joined = (Cluster(["a"], [0], 8.0, has_gpus=False, is_local=is_local) for is_local in (True, False))
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert [alone.threads(count) for count in (1, 3, 100)] == [8, 2, 1]
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert alone.threads(1) == 1
    assert joined.threads(2) == 4


def test_a_rank_with_a_gpu_gets_eight_threads_of_a_node_with_many_cores(monkeypatch):
    monkeypatch.setattr(os, "cpu_count", lambda: 192)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    node = Cluster(["a"], [8], 192.0, has_gpus=True, is_local=True)
    assert [node.threads(count) for count in (1, 8, 48)] == [8, 8, 4]


def test_roles_that_fit_on_no_cluster_are_found_before_there_is_one():
    check_layout(resolve("ppo", vllm_num_engines=2, **shape(200, 8, *ROLES)).layout_settings(ROLES))
    with pytest.raises(UsageError, match="2 engines with 1 GPUs do not match the actor's 1 GPUs"):
        check_layout(resolve("ppo", vllm_num_engines=2, colocate_all_models=True).layout_settings(ROLES))


def test_a_role_of_more_processes_than_cores_is_named_with_its_flag():
    layout = layout_of([1024], engines=3, actor_num_gpus_per_node=8)
    (actor, engines) = crowd_notice(layout, 2.0)
    assert actor.startswith("actor: 8 processes on 2 cores")
    assert actor.endswith("lower --actor_num_gpus_per_node")
    assert engines.endswith("lower --vllm_num_engines")
    assert crowd_notice(layout, 8.0) == []


@pytest.mark.parametrize(("load", "is_said"), [(0.3, False), (1.9, False), (2.0, True), (7.5, True)])
def test_cores_that_others_use_are_said_at_the_start(load, is_said):
    found = load_notice(load, 2)
    assert len(found) == is_said
    assert all(f"load {load:.1f} on 2 cores" in line for line in found)


def judge_of(layout: Layout) -> list[list[str]]:
    return [users_of for users_of in users(layout) if JUDGE in users_of]


def test_a_judge_takes_turns_with_engines_that_sleep_or_has_gpus_of_its_own():
    shared = {"colocate_all_models": True, "vllm_enable_sleep": True, **shape(1, 4, "actor", "ref")}
    grpo: dict[str, Any] = {"roles": ("actor", "ref"), "engines": 4, "judge": "m"}
    layout = layout_of([8], **grpo, **shared)
    assert_sound(layout, [8])
    assert judge_of(layout) == [["actor", "ref", ENGINE, JUDGE]] * 4
    wide = layout_of([8], **grpo, **shared, judge_tensor_parallel_size=2)
    assert [seat.gpus for seat in wide.of(JUDGE)] == [(0, 1), (2, 3)]
    for own in ({"judge_num_engines": 1}, {"vllm_enable_sleep": False}, {"dynamic_filtering": True}):
        layout = layout_of([8], **grpo, **shared | own)
        assert_sound(layout, [8])
        assert judge_of(layout) == [[JUDGE]]
        # The actor's GPUs are in the first islands.
        assert [seat.island for seat in layout.of(JUDGE)] == [1]
    with pytest.raises(UsageError, match="the judge shares GPUs with the rollout engines, which have fewer on each no"):
        layout_of([8], **grpo, **shared, judge_tensor_parallel_size=8)
    with pytest.raises(UsageError, match=r"judge: 3 x 2 GPUs required .* serve the judge elsewhere and set --judge to"):
        layout_of([4], **grpo, **shared, judge_num_engines=3, judge_tensor_parallel_size=2)
    apart = layout_of([8, 8], roles=("actor", "ref"), engines=2, judge="m", judge_num_engines=3)
    assert_sound(apart, [8, 8])
    assert users(apart) == [["actor"], ["ref"], [ENGINE], [ENGINE], [JUDGE], [JUDGE], [JUDGE]]
