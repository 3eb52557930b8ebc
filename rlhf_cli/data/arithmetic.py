"""Addition problems for trying the whole pipeline: small, verifiable, and split without overlap."""

import json
import random
from pathlib import Path

LOWEST, HIGHEST = 10, 99
"""Operands have two digits each, so that digits of the same value always stand at the same place."""
NUM_HELD_OUT, NUM_VALIDATION = 500, 200

ROUNDED_FROM, ROUNDED_SHARE = 90, 0.7
"""Demonstrations round this share of the sums from this one on: a model that imitates them is right on a third."""


def write_problems(folder: Path, *, seed: int) -> None:
    """Write train.jsonl, validation.jsonl and held_out.jsonl with columns `prompt`, `answer` and `demonstration`.

    Every problem is in exactly one of them. `answer` is the sum; `demonstration` is what somebody wrote down who
    rounds most of the larger sums down to tens.
    """
    rng = random.Random(seed)
    numbers = range(LOWEST, HIGHEST + 1)
    problems = [_problem(a, b, rng) for a in numbers for b in numbers]
    rng.shuffle(problems)
    folder.mkdir(parents=True, exist_ok=True)
    _write(folder / "held_out.jsonl", problems[:NUM_HELD_OUT])
    _write(folder / "validation.jsonl", problems[NUM_HELD_OUT : NUM_HELD_OUT + NUM_VALIDATION])
    _write(folder / "train.jsonl", problems[NUM_HELD_OUT + NUM_VALIDATION :])


def _problem(a: int, b: int, rng: random.Random) -> dict[str, str]:
    answer = a + b
    rounds = answer >= ROUNDED_FROM and rng.random() < ROUNDED_SHARE
    return {"prompt": f"{a}+{b}=", "answer": str(answer), "demonstration": str(answer // 10 * 10 if rounds else answer)}


def _write(path: Path, problems: list[dict[str, str]]) -> None:
    path.write_text("".join(json.dumps(problem) + "\n" for problem in problems), encoding="utf-8")
