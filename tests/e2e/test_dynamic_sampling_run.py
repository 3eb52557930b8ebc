"""`rlhf grpo --dynamic_filtering` as a user runs it, killed and continued: surplus groups are part of a checkpoint."""

import gzip
import json
from pathlib import Path

import pytest
from test_ppo import assert_nothing_left, assert_same_run, finish, kill_tree, plain_metrics, rlhf, wait_for

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]


def test_a_run_that_replaces_prompts_is_continued_with_its_surplus(tmp_path: Path):
    problems, model, reward = tmp_path / "problems.jsonl", tmp_path / "tiny", tmp_path / "odd.py"
    rows = [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a in range(10, 14) for b in range(10, 14)]
    problems.write_text("".join(json.dumps(row) + "\n" for row in rows))
    reward.write_text(
        "def reward_func(queries, prompts, labels):\n"
        "    return [float(sum(map(ord, query)) % 2) for query in queries]\n"
    )
    size = "--hidden_size 64 --intermediate_size 128 --num_hidden_layers 2 --num_attention_heads 2"
    finish(rlhf("scratch", "--dataset", str(problems), *size.split(), "--vocab_size", "300", "--output", str(model)))
    words = (
        f"grpo --pretrain {model} --prompt_data {problems} --label_key answer --reward_func {reward} --max_len 64 "
        "--max_new_tokens 6 --rollout_batch_size 4 --n_samples_per_prompt 2 --train_batch_size 8 --max_iterations 3 "
        "--num_episodes 9 --init_kl_coef 0 --actor_learning_rate 1e-3 --save_steps 1 --rollout_backend transformers "
        "--dynamic_filtering --dynamic_oversample 2"
    ).split()
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    finish(rlhf(*words, "--output", str(whole)))
    process = rlhf(*words, "--output", str(killed))
    wait_for(killed / "checkpoints" / "step_000001" / "manifest.json", process)
    kill_tree(process)
    assert_nothing_left(killed)
    finish(rlhf(*words, "--output", str(killed), "--load_checkpoint"))
    assert_same_run(whole, killed)
    metrics = plain_metrics(whole)
    assert metrics[1]["dynamic/carried_over"] > 0
    with gzip.open(whole / "checkpoints" / "step_000001" / "surplus.jsonl.gz", "rt") as file:
        assert len(list(file)) == metrics[1]["dynamic/carried_over"] <= metrics[2]["dynamic/carried_in"]
