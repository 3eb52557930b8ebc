"""Addition problems for end-to-end trials: small, verifiable, with disjoint splits."""

import json
import random
from pathlib import Path

_LOWEST, _HIGHEST = 10, 99
"""Two-digit operands, so that each digit position has a fixed place value."""
_NUM_HELD_OUT, _NUM_VALIDATION = 500, 200

_ROUNDED_FROM, _ROUNDED_SHARE = 90, 0.7
"""Share of sums from 90 that demonstrations round, so that an imitating model is correct on about a third."""


def write_problems(folder: Path, *, seed: int) -> None:
    """Write train.jsonl, validation.jsonl and held_out.jsonl with the columns `prompt`, `answer` and `demonstration`.

    Splits are disjoint. `answer` is the sum; `demonstration` rounds most larger sums down to tens.
    """
    # A separate generator, so that data depend only on this seed.
    rng = random.Random(seed)
    numbers = range(_LOWEST, _HIGHEST + 1)
    problems = [_problem(a, b, rng) for a in numbers for b in numbers]
    # Shuffle once and cut, so that no problem is in two splits.
    rng.shuffle(problems)
    folder.mkdir(parents=True, exist_ok=True)
    _write(folder / "held_out.jsonl", problems[:_NUM_HELD_OUT])
    _write(folder / "validation.jsonl", problems[_NUM_HELD_OUT : _NUM_HELD_OUT + _NUM_VALIDATION])
    _write(folder / "train.jsonl", problems[_NUM_HELD_OUT + _NUM_VALIDATION :])


def _problem(a: int, b: int, rng: random.Random) -> dict[str, str]:
    answer = a + b
    rounds = answer >= _ROUNDED_FROM and rng.random() < _ROUNDED_SHARE
    return {"prompt": f"{a}+{b}=", "answer": str(answer), "demonstration": str(answer // 10 * 10 if rounds else answer)}


def _write(path: Path, problems: list[dict[str, str]]) -> None:
    path.write_text("".join(json.dumps(problem) + "\n" for problem in problems), encoding="utf-8")
