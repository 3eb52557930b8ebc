"""Runs on GPUs choose the micro-batches that their plan shows."""

from typing import Any

import pytest
from plans import LARGE, SMALL, plan_of

from rlhf_cli.planning.hardware import GPUS
from rlhf_cli.planning.phases import batching_of
from rlhf_cli.runs.memory import offline_batching, online_workload, with_batching

MEMORY = GPUS["h100"].memory


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
    chosen = offline_batching(settings, memory=MEMORY, num_ranks=8, longest=plan.work.longest)
    assert chosen == plan.batching
    assert chosen.reason
    config = with_batching(settings, chosen)
    assert config.setting("train_max_tokens_per_gpu") == chosen.max_tokens
    assert config.setting("gradient_checkpointing") == chosen.recomputes


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
