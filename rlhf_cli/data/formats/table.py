"""Row formats: reading conversations from columns, and detecting the format.

Preference pairs and labeled responses are in `preference`, labeled steps in `steps`.
"""

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rlhf_cli.config.rewards import row_of
from rlhf_cli.data.formats.conversations import (
    Conversation,
    Document,
    fault_of_example,
    fault_of_prompt,
    unmarked,
)
from rlhf_cli.data.formats.marks import fault_of_row_marks, marked_by_row
from rlhf_cli.data.formats.tools import tools_of
from rlhf_cli.data.formats.transcripts import is_transcript, prompt_of_transcript, without_answer
from rlhf_cli.data.reading.columns import (
    MESSAGE_COLUMNS,
    MESSAGE_KEYS,
    PROMPT_COLUMNS,
    RESPONSE_COLUMNS,
    Columns,
    Present,
    RowFormat,
    described,
    dialogue_of,
    format_of,
    messages_of,
    prompt_reader,
    refuse,
    refuse_half_characters,
    response_turn,
    text_of,
    truth,
    with_system,
)
from rlhf_cli.data.reading.sources import Row, Source

_LABEL_COLUMNS = ("label", "answer", "ground_truth", "final_answer", "solution")
_NESTED_LABEL = "reward_model.ground_truth"
"""Ground truth column in verl's rows."""
_TESTS_KEY = "inputs"
"""Key in code tests, which are a label even though they are an object."""

Verifiers = Callable[[Row], Sequence[str]]
"""Names of verifiers that read a row's label."""

Example = Conversation | Document
Format = RowFormat[Example]


@dataclass(frozen=True, slots=True)
class PromptFormat:
    """Readers for a source's prompts and ground truths (None without)."""

    columns: str
    read_prompt: Callable[[Row], Conversation]
    read_label: Callable[[Row], str | None]
    prompt_column: str


def choose_format(source: Source, wanted: Columns, *, data_format: str) -> Format:
    """Select the format of a source's rows: `data_format`, or by columns for 'auto'.

    Raises:
        UsageError: no format matches, a column is missing, or the choice is ambiguous; the message lists the columns.
    """
    present = Present(source, source.columns())
    return FORMATS[_detected(present, wanted) if data_format == "auto" else data_format](present, wanted)


def choose_prompt_format(
    source: Source, wanted: Columns, *, data_format: str, verifiers: Verifiers = lambda row: ()
) -> PromptFormat:
    """Select the prompt and label columns of a source, and the prompt format.

    Prompts are text ('prompt'), messages in either format, or any of these per row ('auto'). For a transcript that ends
    with the assistant's answer, the prompt is the text before the answer.

    Raises:
        UsageError: no format matches the columns, which the message lists.
    """
    present = Present(source, source.columns())
    prompt = _prompt_column(present, wanted, data_format)
    named = present.named(wanted.label_key, "label_key")
    labels = (named,) if named else tuple(name for name in (_NESTED_LABEL, *_LABEL_COLUMNS) if name != prompt)
    read = prompt_reader(prompt, joined=wanted.input_key is None)

    def read_prompt(row: Row) -> Conversation:
        refuse(row, _fault_of_prompt_cell(row, prompt, data_format))
        text = row.get(prompt)
        messages = with_system(without_answer(text), row) if is_transcript(text) else read(row)
        # Check the order first, since markers refer to messages.
        refuse(row, fault_of_prompt(messages) or fault_of_row_marks(row, (prompt, *labels)))
        return Conversation(unmarked(messages), tools_of(row))

    def read_label(row: Row) -> str | None:
        return _label_text(row, labels, required=named is not None, verifiers=verifiers)

    label = present.first(labels)
    # The first row decides only the description; each row is read by its own content.
    shown = f"{prompt} without its last answer" if _is_answered(source.row(0).get(prompt)) else prompt
    columns = shown if label is None else f"{shown}, label {label}"
    return PromptFormat(columns, read_prompt, read_label, prompt)


def _is_answered(value: object) -> bool:
    """Return whether a cell is a transcript that ends with the assistant's answer."""
    return is_transcript(value) and prompt_of_transcript(value) != without_answer(value)


def _prompt_column(present: Present, wanted: Columns, data_format: str) -> str:
    lists = () if data_format == "prompt" else MESSAGE_COLUMNS
    # With an explicit message format, do not look for prompt columns.
    asked = present.first(lists) if data_format in MESSAGE_KEYS else None
    found = present.named(wanted.input_key, "input_key") or asked
    found = found or present.only(PROMPT_COLUMNS, "the prompt", "input_key") or present.first(lists)
    if found is None:
        raise present.error(f"no column for the prompt ({', '.join(PROMPT_COLUMNS + lists)}): --input_key")
    return found


def _fault_of_prompt_cell(row: Row, column: str, data_format: str) -> str | None:
    """Return why the cell does not match the format setting, or None."""
    value = row.get(column)
    dialogue = dialogue_of(value)
    if data_format in ("auto", format_of(dialogue) if dialogue else "prompt"):
        return None
    return f"column {column!r} is read as {data_format} (--data_format), but is {described(value, row, column)}"


def _detected(present: Present, wanted: Columns) -> str:
    """Detect the format from the columns."""
    listed = present.named(wanted.input_key, "input_key") or present.first(MESSAGE_COLUMNS)
    dialogue = dialogue_of(present.source.row(0).get(listed)) if listed else None
    # A response column set by the user means separate prompts.
    if wanted.output_key is None and (dialogue or listed in MESSAGE_COLUMNS):
        return format_of(dialogue) if dialogue else "messages"
    if wanted.input_key or wanted.output_key or (present.first(PROMPT_COLUMNS) and present.first(RESPONSE_COLUMNS)):
        return "prompt_response"
    if "text" in present.names:
        return "text"
    raise present.error(
        "no format fits: expected a prompt and a response "
        f"({', '.join(PROMPT_COLUMNS)}; {', '.join(RESPONSE_COLUMNS)}), messages, conversations or text "
        "(others with --input_key and --output_key)"
    )


def _prompt_response(present: Present, wanted: Columns) -> Format:
    prompt = present.named(wanted.input_key, "input_key")
    prompt = prompt or present.only(PROMPT_COLUMNS, "the prompt", "input_key")
    response = present.named(wanted.output_key, "output_key")
    # A column may serve only one purpose.
    left = tuple(name for name in RESPONSE_COLUMNS if name != prompt)
    response = response or present.only(left, "the response", "output_key")
    if prompt is None:
        raise present.error(f"no column for the prompt ({', '.join(PROMPT_COLUMNS)}): set --input_key")
    if response is None:
        raise present.error(f"no column for the response ({', '.join(RESPONSE_COLUMNS)}): set --output_key")
    read_prompt = prompt_reader(prompt, joined=wanted.input_key is None)

    def read(row: Row) -> Example:
        refuse(row, _fault_of_undesirable(row))
        messages = read_prompt(row) + response_turn(row, response)
        refuse(row, fault_of_example(messages))
        return Conversation(marked_by_row(row, messages, (prompt, response)), tools_of(row))

    return Format("prompt_response", f"{prompt} -> {response}", read)


def _fault_of_undesirable(row: Row) -> str | None:
    """Return why a KTO row is not an example, or None.

    A label of 0 counts as false, like in `rlhf kto`; the message explains what to do if 0 is an answer.
    """
    label = row.get("label")
    if truth(label) is not False:
        return None
    if label is False or not str(label).strip().startswith("0"):
        return "label is false: the response is marked as undesirable; use rlhf kto"
    return "label is 0, which means undesirable (rlhf kto); rename the column if the label is an answer"


def _messages_in(name: str) -> Callable[[Present, Columns], Format]:
    def make(present: Present, wanted: Columns) -> Format:
        column = present.named(wanted.input_key, "input_key") or present.first(MESSAGE_COLUMNS)
        if column is None:
            raise present.error(f"no column with messages ({', '.join(MESSAGE_COLUMNS)}): set --input_key")

        def read(row: Row) -> Example:
            refuse(row, _fault_of_undesirable(row))
            turns = messages_of(row, column, MESSAGE_KEYS[name])
            messages = with_system(turns, row)
            refuse(row, fault_of_example(messages))
            return Conversation(marked_by_row(row, messages, (column,)), tools_of(row))

        return Format(name, column, read)

    return make


def _text(present: Present, wanted: Columns) -> Format:
    column = present.named(wanted.input_key, "input_key") or present.named("text", "input_key")
    assert column is not None

    def read(row: Row) -> Example:
        refuse(row, fault_of_row_marks(row, (column,)))
        return Document(text_of(row, column))

    return Format("text", column, read)


FORMATS: dict[str, Callable[[Present, Columns], Format]] = {
    "prompt_response": _prompt_response,
    "messages": _messages_in("messages"),
    "sharegpt": _messages_in("sharegpt"),
    "text": _text,
}
"""Formats by name."""


def _label_text(row: Row, columns: tuple[str, ...], *, required: bool, verifiers: Verifiers) -> str | None:
    """Return the row's first label column as text: single-element lists are unwrapped, other values are JSON."""
    column = next((name for name in columns if name in row), columns[0])
    value = row.get(column)
    # Some datasets store a single answer as a list.
    if isinstance(value, list) and len(value) == 1:
        value = value[0]
    if value is None and required:
        raise row.error(f"column {column!r} (--label_key) is {described(value, row, column)}")
    if value is None:
        return None
    if isinstance(value, dict | list):
        refuse(row, _fault_of_structure(column, value, verifiers(row)))
    # `default=str` keeps dates and other types of Parquet.
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
    if isinstance(value, float) and not math.isfinite(value):
        raise row.error(f"column {column!r} is {value}, which is not a ground truth")
    refuse_half_characters(row, text)
    return text


def _fault_of_structure(column: str, value: dict[str, object] | list[object], verifiers: Sequence[str]) -> str | None:
    """Return why an object or list is not a label for these verifiers, or None."""
    keys = list(value) if isinstance(value, dict) else []
    inside = next((key for key in _LABEL_COLUMNS if key in keys and _TESTS_KEY not in keys), None)
    if inside is not None:
        return f"column {column!r} is an object that contains the label: set --label_key {column}.{inside}"
    # Compare by type name, as in the table of rewards.
    blind = next((name for name in verifiers if type(value).__name__ not in row_of(name).structured_labels), None)
    if blind is None:
        return None
    cure = f"; --label_key {column}.KEY selects an entry: {', '.join(keys)}" if keys else ""
    return f"column {column!r} is {'an object' if keys else 'a list'}, which {blind} cannot compare with{cure}"
