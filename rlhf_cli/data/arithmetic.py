"""Addition problems for trying the whole pipeline: small, verifiable, and split without overlap."""

import json
import random
from pathlib import Path

LOWEST, HIGHEST = 10, 99
"""Operands have two digits each, so that digits of the same value always stand at the same place."""
NUM_HELD_OUT, NUM_VALIDATION = 500, 200


def write_problems(folder: Path, *, seed: int) -> None:
    """Write train.jsonl, validation.jsonl and held_out.jsonl with columns `prompt` and `answer`.

    Every problem is in exactly one of them.
    """
    numbers = range(LOWEST, HIGHEST + 1)
    problems = [(a, b) for a in numbers for b in numbers]
    random.Random(seed).shuffle(problems)
    folder.mkdir(parents=True, exist_ok=True)
    _write(folder / "held_out.jsonl", problems[:NUM_HELD_OUT])
    _write(folder / "validation.jsonl", problems[NUM_HELD_OUT : NUM_HELD_OUT + NUM_VALIDATION])
    _write(folder / "train.jsonl", problems[NUM_HELD_OUT + NUM_VALIDATION :])


def _write(path: Path, problems: list[tuple[int, int]]) -> None:
    lines = [json.dumps({"prompt": f"{a}+{b}=", "answer": str(a + b)}) for a, b in problems]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
