"""End-to-end test of a mixture-of-experts model from `rlhf sft` to `rlhf grpo` with vLLM."""

import importlib.util
import json
from pathlib import Path

import pytest
from forked import run_rlhf
from safetensors.torch import load_file

from rlhf_cli.tracking.sinks import read_metrics

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed"),
]

VARIED = """
def reward_func(queries, prompts, labels):
    return [len(set(query[len(prompt):])) for query, prompt in zip(queries, prompts)]
"""
SHARED = "--param_dtype fp32 --max_len 64 --aux_loss_coef 0.01"


def expert_weights(folder: Path):
    return {name: w for name, w in load_file(folder / "model.safetensors").items() if ".mlp.experts." in name}


def test_vllm_samples_from_the_experts_that_were_trained(tiny_moe_dir, problems, reward_file, tmp_path):
    rows = [json.loads(line) for line in problems.read_text().splitlines()]
    examples = tmp_path / "examples.jsonl"
    examples.write_text("".join(json.dumps({"prompt": r["prompt"], "response": r["answer"]}) + "\n" for r in rows))
    sft = (
        f"sft --pretrain {tiny_moe_dir} --dataset {examples} --train_batch_size 8 --max_epochs 1 {SHARED} "
        f"--learning_rate 1e-3 --output {tmp_path / 'sft'}"
    )
    grpo = (
        f"grpo --pretrain {tmp_path / 'sft'} --prompt_data {problems} --label_key answer {SHARED} --max_new_tokens 6 "
        f"--reward_func {reward_file(VARIED)} --rollout_batch_size 4 --n_samples_per_prompt 3 --train_batch_size 12 "
        f"--max_iterations 2 --actor_learning_rate 1e-2 --enforce_eager --output {tmp_path / 'grpo'}"
    )
    for command in (sft, grpo):
        run_rlhf(*command.split())
    for run in ("sft", "grpo"):
        metrics = read_metrics(tmp_path / run)
        assert sorted(metrics) == [1, 2]
        assert all(1.9 < found["aux_loss"] < 4.0 for found in metrics.values())  # top 2 of 4 experts
    assert all(found["grad_norm"] > 0 for found in metrics.values())
    # The second iteration is sampled after a weight update.
    assert [found["rollout_diff_max"] < 1e-4 for found in metrics.values()] == [True, True]
    folders = (Path(tiny_moe_dir), tmp_path / "sft" / "model", tmp_path / "grpo" / "model")
    start, tuned, trained = (expert_weights(folder) for folder in folders)
    assert start.keys() == tuned.keys() == trained.keys()
    assert len(trained) == 2 * 4 * 3
    assert any(not weight.equal(start[name]) for name, weight in tuned.items())
    assert any(not weight.equal(tuned[name]) for name, weight in trained.items())
