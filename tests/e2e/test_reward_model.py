"""sft, rm and ppo in sequence: ppo scores its responses with the reward model of the rm run."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from forked import run_rlhf
from test_ppo import assert_nothing_left, plain_metrics
from transformers import AutoModelForSequenceClassification, AutoTokenizer

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]

SUMS = [(a, b) for a in range(10, 14) for b in range(10, 14)]
WEIGHT = 0.25


def write(path: Path, rows: list[dict]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Return a folder with the run directories of an sft run, which learns to answer in digits, and of an rm run."""
    root = tmp_path_factory.mktemp("chain")
    sums = write(root / "sums.jsonl", [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a, b in SUMS])
    pairs = [{"prompt": f"{a}+{b}=", "chosen": str(a + b), "rejected": str(a + b + 1)} for a, b in SUMS]
    train, held_out = write(root / "pairs.jsonl", pairs[4:]), write(root / "held_out.jsonl", pairs[:4])
    size = "--hidden_size 64 --intermediate_size 128 --num_hidden_layers 2 --num_attention_heads 2 --vocab_size 300"
    short = "--max_len 64 --train_batch_size 8 --learning_rate 1e-2 --param_dtype fp32"
    run_rlhf(*f"scratch --dataset {sums} {size} --output {root}/tiny".split())
    run_rlhf(*f"sft --pretrain {root}/tiny --dataset {sums} --output {root}/sft --max_epochs 20 {short}".split())
    data = f"--dataset {train} --eval_dataset {held_out}"
    run_rlhf(*f"rm --pretrain {root}/sft {data} --output {root}/rm --max_epochs 2 {short}".split())
    return root


@pytest.fixture(scope="module")
def run(folder) -> Path:
    """Return a finished two-iteration ppo run with a reward model and a verifier; the critic starts from the reward
    model.

    The reward model has two ranks and shares a place with the critic; each role has a different ZeRO stage.
    """
    output = folder / "ppo"
    words = (
        f"ppo --pretrain {folder}/sft --prompt_data {folder}/sums.jsonl --output {output} --param_dtype fp32 "
        f"--reward_pretrain {folder}/rm --normalize_reward --reward_model_weight {WEIGHT} --reward_funcs exact "
        "--max_len 64 --max_new_tokens 2 --rollout_batch_size 8 --n_samples_per_prompt 2 --train_batch_size 8 "
        "--max_iterations 2 --actor_learning_rate 1e-4 --critic_learning_rate 1e-3 --rollout_backend transformers "
        f"--colocate_critic_reward --deepspeed_enable_sleep --reward_num_gpus_per_node 2 --critic_pretrain {folder}/rm "
        "--zero_stage 1 --critic_zero_stage 2 --ref_zero_stage 0 --reward_zero_stage 3"
    )
    run_rlhf(*words.split())
    assert_nothing_left(output)
    return output


def sample_rows(run: Path) -> list[dict]:
    return [json.loads(line) for line in (run / "samples.jsonl").open()]


def test_rewards_are_the_scores_of_the_reward_model(folder, run):
    """Recompute the scores from text with transformers, for responses whose text encodes to the same tokens."""
    tokenizer = AutoTokenizer.from_pretrained(folder / "rm" / "model")
    model = AutoModelForSequenceClassification.from_pretrained(folder / "rm" / "model", dtype=torch.float32)
    model.config.pad_token_id = None  # otherwise transformers looks for the last token before the padding
    checked = []
    for row in sample_rows(run):
        response = tokenizer(row["response"], add_special_tokens=False).input_ids
        response += [tokenizer.eos_token_id] if row["finish_reason"] == "stop" else []
        if len(response) != row["length"] or not row["response"].isdigit():
            continue
        prompt = tokenizer(row["prompt"], add_special_tokens=False).input_ids
        with torch.no_grad():
            score = model(input_ids=torch.tensor([prompt + response])).logits.item()
        # compare in raw units: rounding may be a large part of a small spread
        read = row["reward/reward_model"] * model.config.reward_std + model.config.reward_mean
        assert read == pytest.approx(score, abs=1e-6)
        checked.append(row["finish_reason"])
    assert checked.count("stop") >= 3, "too few responses ended to tell where their score is read"
    assert checked.count("length") >= 3, "too few responses were cut to tell where their score is read"


def test_the_score_is_added_to_the_verifiers_and_logged_apart(run):
    rows, metrics = sample_rows(run), plain_metrics(run)
    for row in rows:
        assert row["reward"] == pytest.approx(row["reward/exact"] + WEIGHT * row["reward/reward_model"])
    assert sorted(metrics) == [1, 2]
    for step, of_step in metrics.items():
        mine = rows[16 * (step - 1) : 16 * step]
        assert of_step["reward/reward_model"] == pytest.approx(np.mean([row["reward/reward_model"] for row in mine]))
        assert of_step["reward"] == pytest.approx(np.mean([row["reward"] for row in mine]))
        assert of_step["reward_failed"] == 0.0


def test_a_language_model_is_refused_before_anything_starts(folder):
    words = f"ppo --pretrain {folder}/sft --prompt_data {folder}/sums.jsonl --output {folder}/no"
    said = run_rlhf(*words.split(), "--reward_pretrain", folder / "sft", status=2)
    assert "is Qwen2ForCausalLM, not a sequence-classification model with one label" in said
    assert not (folder / "no").exists()
