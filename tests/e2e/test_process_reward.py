"""End-to-end test of `rlhf prm`: it learns which step is wrong, and resumes exactly."""

import json
import random
import shutil

import pytest
from forked import run_rlhf

from rlhf_cli.data.solution_steps import step_ends
from rlhf_cli.tracking.sinks import read_metrics

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]

SIZE = "--hidden_size 32 --intermediate_size 48 --num_hidden_layers 2 --num_attention_heads 4 --vocab_size 300"
MEASURED = ("time/", "perf/", "memory/")
STEPS = 45


def solution(rng):
    """Return a solution with its labels: a step is right if its digit is above 3."""
    digits = [rng.randrange(10) for _ in range(rng.randrange(1, 5))]
    return {"prompt": "count", "completions": [f"n={d}" for d in digits], "labels": [d > 3 for d in digits]}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Return a folder with a tiny model, training and held-out solutions."""
    folder = tmp_path_factory.mktemp("prm")
    rng = random.Random(0)
    for name, count in (("train", 720), ("held_out", 100)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(solution(rng)) + "\n" for _ in range(count)))
    run_rlhf(*f"scratch --dataset {folder}/train.jsonl {SIZE} --output {folder}/tiny".split())
    run_rlhf(*words(folder, "--save_steps 15"))
    return folder


def words(folder, more, name="run"):
    data = f"--dataset {folder}/train.jsonl --eval_dataset {folder}/held_out.jsonl"
    batch = f"--train_batch_size 32 --max_epochs 2 --max_steps {STEPS} --learning_rate 1e-2 --param_dtype fp32"
    return f"prm --pretrain {folder}/tiny {data} {batch} --no_use_tensorboard --output {folder}/{name} {more}".split()


def kept(folder, name="run"):
    rows = read_metrics(folder / name)
    return [{name: value for name, value in row.items() if not name.startswith(MEASURED)} for row in rows.values()]


def test_a_process_reward_model_learns_which_steps_are_wrong(folder):
    last = kept(folder)[-1]
    assert last["eval/accuracy_low"] > 1 - last["eval/wrong_steps"]
    assert last["eval/wrong_f1"] > 0.8
    assert last["eval/processbench_f1"] > 0.6


def test_a_process_reward_model_chooses_among_samples_in_eval(folder, tmp_path):
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "count", "answer": "7"}\n{"prompt": "count", "answer": "1"}\n')
    out = tmp_path / "out"
    prompts = f"--prompt_data {tmp_path}/prompts.jsonl --reward_funcs gsm8k --max_len 64 --max_new_tokens 24"
    sampling = "--rollout_backend transformers --temperature 1.0 --n_samples_per_prompt 3 --param_dtype fp32"
    models = f"--pretrain {folder}/tiny --prm_pretrain {folder}/run --prm_aggregation min,prod"
    said = run_rlhf(*f"eval {models} {prompts} {sampling} --output {out}".split())
    assert "prm_min@3" in said
    (result,) = json.loads((out / "eval.json").read_text())["results"]
    assert {"prm_min@3", "prm_prod@3", "pass@3"} <= result["figures"].keys()
    rows = [json.loads(line) for line in (out / "samples.jsonl").read_text().splitlines()]
    assert len(rows) == 6
    for row in rows:
        assert all(0 < score < 1 for score in row["step_scores"])
        # Text between two separators is a step even if it is a special token, which the response text omits.
        assert len(row["step_scores"]) >= max(1, len(step_ends(row["response"], "\n")))


def test_steps_of_sampled_responses_are_rewards_in_grpo(folder, tmp_path):
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "count", "answer": "7"}\n{"prompt": "count", "answer": "1"}\n')
    models = f"--pretrain {folder}/tiny --prm_pretrain {folder}/run --prm_weight 0.5 --init_kl_coef 0"
    sampling = "--rollout_backend transformers --n_samples_per_prompt 4 --rollout_batch_size 2 --train_batch_size 8"
    lengths = "--max_len 64 --max_new_tokens 24 --max_iterations 1 --param_dtype fp32 --no_use_tensorboard"
    prompts = f"--prompt_data {tmp_path}/prompts.jsonl --reward_funcs gsm8k"
    said = run_rlhf(*f"grpo {models} {prompts} {sampling} {lengths} --output {tmp_path}/out".split())
    assert "Process reward model" in said
    metrics = read_metrics(tmp_path / "out")[1]
    assert 0 < metrics["step_reward"] < 1
    assert metrics["num_steps"] >= 1
    assert metrics["advantage_abs"] > 0  # all answers are wrong, so only the steps differ


def test_a_run_that_is_continued_ends_with_the_numbers_of_one_that_was_not_stopped(folder):
    expected = kept(folder)
    assert len(expected) == STEPS
    checkpoints = folder / "run" / "checkpoints"
    for path in checkpoints.glob("step_*"):
        if path.name != "step_000015":
            shutil.rmtree(path)
    run_rlhf(*words(folder, "--save_steps 15 --load_checkpoint"))
    assert kept(folder) == expected


def test_two_ranks_at_another_stage_go_on_from_a_checkpoint_of_one(folder):
    shutil.copytree(folder / "run", folder / "by_two")
    shutil.rmtree(folder / "by_two" / "checkpoints" / f"step_{STEPS:06d}")
    said = run_rlhf(*words(folder, "--num_processes 2 --zero_stage 1 --save_steps 15 --load_checkpoint", "by_two"))
    assert "The model resumes with 2 ranks at ZeRO stage 1 from a checkpoint with 1 rank" in " ".join(said.split())
    expected, found = kept(folder), kept(folder, "by_two")
    assert len(found) == STEPS
    for step in (30, 31, 32):  # the first three steps of the two-rank run
        assert found[step] == pytest.approx(expected[step], rel=1e-3, abs=1e-4)
    assert found[-1]["eval/wrong_f1"] == pytest.approx(expected[-1]["eval/wrong_f1"], abs=0.05)
