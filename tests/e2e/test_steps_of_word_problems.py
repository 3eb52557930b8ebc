"""A process reward model finds wrong steps in unseen word problems, and not only by their position.

The problems resemble GSM8K: a question with numbers, and one solution line for each result. A step is labelled right if
its result is correct. Each result is wrong with probability 0.5 at any position, and is then the sum of other numbers,
so that neither the position of a step nor its result alone decides the label.
"""

import json
import random
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from forked import run_rlhf

from rlhf_cli.tracking.sinks import read_metrics

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(1500)]

Row = dict[str, Any]
THINGS = ("apples", "pens", "cups", "eggs", "books", "coins")
SIZE = "--hidden_size 64 --intermediate_size 256 --num_hidden_layers 4 --num_attention_heads 4 --initializer_range 0.1"
OPTIONS = "--train_batch_size 32 --max_epochs 6 --param_dtype fp32 --no_use_tensorboard --zero_stage 0"
STEPS = 1000
MARGIN = 0.3
"""Required lead of the model over guessing from the position or the result alone."""


def amounts(rng: random.Random) -> tuple[int, int]:
    return rng.randrange(1, 10), rng.randrange(1, 10)


def solved(rng: random.Random, *, share_right: float) -> Row:
    """Return a problem, the steps of a solution, and whether each step is right."""
    things = rng.sample(THINGS, rng.randrange(2, 6))
    pairs = [amounts(rng) for _ in things]
    steps, labels = [], []
    for thing, (a, b) in zip(things, pairs, strict=True):
        found, is_right = a + b, rng.random() < share_right
        while not is_right and found == a + b:
            found = sum(amounts(rng))
        steps.append(f"{thing}: {a}+{b}={found}")
        labels.append(is_right)
    prompt = " ".join(f"{a} red and {b} blue {thing}." for thing, (a, b) in zip(things, pairs, strict=True))
    return {"prompt": prompt, "completions": steps, "labels": labels}


def write_rows(path: Path, rows: list[Row]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def position(row: Row, place: int) -> object:
    return place


def result(row: Row, place: int) -> object:
    return row["completions"][place].split("=")[1]


def accuracy_by(fact: Callable[[Row, int], object], train: list[Row], held_out: list[Row]) -> float:
    """Return the accuracy on held-out labels of predicting the most frequent training label for the same fact."""
    seen = Counter((fact(row, place), label) for row in train for place, label in enumerate(row["labels"]))
    guessed = [
        (seen[fact(row, place), True] >= seen[fact(row, place), False]) == label
        for row in held_out
        for place, label in enumerate(row["labels"])
    ]
    return sum(guessed) / len(guessed)


def test_wrong_steps_of_unseen_problems_are_found_beyond_their_position(tmp_path):
    rng = random.Random(0)
    train = [solved(rng, share_right=0.5) for _ in range(6000)]
    asked = {row["prompt"] for row in train}
    held_out = [row for row in (solved(rng, share_right=0.5) for _ in range(400)) if row["prompt"] not in asked]
    right = [solved(rng, share_right=1.0) for _ in range(6000)]
    write_rows(tmp_path / "train.jsonl", train)
    write_rows(tmp_path / "held_out.jsonl", held_out)
    solutions = [{"prompt": row["prompt"], "response": "\n".join(row["completions"])} for row in right]
    write_rows(tmp_path / "solutions.jsonl", solutions)

    run_rlhf(*f"scratch --dataset {tmp_path}/train.jsonl {SIZE} --vocab_size 300 --output {tmp_path}/tiny".split())
    data = f"--dataset {tmp_path}/solutions.jsonl --max_steps 250 --learning_rate 5e-3 --output {tmp_path}/sft"
    run_rlhf(*f"sft --pretrain {tmp_path}/tiny {data} {OPTIONS}".split())
    data = f"--dataset {tmp_path}/train.jsonl --eval_dataset {tmp_path}/held_out.jsonl --output {tmp_path}/prm"
    run_rlhf(*f"prm --pretrain {tmp_path}/sft {data} --max_steps {STEPS} --learning_rate 2e-3 {OPTIONS}".split())

    last = read_metrics(tmp_path / "prm")[STEPS]
    guesses = {fact.__name__: accuracy_by(fact, train, held_out) for fact in (position, result)}
    print(f"accuracy {last['eval/accuracy']:.3f}, F1 of wrong steps {last['eval/wrong_f1']:.3f}, guesses by {guesses}")
    assert max(guesses.values()) < 0.6
    assert last["eval/accuracy"] > max(guesses.values()) + MARGIN
    assert last["eval/wrong_f1"] > 0.7
