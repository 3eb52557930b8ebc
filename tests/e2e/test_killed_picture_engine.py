"""End-to-end test of `rlhf grpo` with images whose vLLM engine is killed. Slow: it starts an engine four times."""

import importlib.util
from pathlib import Path

import pytest
from forked import run_rlhf
from killed_runs import assert_same_run, engine_process, finish, halted, rlhf, wait_for
from picture_rows import write_rows
from tiny_vision import save_tiny_vision

from rlhf_cli.backends.rollout.torchvision_folder import lacks_torchvision
from rlhf_cli.tracking.sinks import read_metrics

SECONDS = 900
"""Time limit for the first checkpoint, also on a busy machine."""

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.slow,
    pytest.mark.timeout(3 * SECONDS),
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed"),
    pytest.mark.skipif(lacks_torchvision("qwen2_5_vl"), reason="vLLM has no torchvision"),
]
ITERATIONS = 4
REWARD = "def reward_func(queries, prompts, labels):\n    return [sum(map(ord, query)) % 7 for query in queries]\n"


def grpo_words(model: Path, rows: Path, output: Path) -> list[str]:
    reward = rows.with_name("reward.py")
    reward.write_text(REWARD)
    words = (
        f"grpo --pretrain {model} --prompt_data {rows} --reward_func {reward} "
        f"--max_len 128 --max_new_tokens 8 --rollout_batch_size 4 --n_samples_per_prompt 2 --train_batch_size 8 "
        f"--max_iterations {ITERATIONS} --num_episodes {ITERATIONS} --actor_learning_rate 1e-2 --init_kl_coef 0.01 "
        f"--lora_rank 4 --param_dtype fp32 --save_steps 1 --output {output} --rollout_backend vllm"
    )
    return words.split()


def test_a_run_on_pictures_whose_engine_is_killed_ends_as_an_unharmed_one(tmp_path: Path):
    """The restarted engine receives the merged weights of the adapter, as the first engine did."""
    model = save_tiny_vision("qwen2_5_vl", tmp_path / "tiny")
    pictures: list[list[str]] = [["a.png"], ["b.jpg"], ["a.png", "b.jpg"], []]
    rows = write_rows(
        tmp_path,
        *({"prompt": f"{'<image>' * len(its)}{number}?", "images": its} for number, its in enumerate(pictures)),
    )
    whole, harmed = tmp_path / "whole", tmp_path / "harmed"
    run_rlhf(*grpo_words(model, rows, whole))
    process = rlhf(*grpo_words(model, rows, harmed))
    try:
        wait_for(harmed / "checkpoints" / "step_000001" / "manifest.json", process, seconds=SECONDS)
        with halted(process):
            engine_process(harmed, "vllm", seconds=SECONDS).kill()
        finish(process)
    finally:
        process.kill()
    assert_same_run(whole, harmed)
    metrics = list(read_metrics(whole).values())
    assert max(one["rollout_diff_max"] for one in metrics) < 1e-4
    assert metrics[-1]["kl"] > 1e-6
