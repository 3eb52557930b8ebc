"""Runs choose the micro-batches that their plan shows."""

from typing import Any

import pytest
from plans import LARGE, SMALL, plan_of

from rlhf_cli.planning.hardware import GPUS, unmeasured_cpu
from rlhf_cli.planning.phases import batching_of
from rlhf_cli.runs.memory import hardware_of_ranks, offline_batching, online_workload, with_batching


@pytest.mark.parametrize(
    ("command", "given"),
    [
        ("sft", {"pretrain": SMALL}),
        ("sft", {"pretrain": LARGE, "zero_stage": 3}),
        ("dpo", {"pretrain": LARGE, "lora_rank": 8}),
        ("distill", {"pretrain": SMALL, "teacher_pretrain": LARGE}),
    ],
)
def test_an_offline_run_chooses_the_micro_batches_of_its_plan(command, given):
    plan = plan_of(command, num_gpus=8, **given)
    settings: Any = plan.work.config
    chosen = offline_batching(settings, plan.work.hardware, num_ranks=8, longest=plan.work.longest)
    assert chosen == plan.batching
    assert chosen.reason
    config = with_batching(settings, chosen)
    assert config.setting("train_max_tokens_per_gpu") == chosen.max_tokens
    assert config.setting("gradient_checkpointing") == chosen.recomputes


@pytest.mark.parametrize("memory", [10, 40])
def test_a_run_on_a_cpu_chooses_the_micro_batches_of_its_plan(memory):
    plan = plan_of("sft", gpu="cpu", pretrain="HuggingFaceTB/SmolLM2-135M", max_len=1024, host_memory_gib=memory)
    settings: Any = plan.work.config
    chosen = offline_batching(settings, plan.work.hardware, num_ranks=1, longest=plan.work.longest)
    assert chosen == plan.batching
    assert bool(chosen.reason) == (memory == 10)


def test_a_run_without_gpus_is_planned_with_the_memory_of_this_machine(monkeypatch):
    monkeypatch.setattr("rlhf_cli.runs.memory.gpus", list)
    assert hardware_of_ranks(2) == unmeasured_cpu()


@pytest.mark.parametrize("command", ["grpo", "ppo"])
def test_an_online_run_chooses_the_micro_batches_of_its_plan(command):
    plan = plan_of(command, pretrain=SMALL, num_gpus=2)
    settings: Any = plan.work.config
    work = online_workload(settings, plan.work.layout, hardware=GPUS["h100"], has_critic=command == "ppo")
    assert batching_of(work) == plan.batching


def test_an_engine_that_stays_awake_leaves_less_room():
    asleep, awake = (
        plan_of("grpo", pretrain=SMALL, colocate_all_models="true", vllm_num_engines=1, vllm_enable_sleep=sleeps)
        for sleeps in ("true", "false")
    )
    assert awake.batching.recomputes
    assert not asleep.batching.recomputes
