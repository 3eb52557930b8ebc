"""The converter of the examples: published solutions of word problems as preference pairs."""

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from rlhf_cli.config.data import PreferenceDataConfig
from rlhf_cli.config.model import ModelConfig
from rlhf_cli.data.preference_data import load_pairs
from rlhf_cli.models.loading import load_tokenizer
from rlhf_cli.rewards.code_tests import AssertTests, FunctionTests, StdinTests, parse_tests

SCRIPT = Path(__file__).parents[1] / "examples" / "scripts" / "gsm8k_pairs.py"


def solution(text: str, is_correct: bool) -> dict:
    return {"solution": text, "is_correct": is_correct}


def write(path: Path, rows: list[dict]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def convert(folder: Path, rows: list[dict]) -> tuple[list[dict], list[dict]]:
    """(training pairs, evaluation pairs) of the script."""
    source = write(folder / "solutions.jsonl", rows)
    files = [folder / "train.jsonl", folder / "eval.jsonl"]
    subprocess.run([sys.executable, str(SCRIPT), str(source), *map(str, files)], check=True, capture_output=True)
    train, evaluation = ([json.loads(line) for line in file.open()] for file in files)
    return train, evaluation


def test_every_right_solution_meets_every_wrong_one_of_its_question(tmp_path):
    row = {
        "question": "2 + 3?",
        "ground_truth": "A: 5",
        "small": solution("2 + 3 is 5\nA: 5", True),
        "large": solution("five\nA: 5", True),
        "same": solution("five\nA: 5", True),
        "wrong": solution("A: B\nA: 6", False),
    }
    train, evaluation = convert(tmp_path, [row])
    assert train + evaluation == [
        {"prompt": "2 + 3?", "chosen": "2 + 3 is 5\n#### 5", "rejected": "#### B\n#### 6"},
        {"prompt": "2 + 3?", "chosen": "five\n#### 5", "rejected": "#### B\n#### 6"},
    ]


def test_no_question_is_in_both_files_and_one_without_a_contrast_in_neither(tmp_path):
    rows = [
        {"question": f"{number} + 1?", "a": solution(f"A: {number + 1}", True), "b": solution("A: 0", number % 5 == 0)}
        for number in range(200)
    ]
    train, evaluation = convert(tmp_path, rows + rows[:50])
    questions = [{pair["prompt"] for pair in pairs} for pairs in (train, evaluation)]
    assert not questions[0] & questions[1]
    assert questions[0] | questions[1] == {row["question"] for number, row in enumerate(rows) if number % 5}
    assert 5 < len(questions[1]) < 30


def test_the_pairs_are_read_by_the_program(tmp_path, tiny_model_dir):
    rows = [{"question": f"{n}?", "a": solution("A: 1", True), "b": solution("A: 2", False)} for n in range(20)]
    convert(tmp_path, rows)
    config = PreferenceDataConfig(dataset=str(tmp_path / "train.jsonl"), max_len=64)
    tokenizer = load_tokenizer(ModelConfig(pretrain=tiny_model_dir))
    pairs = load_pairs(config, tokenizer, dataset=config.dataset, split="train", seed=0)
    assert len(pairs.pairs) > 10


def test_wrong_usage_is_told(tmp_path):
    done = subprocess.run([sys.executable, str(SCRIPT), str(tmp_path)], capture_output=True, text=True)
    assert done.returncode == 1
    assert "usage: " in done.stderr


@pytest.mark.parametrize("name", sorted(path.name for path in SCRIPT.parent.glob("*.sh")))
def test_scripts_are_valid_shell_and_say_what_they_need(name):
    script = str(SCRIPT.parent / name)
    assert subprocess.run(["bash", "-n", script], check=False).returncode == 0
    done = subprocess.run(["bash", script], capture_output=True, text=True)
    assert done.returncode != 0
    assert "usage: " in done.stderr


def test_the_tasks_of_code_rl_have_tests_that_can_be_used(tmp_path):
    """With a stand-in for `rlhf`, which notes how it is called."""
    (tmp_path / "rlhf").write_text('#!/bin/sh\necho "$@" >> "$CALLS"\n')
    (tmp_path / "rlhf").chmod(0o755)
    environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "CALLS": str(tmp_path / "calls")}
    script = str(SCRIPT.parent / "code_rl.sh")
    subprocess.run(["bash", script, "MODEL", str(tmp_path / "run")], check=True, env=environment)
    rows = [json.loads(line) for line in (tmp_path / "run" / "tasks.jsonl").open()]
    assert len({row["prompt"] for row in rows}) == 20
    kinds = Counter(type(parse_tests(row["label"])) for row in rows)
    assert kinds == {FunctionTests: 10, StdinTests: 5, AssertTests: 5}
    calls = (tmp_path / "calls").read_text().splitlines()
    assert [call.split()[0] for call in calls] == ["grpo", "eval"]
    assert all("--reward_funcs code(timeout=5, memory_mb=512) " in call for call in calls)
