"""End-to-end tests of `rlhf distill` and `rlhf gkd`: exact resume, and a student that reaches its teacher on sums."""

import json
import random
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from bpe_tokenizers import bpe
from distill_training import save_teacher
from forked import run_rlhf
from safetensors.torch import load_file

from rlhf_cli.tracking.sinks import read_metrics

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]

WORDS = (
    *("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve"),
    *("thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen"),
)
MEASURED = ("time/", "perf/", "memory/")


def metrics_of(run: Path) -> dict[int, dict[str, Any]]:
    return {
        step: {name: value for name, value in found.items() if not name.startswith(MEASURED)}
        for step, found in read_metrics(run).items()
    }


def test_a_continued_run_ends_as_one_that_was_never_stopped(tmp_path, tiny_model_dir, tiny_llama_dir):
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps({"prompt": f"{n}+1=", "response": str(n + 1)}) + "\n" for n in range(40)))
    words = (
        f"distill --pretrain {tiny_model_dir} --teacher_pretrain {tiny_llama_dir} --dataset {rows} "
        f"--eval_dataset {rows} --train_batch_size 8 --max_epochs 1 --learning_rate 1e-2 --lr_scheduler constant "
        "--beta 0.5 --kd_coef 0.8 --teacher_zero_stage 3 --lora_rank 4 --lora_dropout 0.1 --no_use_tensorboard"
    ).split()
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    run_rlhf(*words, "--output", whole)
    run_rlhf(*words, "--output", stopped, "--save_steps", 3)
    assert sorted(path.name for path in (stopped / "checkpoints").glob("step_*")) == ["step_000003", "step_000005"]
    shutil.rmtree(stopped / "checkpoints" / "step_000005")
    run_rlhf(*words, "--output", stopped, "--save_steps", 3, "--load_checkpoint")
    assert metrics_of(stopped) == metrics_of(whole)
    printed = run_rlhf("why", stopped, "--sample", "rows.jsonl:7")
    assert "trained     '7<|im_end|>" in printed
    assert "Equal to the run: all " in printed
    last, first = metrics_of(whole)[5], metrics_of(whole)[1]
    assert last["eval/loss"] < first["loss"]
    assert last["eval/loss"] == pytest.approx(0.8 * last["eval/divergence"] + 0.2 * last["eval/nll"], rel=1e-5)
    weights, others = (load_file(run / "model" / "adapter_model.safetensors") for run in (stopped, whole))
    assert weights.keys() == others.keys()
    assert all(torch.equal(weights[name], others[name]) for name in weights)


@pytest.mark.slow
def test_a_student_of_half_the_width_reaches_its_teacher_on_sums(tmp_path):
    """Half of the rows have random answers, which SFT would learn; the teacher's distributions are right."""
    rng = random.Random(0)
    sums = [(a, b) for a in range(10) for b in range(10)]
    right = [{"prompt": f"{a}+{b}=", "response": str(a + b)} for a, b in sums]
    mixed = [row if rng.random() < 0.5 else row | {"response": str(rng.randrange(19))} for row in right]
    for name, rows in (("right", right), ("mixed", mixed)):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    def run(words: str) -> None:
        run_rlhf(*words.replace("@", f"{tmp_path}/").split())

    shape = "--vocab_size 300 --num_hidden_layers 2 --num_attention_heads 4 --num_key_value_heads 2"
    for name, width in (("wide", 64), ("narrow", 32)):
        size = f"--hidden_size {width} --intermediate_size {2 * width} --initializer_range {0.6 / width**0.5}"
        run(f"scratch --dataset @right.jsonl --output @{name} {shape} {size}")
    common = "--max_len 32 --train_batch_size 50 --param_dtype fp32 --learning_rate 5e-3 --no_use_tensorboard"
    run(f"sft --pretrain @wide --dataset @right.jsonl --max_epochs 100 --output @teacher {common}")
    learn = f"--pretrain @narrow --dataset @mixed.jsonl --max_epochs 200 {common}"
    run(f"distill --teacher_pretrain @teacher {learn} --eval_dataset @right.jsonl --output @student")
    run(f"sft {learn} --output @imitator")
    run(
        "eval --pretrain @teacher/model,@student/model,@imitator/model --prompt_data @right.jsonl --label_key response "
        "--reward_funcs exact --rollout_backend transformers --param_dtype fp32 --max_len 32 --max_new_tokens 4 "
        "--output @answers"
    )
    results = json.loads((tmp_path / "answers" / "eval.json").read_text())["results"]
    teacher, student, imitator = (result["figures"]["accuracy"]["value"] for result in results)
    assert teacher == 1.0
    assert student >= 0.9
    assert imitator < 0.7


@pytest.fixture(scope="module")
def across(tmp_path_factory) -> tuple[list[str], Path]:
    """Return the command line and the folder of a run with a teacher of another tokenizer and chat template."""
    folder = tmp_path_factory.mktemp("across")
    rows = folder / "rows.jsonl"
    words = [WORDS[number % 19] for number in range(40)]
    rows.write_text("".join(json.dumps({"prompt": f"{n}?", "response": word}) + "\n" for n, word in enumerate(words)))
    tokenizers = bpe("teen", "seven"), bpe("seventeen", "thirteen", end="</s>")
    student, teacher = (
        save_teacher(folder / name, vocab_size=len(tokenizer), tokenizer=tokenizer, seed=len(name))
        for name, tokenizer in zip(("student", "its_teacher"), tokenizers, strict=True)
    )
    command = (
        f"gkd --pretrain {student} --teacher_pretrain {teacher} --teacher_tokenizer own --prompt_data {rows} "
        "--lmbda 0.5 --rollout_batch_size 8 --n_samples_per_prompt 2 --train_batch_size 8 --max_iterations 4 "
        "--max_len 64 --max_new_tokens 6 --actor_learning_rate 1e-2 --lr_scheduler constant --save_steps 2 "
        "--rollout_backend transformers --param_dtype fp32 --no_use_tensorboard"
    ).split()
    run_rlhf(*command, "--output", folder / "whole")
    return command, folder / "whole"


def test_a_teacher_of_another_tokenizer_is_compared_at_common_positions(across):
    command, whole = across
    found = metrics_of(whole)
    assert {step: metrics["own_responses"] for step, metrics in found.items()}.keys() == {1, 2, 3, 4}
    aligned = {metrics["own_responses"]: metrics["aligned"] for metrics in found.values()}
    assert 0 < aligned[0.0] < aligned[1.0] <= 1  # an untrained model mostly samples single bytes
    assert found[4]["loss"] != found[1]["loss"]
    rows = [json.loads(line) for line in (whole / "samples.jsonl").open()]
    printed = run_rlhf("why", whole, "--sample", rows[-1]["id"], "--token", "0")
    assert "Equal to the run: all " in printed
    without = [word for word in command if word not in ("--teacher_tokenizer", "own")]
    refused = run_rlhf(*without, "--output", whole.parent / "refused", status=2)
    assert "to compare the texts instead, set --teacher_tokenizer own" in refused
    advantages = " ".join(command).replace("gkd", "grpo", 1).replace("--lmbda 0.5 ", "").split()
    own = ["--reward_funcs", "exact", "--label_key", "response", "--distill_coef", "0.5"]
    run_rlhf(*advantages, *own, "--output", whole.parent / "advantages")
    found = metrics_of(whole.parent / "advantages")
    assert all(0 < metrics["aligned"] <= 1 and metrics["advantage_abs"] > 0 for metrics in found.values())
    *_, last = (whole.parent / "advantages" / "samples.jsonl").open()
    printed = run_rlhf("why", whole.parent / "advantages", "--sample", json.loads(last)["id"], "--token", "0")
    assert "Equal to the run: all " in printed
    assert "the log-probs of the policy and of the teacher, over the text " in printed


@pytest.mark.slow
def test_a_continued_run_across_tokenizers_ends_as_one_that_was_never_stopped(across, tmp_path):
    command, whole = across
    stopped = shutil.copytree(whole, tmp_path / "stopped")
    for part in (stopped / "checkpoints" / "step_000004", stopped / "model"):
        shutil.rmtree(part)
    run_rlhf(*command, "--output", stopped, "--load_checkpoint")
    assert metrics_of(stopped) == metrics_of(whole)


@pytest.mark.slow
def test_a_student_with_shorter_tokens_learns_sums_in_words_from_a_teacher_with_longer_ones(tmp_path):
    """As above, with the sums as words, which are one token of the teacher and up to three of the student."""
    rng = random.Random(0)
    right = [{"prompt": f"{a}+{b}=", "response": WORDS[a + b]} for a in range(10) for b in range(10)]
    mixed = [row if rng.random() < 0.5 else row | {"response": rng.choice(WORDS)} for row in right]
    for name, rows in (("right", right), ("mixed", mixed)):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    def run(words: str) -> None:
        run_rlhf(*words.replace("@", f"{tmp_path}/").split())

    shape = "--num_hidden_layers 2 --num_attention_heads 4 --num_key_value_heads 2"
    for name, width, size in (("wide", 64, 340), ("narrow", 32, 300)):
        sizes = f"--hidden_size {width} --intermediate_size {2 * width} --initializer_range {0.6 / width**0.5}"
        run(f"scratch --dataset @right.jsonl --output @{name} --vocab_size {size} {shape} {sizes}")
    common = "--max_len 48 --train_batch_size 50 --param_dtype fp32 --learning_rate 5e-3 --no_use_tensorboard"
    run(f"sft --pretrain @wide --dataset @right.jsonl --max_epochs 100 --output @teacher {common}")
    learn = f"--pretrain @narrow --dataset @mixed.jsonl --max_epochs 200 {common}"
    run(f"distill --teacher_pretrain @teacher --teacher_tokenizer own {learn} --output @student")
    run(
        "eval --pretrain @teacher/model,@student/model --prompt_data @right.jsonl --label_key response "
        "--reward_funcs exact --rollout_backend transformers --param_dtype fp32 --max_len 48 --max_new_tokens 12 "
        "--output @answers"
    )
    results = json.loads((tmp_path / "answers" / "eval.json").read_text())["results"]
    teacher, student = (result["figures"]["accuracy"]["value"] for result in results)
    assert teacher >= 0.98
    assert student >= 0.7


@pytest.fixture(scope="module")
def mixed(tmp_path_factory, tiny_model_dir, tiny_llama_dir) -> tuple[list[str], Path]:
    """Return the command line and the folder of a run that mixes on-policy and fixed responses of two sources."""
    folder = tmp_path_factory.mktemp("mixed")
    rows = folder / "rows.jsonl"
    sums = [{"prompt": f"{n}+1=", "response": str(n + 1), "data_source": ("even", "odd")[n % 2]} for n in range(40)]
    rows.write_text("".join(json.dumps(row) + "\n" for row in sums))
    by_source = json.dumps({"odd": str(save_teacher(folder / "teacher"))}, separators=(",", ":"))
    words = (
        f"gkd --pretrain {tiny_model_dir} --teacher_pretrain {tiny_llama_dir} --prompt_data {rows} --lmbda 0.5 "
        f"--teacher_by_source {by_source} "
        f"--eval_dataset {rows} --label_key response --reward_funcs exact --eval_steps 2 --beta 0.5 --temperature 0.9 "
        "--rollout_batch_size 8 --n_samples_per_prompt 2 --train_batch_size 8 --num_episodes 2 --max_iterations 6 "
        "--max_len 32 --max_new_tokens 6 --actor_learning_rate 1e-2 --lr_scheduler constant --teacher_zero_stage 3 "
        "--rollout_backend transformers --param_dtype fp32 --save_steps 3 --no_use_tensorboard"
    ).split()
    run_rlhf(*words, "--output", folder / "whole")
    return words, folder / "whole"


def test_a_run_learns_on_own_and_fixed_responses_and_measures_rewards(mixed):
    _, whole = mixed
    found = metrics_of(whole)
    own = [found[step]["own_responses"] for step in range(1, 7)]
    assert set(own[:3]) == set(own[3:]) == {0.0, 1.0}
    assert all(("accuracy" in found[step]) == bool(is_own) for step, is_own in enumerate(own, start=1))
    assert found[6]["forward_kl"] < found[1]["forward_kl"]
    rows = [json.loads(line) for line in (whole / "samples.jsonl").open()]
    printed = run_rlhf("why", whole, "--sample", rows[-1]["id"], "--token", "0")
    assert "Equal to the run: all " in printed
    assert "D = sum beta t log(t / m) + (1 - beta) s log(s / m)" in printed
    assert "share of the gradient norm: g_t . g" in printed
    assert {step for step, metrics in found.items() if "eval/accuracy" in metrics} == {0, 2, 4, 6}
    assert sorted(path.name for path in (whole / "checkpoints").glob("step_*")) == ["step_000003", "step_000006"]


@pytest.mark.slow
def test_a_continued_run_on_own_and_fixed_responses_ends_as_one_that_was_never_stopped(mixed, tmp_path):
    words, whole = mixed
    stopped = shutil.copytree(whole, tmp_path / "stopped")
    for part in (stopped / "checkpoints" / "step_000006", stopped / "model"):
        shutil.rmtree(part)
    run_rlhf(*words, "--output", stopped, "--load_checkpoint")
    assert metrics_of(stopped) == metrics_of(whole)
    weights, others = (load_file(run / "model" / "model.safetensors") for run in (stopped, whole))
    assert all(torch.equal(weights[name], others[name]) for name in weights)
