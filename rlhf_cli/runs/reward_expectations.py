"""Reads `--expect` of `rlhf data --rewards`: responses with the reward that they must get."""

import json
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from rlhf_cli.data.pictures.marks import TEXT_MARK
from rlhf_cli.data.prompts import Prompt, PromptData
from rlhf_cli.errors import UsageError, listed
from rlhf_cli.rewards.records import Score

_SELECTING = ("row", "prompt", "label")
_Entry = dict[str, object]
_EXAMPLE = '{"label": "42", "response": "The answer is 42.", "reward": 1}'


@dataclass(frozen=True, slots=True)
class Expectation:
    """A response to a prompt, and its expected reward. `where`: line in the file."""

    where: str
    prompt: Prompt
    response: str
    reward: float

    def is_met(self, score: Score) -> bool:
        """Return whether the reward is the expected one, up to rounding."""
        return score.value is not None and math.isclose(score.value, self.reward, rel_tol=1e-6, abs_tol=1e-6)


@dataclass(frozen=True, slots=True)
class Missed:
    """An expectation with a different score."""

    expected: Expectation
    score: Score


def read_expectations(path: str, data: PromptData) -> list[Expectation]:
    """Read expectations, whose prompt is selected by `row` (with `source`, for several datasets), `prompt` or `label`.

    A label that the data do not have replaces the first prompt's.

    Raises:
        UsageError: the file cannot be read, or a line is not valid or selects no prompt.
    """
    try:
        lines = Path(path).expanduser().read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"--expect {path} cannot be read: {error}") from error
    select = _selector(data)
    found = [_read(f"{path} line {number}", line, select) for number, line in enumerate(lines, 1) if line.strip()]
    if not found:
        raise UsageError(f"--expect {path} contains no expectations; a line is {_EXAMPLE}")
    return found


def _read(where: str, line: str, select: Callable[[_Entry], Prompt | None]) -> Expectation:
    try:
        entry = json.loads(line)
    except ValueError as error:
        raise UsageError(f"--expect {where} is not JSON ({error}); a line is {_EXAMPLE}") from None
    if fault := _fault(entry):
        raise UsageError(f"--expect {where} {fault}; a line is {_EXAMPLE}")
    prompt = select(entry)
    if prompt is None:
        name = next(name for name in _SELECTING if entry.get(name) is not None)
        raise UsageError(f"--expect {where}: no prompt has this {name}: {str(entry[name])[:100]!r}")
    return Expectation(where, prompt, entry["response"], float(entry["reward"]))


def _fault(entry: object) -> str:
    """Return what is wrong with a line, or ""."""
    if not isinstance(entry, dict):
        return "is not a JSON object"
    if all(entry.get(name) is None for name in _SELECTING):
        return f"selects no prompt: it needs {listed(_SELECTING, 'or')}"
    if not isinstance(entry.get("response"), str):
        return "has no text in 'response'"
    reward = entry.get("reward")
    if isinstance(reward, bool) or not isinstance(reward, int | float) or not math.isfinite(reward):
        return "has no number in 'reward'"
    return ""


def _selector(data: PromptData) -> Callable[[_Entry], Prompt | None]:
    """Return a function that finds the prompt for a line."""
    by_row: dict[tuple[object, object], int] = {}
    by_text: dict[str, int] = {}
    by_label: dict[str | None, int] = {}
    # Backwards, so that the first match wins.
    for place in reversed(range(len(data.prompts))):
        prompt = data.prompts[place]
        by_row[prompt.source, prompt.index] = by_row[None, prompt.index] = place
        by_label[prompt.label] = place
        for text in _texts(data, prompt):
            by_text[text] = place
    return partial(_selected, data, by_row, by_text, by_label)


def _texts(data: PromptData, prompt: Prompt) -> Iterator[str]:
    """Yield the rendered prompt and the row's last message."""
    yield prompt.text
    yield TEXT_MARK.join(data.conversation_of(prompt).messages[-1].pieces)


def _selected(
    data: PromptData,
    by_row: dict[tuple[object, object], int],
    by_text: dict[str, int],
    by_label: dict[str | None, int],
    entry: _Entry,
) -> Prompt | None:
    if (row := entry.get("row")) is not None:
        place = by_row.get((entry.get("source"), row))
    elif isinstance(text := entry.get("prompt"), str):
        place = by_text.get(text)
    else:
        label = str(entry.get("label"))
        if label not in by_label:
            return replace(data.prompts[0], label=label)
        place = by_label[label]
    return None if place is None else data.prompts[place]
