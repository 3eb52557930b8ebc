"""Reads solutions with labeled steps from row columns.

RLHFlow's conversations, in which the assistant answers each step with + or -, are not supported.
"""

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from rlhf_cli.data.formats.conversations import Message, Solution, fault_of_prompt, unmarked
from rlhf_cli.data.formats.marks import fault_of_row_marks
from rlhf_cli.data.reading.columns import (
    PROMPT_COLUMNS,
    Present,
    RowFormat,
    described,
    prompt_reader,
    refuse,
    refuse_half_characters,
    text_of,
    truth,
    with_system,
)
from rlhf_cli.data.reading.json_cells import parsed
from rlhf_cli.data.reading.sources import Row, Source

_STEP_COLUMNS = ("completions", "steps")
_STEP_LABEL_COLUMNS = ("labels", "label")
_MARKED_COLUMNS = ("input", "text", "prompt")
"""Columns for text with a placeholder after each step."""
_MARKED_LABEL_COLUMNS = ("label", "labels", "value")
# Math-Shepherd has no other separation of question and solution.
_FIRST_STEP = re.compile(r"\bStep 1\b")
"""Start of the first step in text that includes the question."""
_RATINGS = {1: 1.0, 0: 1.0, -1: 0.0}
"""PRM800K ratings: a neutral step counts as correct, as in the paper (arXiv 2305.20050)."""

_Labels = tuple[float | None, ...]


@dataclass(frozen=True, slots=True)
class StepColumns:
    """Columns and marker tokens set by the user; None selects columns by name."""

    input_key: str | None
    output_key: str | None
    label_key: str | None
    placeholder_token: str
    reward_tokens: tuple[str, str]


StepFormat = RowFormat[list[Solution]]


def choose_step_format(source: Source, wanted: StepColumns, *, data_format: str) -> StepFormat:
    """Select the solution reader for a source: `data_format`, or by columns for 'auto'.

    Raises:
        UsageError: no format matches the columns, which the message lists.
    """
    present = Present(source, source.columns())
    return _STEP_READERS[_detected(present, wanted) if data_format == "auto" else data_format](present, wanted)


def _detected(present: Present, wanted: StepColumns) -> str:
    first = present.source.row(0)
    # Parse JSON text, which CSV and Parquet files contain.
    label = parsed(first.get(wanted.label_key or "label"))
    if isinstance(label, dict) and "steps" in label:
        return "prm800k"
    steps = wanted.output_key or present.first(_STEP_COLUMNS)
    if steps is not None and isinstance(parsed(first.get(steps)), list):
        # Detect by the label's type: ProcessBench has an index, TRL a list.
        return "processbench" if _is_place(label) else "stepwise"
    marked = wanted.input_key or present.first(_MARKED_COLUMNS)
    if marked is not None and wanted.placeholder_token in str(first.get(marked)):
        return "placeholder"
    raise present.error(
        f"no format fits: expected a list of steps ({', '.join(_STEP_COLUMNS)}; --output_key), a label with steps as "
        f"in PRM800K, or a text with {wanted.placeholder_token!r} after each step (--placeholder_token, --input_key)"
    )


def _is_place(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _stepwise(present: Present, wanted: StepColumns) -> StepFormat:
    prompt, steps, label = _list_columns(present, wanted, _STEP_LABEL_COLUMNS)
    read_prompt = _prompt_reader(prompt, joined=wanted.input_key is None)

    def read(row: Row) -> list[Solution]:
        texts = _texts(row, steps)
        given = parsed(row.get(label))
        if not isinstance(given, list):
            raise row.error(f"column {label!r} is not a list of labels but {described(given, row, label)}")
        return [_solution(row, read_prompt(row), texts, _labels(row, given, wanted.reward_tokens))]

    return StepFormat("stepwise", f"{prompt} -> {steps}, {label}", read)


def _processbench(present: Present, wanted: StepColumns) -> StepFormat:
    """Return a reader for rows labeled with the index of the first wrong step, -1 if all are correct.

    Steps after the first wrong one are unlabeled (arXiv 2412.06559).
    """
    prompt, steps, label = _list_columns(present, wanted, ("label",))
    read_prompt = _prompt_reader(prompt, joined=wanted.input_key is None)

    def read(row: Row) -> list[Solution]:
        texts, place = _texts(row, steps), parsed(row.get(label))
        if not isinstance(place, int) or not _is_place(place) or not -1 <= place < len(texts):
            raise row.error(
                f"column {label!r} is not the place of a step, 0 to {len(texts) - 1}, nor -1 but "
                f"{described(place, row, label)}"
            )
        known = texts if place < 0 else texts[:place]
        labels: list[float | None] = [1.0 for _ in known]
        # The first wrong step is labeled 0, and the steps after it are unknown.
        labels += [] if place < 0 else [0.0] + [None] * (len(texts) - place - 1)
        return [_solution(row, read_prompt(row), texts, labels)]

    return StepFormat("processbench", f"{prompt} -> {steps}, first error {label}", read)


def _list_columns(present: Present, wanted: StepColumns, labels: tuple[str, ...]) -> tuple[str, str, str]:
    prompt = present.named(wanted.input_key, "input_key")
    prompt = prompt or present.only(PROMPT_COLUMNS, "the prompt", "input_key")
    steps = present.named(wanted.output_key, "output_key") or present.first(_STEP_COLUMNS)
    label = present.named(wanted.label_key, "label_key") or present.first(labels)
    if prompt is None:
        raise present.error(f"no column for the prompt ({', '.join(PROMPT_COLUMNS)}): set --input_key")
    if steps is None:
        raise present.error(f"no column for the steps ({', '.join(_STEP_COLUMNS)}): set --output_key")
    if label is None:
        raise present.error(f"no column for the labels ({', '.join(labels)}): set --label_key")
    return prompt, steps, label


def _prompt_reader(column: str, *, joined: bool) -> Callable[[Row], tuple[Message, ...]]:
    plain = prompt_reader(column, joined=joined)

    def read(row: Row) -> tuple[Message, ...]:
        prompt = plain(row)
        refuse(row, fault_of_prompt(prompt))
        return prompt

    return read


def _prm800k(present: Present, wanted: StepColumns) -> StepFormat:
    label = present.named(wanted.label_key, "label_key") or present.named("label", "label_key")
    problem = present.named(wanted.input_key or "question.problem", "input_key")
    assert label is not None
    assert problem is not None

    def read(row: Row) -> list[Solution]:
        prompt = with_system((Message("user", text_of(row, problem)),), row)
        rated = parsed(row.get(label))
        steps = rated.get("steps") if isinstance(rated, dict) else None
        if not isinstance(steps, list) or not steps:
            raise row.error(f"column {label!r} is not an object with rated steps but {described(rated, row, label)}")
        paths = _rated_paths(row, steps)
        if not paths:
            raise row.error("no step has a rating")
        return [_solution(row, prompt, [text for text, _ in path], [rate for _, rate in path]) for path in paths]

    return StepFormat("prm800k", f"{problem} -> {label}.steps", read)


_Path = list[tuple[str, float | None]]


def _rated_paths(row: Row, steps: list[Any]) -> list[_Path]:
    """Return the labeled solution, and one path per rated alternative step.

    Such a path is the solution up to that point without labels, followed by the alternative.
    """
    solution: _Path = []
    others: list[_Path] = []
    for number, step in enumerate(steps, start=1):
        rated = _completions(row, number, step)
        before: _Path = [(text, None) for text, _ in solution]
        chosen = _chosen(row, number, step, rated)
        # Unrated alternatives teach nothing.
        others += [[*before, other] for place, other in enumerate(rated) if place != chosen and other[1] is not None]
        human = _human_text(step) if chosen is None else None
        if human is not None:
            solution.append((human, 1.0))  # humans wrote a correct step if all completions were wrong
        elif chosen is not None:
            solution.append(rated[chosen])
        else:
            break
    return [path for path in [solution, *others] if any(label is not None for _, label in path)]


def _completions(row: Row, number: int, step: object) -> _Path:
    listed = step.get("completions") if isinstance(step, dict) else None
    if not isinstance(listed, list):
        raise row.error(f"step {number} has no list of completions")
    found: _Path = []
    for entry in listed:
        text, rating = (entry.get(key) if isinstance(entry, dict) else None for key in ("text", "rating"))
        if not isinstance(text, str) or not (rating is None or (_is_place(rating) and rating in _RATINGS)):
            raise row.error(f"step {number}: {entry!r:.80} is not a text with a rating of -1, 0, 1 or null")
        found.append((text, None if rating is None else _RATINGS[rating]))
    return found


def _chosen(row: Row, number: int, step: dict[str, Any], rated: _Path) -> int | None:
    """Return the index of the completion in the solution, None for a human-written step.

    Phase 2 labeling stops at the first error without a choice: the solution's own step is the first completion.
    """
    chosen = step.get("chosen_completion")
    if chosen is None:
        return 0 if rated and _human_text(step) is None else None
    if not isinstance(chosen, int) or not 0 <= chosen < len(rated):
        raise row.error(f"step {number} has chosen_completion {chosen!r} of {len(rated)} completions")
    return chosen


def _human_text(step: dict[str, Any]) -> str | None:
    human = step.get("human_completion")
    text = human.get("text") if isinstance(human, dict) else human
    return text if isinstance(text, str) and text.strip() else None


def _placeholder(present: Present, wanted: StepColumns) -> StepFormat:
    """Return a reader for text with a placeholder after each step.

    Labels are the same text with reward tokens as placeholders (Math-Shepherd), or a list of reward tokens or numbers
    (OpenRLHF).
    """
    text = present.named(wanted.input_key, "input_key") or present.first(_MARKED_COLUMNS)
    left = tuple(name for name in _MARKED_LABEL_COLUMNS if name != text)
    label = present.named(wanted.label_key, "label_key") or present.first(left)
    if text is None:
        raise present.error(f"no column for the marked text ({', '.join(_MARKED_COLUMNS)}): set --input_key")
    if label is None:
        raise present.error(f"no column for the labels ({', '.join(left)}): set --label_key")

    def read(row: Row) -> list[Solution]:
        pieces = text_of(row, text).split(wanted.placeholder_token)
        if len(pieces) == 1:
            # Without a placeholder the whole text would be one step.
            raise row.error(f"column {text!r} has no {wanted.placeholder_token!r} (--placeholder_token)")
        if pieces[-1].strip():
            raise row.error(f"column {text!r} has text after its last {wanted.placeholder_token!r}")
        prompt, first = _parted(row, pieces[0])
        given = parsed(row.get(label))
        listed = given if isinstance(given, list) else _tokens_between(row, label, pieces, wanted)
        # Placeholders are surrounded by spaces, which are not part of steps.
        steps = [step.strip() for step in (first, *pieces[1:-1])]
        messages = with_system((Message("user", prompt),), row)
        return [_solution(row, messages, steps, _labels(row, listed, wanted.reward_tokens))]

    return StepFormat("placeholder", f"{text} with {wanted.placeholder_token}, {label}", read)


def _parted(row: Row, text: str) -> tuple[str, str]:
    """Split the text before the first placeholder into question and first step."""
    start = _FIRST_STEP.search(text)
    # Without "Step 1", the question ends at its last question mark.
    place = start.start() if start else text.rfind("?") + 1
    question, step = text[:place].strip(), text[place:].strip()
    if not question or not step:
        raise row.error(
            "the start of the first step is unclear without 'Step 1' or a question mark: use rows with "
            "prompt, completions and labels instead"
        )
    return question, step


def _tokens_between(row: Row, column: str, pieces: Sequence[str], wanted: StepColumns) -> list[str]:
    """Return the reward tokens between the pieces of the text's labeled copy."""
    rest, found = text_of(row, column), []
    # Compare the copies piece by piece, because steps may contain + or -.
    for number, piece in enumerate(pieces[:-1], start=1):
        token = next((token for token in wanted.reward_tokens if rest.startswith(piece + token)), None)
        if token is None:
            raise row.error(
                f"column {column!r} does not have {' or '.join(wanted.reward_tokens)} (--reward_tokens) after step "
                f"{number}, or has another step: {rest[: len(piece) + 10]!r:.80}"
            )
        found.append(token)
        rest = rest[len(piece + token) :]
    return found


def _texts(row: Row, column: str) -> list[str]:
    listed = parsed(row.get(column))
    if not isinstance(listed, list) or not all(isinstance(text, str) for text in listed):
        raise row.error(f"column {column!r} is not a list of texts but {described(listed, row, column)}")
    return listed


def _labels(row: Row, given: Sequence[object], reward_tokens: tuple[str, str]) -> list[float | None]:
    right, wrong = reward_tokens
    values = {right: 1.0, wrong: 0.0}
    labels: list[float | None] = []
    for number, label in enumerate(given, start=1):
        value = values.get(label.strip()) if isinstance(label, str) else None
        # Reward tokens first, because they may look like numbers.
        value = _number(label) if value is None else value
        if value is None and label is not None:
            raise row.error(
                f"step {number} has the label {label!r:.40}, which is not true, false, a number from 0 to 1, null, "
                f"{right} or {wrong} (--reward_tokens)"
            )
        labels.append(value)
    return labels


def _number(label: object) -> float | None:
    """Return a label as probability of being correct, None for other values."""
    is_right = truth(label)
    if is_right is not None:
        return float(is_right)
    if isinstance(label, float) and math.isfinite(label) and 0 <= label <= 1:
        return label
    return None


def _solution(row: Row, prompt: tuple[Message, ...], steps: Sequence[str], labels: Sequence[float | None]) -> Solution:
    # Steps have labels of their own, and row markers cannot be combined with them.
    refuse(row, fault_of_row_marks(row))
    if len(steps) != len(labels):
        raise row.error(f"{len(steps)} steps have {len(labels)} labels")
    if not steps:
        raise row.error("the solution has no steps")
    empty = next((number for number, step in enumerate(steps, start=1) if not step.strip()), None)
    if empty is not None:
        raise row.error(f"step {empty} is empty")
    for step in steps:
        refuse_half_characters(row, step)
    # Chat templates strip responses, which would shift the step positions.
    texts = list(steps)
    texts[0] = texts[0].lstrip()
    texts[-1] = texts[-1].rstrip()
    return Solution(unmarked(prompt), tuple(texts), tuple(labels))


_STEP_READERS: dict[str, Callable[[Present, StepColumns], StepFormat]] = {
    "stepwise": _stepwise,
    "placeholder": _placeholder,
    "prm800k": _prm800k,
    "processbench": _processbench,
}
"""Readers by format name."""
