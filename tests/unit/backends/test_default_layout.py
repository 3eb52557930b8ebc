"""The default layout of an online run without placement flags: it uses all GPUs and keeps explicit settings."""

import random
from dataclasses import replace

import pytest
from online_settings import resolve

from rlhf_cli.backends.cluster.default_layout import (
    LayoutNeeds,
    _largest_shape,
    _left,
    fill_layout,
    idle_gpus,
    memory_share,
)
from rlhf_cli.backends.cluster.placement import ENGINE, plan_layout
from rlhf_cli.errors import UsageError

ROLES = [
    ("actor",),
    ("actor", "ref"),
    ("actor", "critic"),
    ("actor", "critic", "ref"),
    ("actor", "critic", "ref", "reward"),
    ("actor", "ref", "teacher"),
]
NODES = [[1], [2], [3], [4], [8], [8, 8]]


def filled(roles, node_gpus, *, needs=None, tensor_parallel=1, engines=None, **placement):
    engines = {} if engines is None else {"vllm_num_engines": engines}
    config = resolve("ppo", vllm_tensor_parallel_size=tensor_parallel, **engines, **placement)
    found, reason = fill_layout(config.layout_settings(roles), node_gpus=node_gpus, needs=needs or LayoutNeeds())
    config = config.with_layout(found)
    assert config.layout_settings(roles) == replace(found, is_open=False)
    layout = plan_layout(found, node_gpus=node_gpus or [1024])
    return config.placement, config.engine, layout, reason


@pytest.mark.parametrize("roles", ROLES)
@pytest.mark.parametrize("node_gpus", NODES)
def test_all_roles_take_turns_on_all_gpus_by_default(roles, node_gpus):
    placement, engine, layout, reason = filled(roles, node_gpus)
    assert layout.num_gpus == sum(node_gpus)
    assert {len(layout.of(role)) for role in (*roles, ENGINE)} == {sum(node_gpus)}
    assert (placement.colocate_all_models, placement.deepspeed_enable_sleep, engine.vllm_enable_sleep) == (True,) * 3
    assert "take turns" in reason
    assert idle_gpus(layout, node_gpus) == ""


@pytest.mark.parametrize("roles", ROLES)
@pytest.mark.parametrize("node_gpus", NODES)
def test_a_run_that_samples_ahead_has_engines_on_gpus_of_their_own_or_is_refused(roles, node_gpus):
    needs = LayoutNeeds(samples_ahead=True)
    num_pools = len(
        set(roles) - ({"ref"} if "actor" in roles else set()) - ({"reward"} if "critic" in roles else set())
    )
    if sum(node_gpus) < num_pools + 1:
        with pytest.raises(UsageError, match=r"engines require separate GPUs: .* remove --async_train"):
            filled(roles, node_gpus, needs=needs)
        return
    placement, engine, layout, reason = filled(roles, node_gpus, needs=needs)
    assert layout.num_gpus == sum(node_gpus)
    assert not any(seat.shared for seat in layout.of(ENGINE))
    assert (placement.colocate_all_models, placement.deepspeed_enable_sleep, engine.vllm_enable_sleep) == (False,) * 3
    assert "while the models train" in reason


def test_engines_get_what_equal_shares_of_the_models_leave():
    _, engine, layout, _ = filled(("actor", "critic", "ref"), [8], needs=LayoutNeeds(samples_ahead=True))
    assert [len(layout.of(role)) for role in ("actor", "critic", "ref", ENGINE)] == [2, 2, 2, 4]
    assert engine.vllm_num_engines == 4


def test_models_that_cannot_sleep_are_apart_where_they_fit_and_else_share_awake():
    needs = LayoutNeeds(can_sleep=False)
    apart, _, layout, reason = filled(("actor", "ref"), [4], needs=needs)
    assert not apart.colocate_all_models
    assert layout.num_gpus == 4
    assert "sleep" in reason
    together, engine, _, _ = filled(("actor", "ref"), [1], needs=needs)
    assert (together.colocate_all_models, together.deepspeed_enable_sleep, engine.vllm_enable_sleep) == (
        True,
        False,
        True,
    )


def test_groups_of_ranks_and_engines_over_several_gpus_fit_into_the_numbers_and_idle_gpus_are_named():
    _, engine, layout, _ = filled(("actor", "ref"), [7], needs=LayoutNeeds(multiple=4), tensor_parallel=2)
    assert (len(layout.of("actor")), engine.vllm_num_engines) == (4, 2)
    assert idle_gpus(layout, [7]) == "3 GPUs idle"
    assert idle_gpus(layout, [5]) == "1 GPU idle"


@pytest.mark.parametrize(
    ("given", "engines", "sizes"),
    [
        ({"actor_num_gpus_per_node": 2}, None, [2, 1, 1, 1]),
        ({"actor_num_gpus_per_node": 1}, None, [1, 1, 1, 1]),
        ({}, 3, [1, 1, 1, 3]),
        ({"colocate_all_models": True, "actor_num_gpus_per_node": 2}, 2, [2, 1, 1, 2]),
    ],
)
def test_given_sizes_are_kept(given, engines, sizes):
    _, _, layout, reason = filled(("actor", "critic", "ref"), [8], engines=engines, **given)
    assert [len(layout.of(role)) for role in ("actor", "critic", "ref", ENGINE)] == sizes
    assert reason == ""


def test_a_given_switch_is_kept_and_the_rest_is_filled():
    awake, engine, layout, _ = filled(("actor", "ref"), [8], deepspeed_enable_sleep=False)
    assert awake.colocate_all_models
    assert not awake.deepspeed_enable_sleep
    assert engine.vllm_enable_sleep
    _, _, layout, reason = filled(("actor", "ref"), [8], colocate_all_models=False)
    assert [len(layout.of(role)) for role in ("actor", "ref", ENGINE)] == [2, 2, 4]
    assert reason == ""
    paired, _, layout, _ = filled(("actor", "ref"), [8], colocate_actor_ref=True)
    assert [len(layout.of(role)) for role in ("actor", "ref", ENGINE)] == [4, 4, 4]
    assert not paired.deepspeed_enable_sleep


def test_a_cluster_without_gpus_has_one_process_a_role_that_never_sleeps():
    placement, engine, layout, reason = filled(("actor", "ref"), [])
    assert [len(layout.of(role)) for role in ("actor", "ref", ENGINE)] == [1, 1, 1]
    assert not any((placement.colocate_all_models, placement.deepspeed_enable_sleep, engine.vllm_enable_sleep))
    assert reason == ""


def test_an_engine_on_gpus_of_its_own_takes_more_memory():
    assert (memory_share(None, shared=False), memory_share(None, shared=True)) == (0.9, 0.6)
    assert memory_share(0.5, shared=False) == 0.5


def test_the_largest_shape_is_that_of_a_search_over_all_shapes():
    draw = random.Random(0)
    for _ in range(300):
        node_gpus = sorted((draw.randint(1, 8) for _ in range(draw.randint(1, 6))), reverse=True)
        limits = {
            "at_most": draw.randint(1, 40),
            "per_node": draw.choice((1, 2, 4)),
            "multiple": draw.choice((1, 2, 6)),
        }
        shapes = [
            (nodes, gpus)
            for nodes in range(1, len(node_gpus) + 1)
            for gpus in range(limits["per_node"], node_gpus[nodes - 1] + 1, limits["per_node"])
            if nodes * gpus <= limits["at_most"] and nodes * gpus % limits["multiple"] == 0
        ]
        best = max(shapes, key=lambda shape: (shape[0] * shape[1], -shape[0]), default=None)
        assert _largest_shape(node_gpus, **limits) == best
    assert _largest_shape([], at_most=1, per_node=1, multiple=1) is None


def test_what_islands_leave_of_nodes_is_what_the_placement_leaves():
    draw = random.Random(0)
    for _ in range(300):
        node_gpus = sorted((draw.randint(1, 8) for _ in range(draw.randint(1, 6))), reverse=True)
        count, size = draw.randint(1, 4), draw.randint(1, 4)
        free: list[int] | None = list(node_gpus)
        for _ in range(count):
            node = min(
                (n for n, gpus in enumerate(free or ()) if gpus >= size), key=(free or []).__getitem__, default=None
            )
            if free is None or node is None:
                free = None
                break
            free[node] -= size
        assert _left(node_gpus, count, size) == (None if free is None else sorted(free, reverse=True))
