"""Sums of several four-digit numbers, which a tiny model cannot compute without a tool."""

import json
import random
from collections.abc import Sequence
from pathlib import Path

from rlhf_cli.data.formats.conversations import Tool

_NUM_TERMS, _LOWEST, _HIGHEST = 3, 4_000, 9_999
"""Four-digit terms with five-digit sums: a tiny model copies digits reliably at fixed positions."""
NUM_HELD_OUT, NUM_TRAIN, NUM_DEMONSTRATIONS = 400, 1_000, 6_000

CALL_SHARE = 0.33
"""Share of demonstrations with the tool that call it; the others answer directly."""
UNAIDED_SHARE = 0.25
"""Share of demonstrations without the tool."""
ROUNDED_SHARE = 0.7
"""Share of direct answers that are rounded down to thousands."""


def write_long_sums(folder: Path, tools: Sequence[Tool], *, seed: int) -> None:
    """Write demonstrations.jsonl, train.jsonl and held_out.jsonl with disjoint sums.

    Demonstrations have the columns `messages` and optionally `tools`; the others have `prompt` and `answer`.
    """
    rng = random.Random(seed)
    problems = _different_problems(NUM_HELD_OUT + NUM_TRAIN + NUM_DEMONSTRATIONS, rng)
    folder.mkdir(parents=True, exist_ok=True)
    _write(folder / "held_out.jsonl", problems[:NUM_HELD_OUT])
    _write(folder / "train.jsonl", problems[NUM_HELD_OUT : NUM_HELD_OUT + NUM_TRAIN])
    rows = [_demonstration(problem, list(tools), rng) for problem in problems[NUM_HELD_OUT + NUM_TRAIN :]]
    _write(folder / "demonstrations.jsonl", rows)


def _different_problems(number: int, rng: random.Random) -> list[dict[str, str]]:
    # A dict keeps the order and removes duplicates.
    found: dict[str, str] = {}
    while len(found) < number:
        terms = [rng.randint(_LOWEST, _HIGHEST) for _ in range(_NUM_TERMS)]
        found["+".join(map(str, terms))] = str(sum(terms))
    return [{"prompt": f"{terms}=", "answer": answer} for terms, answer in found.items()]


def _demonstration(problem: dict[str, str], tools: list[Tool], rng: random.Random) -> dict[str, object]:
    asked = {"role": "user", "content": problem["prompt"]}
    sum_ = int(problem["answer"])
    head = sum_ // 1000 * 1000 if rng.random() < ROUNDED_SHARE else sum_
    guess = {"role": "assistant", "content": str(head)}
    if rng.random() < UNAIDED_SHARE:
        return {"messages": [asked, guess]}
    if rng.random() >= CALL_SHARE:
        return {"tools": tools, "messages": [asked, guess]}
    arguments = json.dumps({"terms": problem["prompt"].rstrip("=")})
    call = {"id": "call00000", "type": "function", "function": {"name": "calculate", "arguments": arguments}}
    turns = [
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call00000", "content": problem["answer"]},
        {"role": "assistant", "content": problem["answer"]},
    ]
    return {"tools": tools, "messages": [asked, *turns]}


def _write(path: Path, rows: Sequence[dict[str, object] | dict[str, str]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
