"""Host memory of sleeping roles, compared with manual calculations."""

from dataclasses import replace

import pytest
from online_settings import resolve

from rlhf_cli.backends.cluster.placement import Island, Layout, Seat
from rlhf_cli.config.train import DeepSpeedConfig
from rlhf_cli.planning.architectures import find_shape
from rlhf_cli.planning.memory import GIB, RoleMemory
from rlhf_cli.planning.phases import sleeping_by_node
from rlhf_cli.runs.memory import described, online_workload, sleep_memory_fact

SEVEN = 7_000_000_000


@pytest.mark.parametrize(
    ("trained", "weight_bytes", "stage", "ranks", "expected"),
    [
        (SEVEN, 2, 2, 1, 98),  # 2 bytes for weights, 12 for the optimizer
        (SEVEN, 2, 2, 4, 140),  # weights on every rank, optimizer states partitioned
        (SEVEN, 2, 3, 4, 98),
        (SEVEN, 2, 1, 4, 0),  # DeepSpeed moves nothing at stage 1 with bf16 weights
        (SEVEN, 4, 1, 1, 112),
        (0, 2, 0, 2, 28),  # a frozen model moves at every stage
    ],
)
def test_bytes_of_a_role_are_weights_of_ranks_and_optimizer_states_of_all(
    trained, weight_bytes, stage, ranks, expected
):
    role = RoleMemory(
        shape=replace(find_shape("Qwen/Qwen2.5-7B"), parameters=SEVEN),
        num_trained=trained,
        weight_bytes=weight_bytes,
        settings=DeepSpeedConfig(zero_stage=stage),
        num_ranks=ranks,
    )
    assert role.sleeping_bytes == expected * 10**9


def test_a_run_whose_roles_take_turns_states_the_memory_of_its_fullest_node(tiny_model_dir):
    sleeping = {"deepspeed_enable_sleep": "true", "colocate_all_models": "true", "zero_stage": "2"}
    config = resolve("ppo", pretrain=tiny_model_dir, **sleeping)
    islands = (Island(node=0, num_gpus=1), Island(node=1, num_gpus=1))
    seats = [
        Seat("actor", 0, 0, (0,), shared=True),
        Seat("ref", 0, 0, (0,), shared=True),
        Seat("critic", 0, 1, (0,), shared=True),
    ]
    layout = Layout(islands, tuple(seats))
    work = online_workload(config, layout, has_critic=True)
    (line,) = sleep_memory_fact(work, has_gpus=True).values()
    assert line.startswith("0 GiB per node while roles sleep")
    assert sleep_memory_fact(work, has_gpus=False) == {}
    awake = online_workload(resolve("ppo", pretrain=tiny_model_dir), layout, has_critic=True)
    assert sleep_memory_fact(awake, has_gpus=True) == {}
    # 9,600 in embeddings, 7,808 per layer, 32 in the last norm
    assert work.roles["actor"].shape.parameters == 25_248


def test_a_teacher_sleeps_in_host_memory_too(tiny_model_dir):
    sleeping = {"deepspeed_enable_sleep": "true", "colocate_all_models": "true"}
    config = resolve("grpo", pretrain=tiny_model_dir, teacher_pretrain=tiny_model_dir, **sleeping)
    seats = (Seat("teacher", 0, 0, (0,), shared=True), Seat("teacher", 1, 0, (1,), shared=True))
    layout = Layout((Island(node=0, num_gpus=2),), seats)
    assert (
        sleeping_by_node(online_workload(config, layout, has_critic=False))[0] >= 2 * 2 * 25_248
    )  # two bytes per parameter on both ranks


def test_a_teacher_in_the_ranks_of_its_student_sleeps_there(tiny_model_dir):
    sleeping = {"deepspeed_enable_sleep": "true", "zero_stage": "0", "param_dtype": "bf16"}
    config = resolve("gkd", pretrain=tiny_model_dir, teacher_pretrain=tiny_model_dir, **sleeping)
    layout = Layout((Island(node=3, num_gpus=1),), (Seat("actor", 0, 0, (0,), shared=True),))
    assert sleeping_by_node(online_workload(config, layout, has_critic=False)) == {
        3: 2 * 25_248
    }  # at stage 0 the student itself cannot move


def test_too_little_memory_is_named():
    assert described({0: 90 * GIB, 1: 112 * GIB}, 128 * GIB)["Host memory"].startswith("112 GiB per node")
    assert "this node has 96 GiB, WHICH IS NOT ENOUGH" in described({0: 112 * GIB}, 96 * GIB)["Host memory"]
