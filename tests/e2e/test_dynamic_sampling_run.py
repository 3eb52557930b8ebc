"""End-to-end test of `rlhf grpo --dynamic_filtering --async_train`, killed and resumed.

The checkpoint includes surplus groups, batches waiting for training, and which model was best so far.
"""

import gzip
import json
from pathlib import Path

import pytest
from forked import run_rlhf
from safetensors.torch import load_file
from test_ppo import assert_nothing_left, assert_same_run, kill_driver, plain_metrics, rlhf, wait_for

from rlhf_cli.runs.online.group_files import AHEAD, SURPLUS

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(600)]


def test_a_run_that_replaces_prompts_and_samples_ahead_is_continued_with_its_groups_and_its_best_model(tmp_path: Path):
    problems, held_out = tmp_path / "problems.jsonl", tmp_path / "held_out.jsonl"
    model, reward = tmp_path / "tiny", tmp_path / "odd.py"
    rows = [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a in range(10, 14) for b in range(10, 14)]
    problems.write_text("".join(json.dumps(row) + "\n" for row in rows))
    held_out.write_text(json.dumps({"prompt": "99+99=", "answer": "198"}) + "\n")
    reward.write_text(  # all evaluations score the same, so the untrained model stays the best
        "def reward_func(queries, prompts, labels):\n"
        "    return [1.0 if '99+99' in query else float(sum(map(ord, query)) % 2) for query in queries]\n"
    )
    size = "--hidden_size 64 --intermediate_size 128 --num_hidden_layers 2 --num_attention_heads 2"
    run_rlhf("scratch", "--dataset", problems, *size.split(), "--vocab_size", 300, "--output", model)
    words = (
        f"grpo --pretrain {model} --prompt_data {problems} --label_key answer --reward_func {reward} --max_len 64 "
        "--max_new_tokens 6 --rollout_batch_size 4 --n_samples_per_prompt 2 --train_batch_size 8 --max_iterations 3 "
        "--num_episodes 9 --init_kl_coef 0 --actor_learning_rate 1e-3 --save_steps 1 --rollout_backend transformers "
        f"--dynamic_filtering --dynamic_oversample 2 --async_train --eval_dataset {held_out} --eval_steps 1 "
        "--best_metric_key eval/reward"
    ).split()
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    run_rlhf(*words, "--output", whole)
    process = rlhf(*words, "--output", str(killed))
    wait_for(killed / "checkpoints" / "step_000001" / "manifest.json", process)
    kill_driver(process)
    assert_nothing_left(killed)
    run_rlhf(*words, "--output", killed, "--load_checkpoint")
    assert_same_run(whole, killed)
    for run in (whole, killed):
        assert json.loads((run / "best" / "best.json").read_text())["iteration"] == 0
        best, untrained = (load_file(folder / "model.safetensors") for folder in (run / "best", model))
        assert all(weight.to(best[name].dtype).equal(best[name]) for name, weight in untrained.items())
    metrics = plain_metrics(whole)
    # Surplus groups are one update older than the batch that uses them.
    assert [metrics[step]["staleness/max"] for step in (1, 2, 3)] == [0.0, 1.0, 2.0]
    assert metrics[2]["dynamic/carried_over"] > 0  # from the batch that was sampled during iteration 1
    surplus, ahead = (groups_in(whole / "checkpoints" / "step_000001", name) for name in (SURPLUS, AHEAD))
    assert surplus == metrics[2]["dynamic/carried_over"] <= metrics[3]["dynamic/carried_in"]
    assert ahead == 1


def groups_in(checkpoint: Path, name: str) -> int:
    with gzip.open(checkpoint / name, "rt") as file:
        return len(list(file))
