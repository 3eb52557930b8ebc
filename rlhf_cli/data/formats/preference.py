"""Reads preference pairs and labeled responses from row columns.

Scores are not converted to margins. Several labeled responses in one row are not supported: use one row per response.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

from rlhf_cli.data.formats.conversations import (
    Labelled,
    Message,
    Preference,
    fault_of_example,
    fault_of_prompt,
    num_common,
    unmarked,
)
from rlhf_cli.data.formats.marks import fault_of_marks, fault_of_row_marks, marked_by_row
from rlhf_cli.data.formats.tools import tools_of
from rlhf_cli.data.formats.transcripts import is_transcript, prompt_of_transcript, turns_of_transcript
from rlhf_cli.data.reading.columns import (
    MESSAGE_COLUMNS,
    PROMPT_COLUMNS,
    RESPONSE_COLUMNS,
    ROLES,
    Present,
    RowFormat,
    described,
    dialogue_of,
    keys_of,
    messages_of,
    prompt_reader,
    refuse,
    text_of,
    truth,
    with_system,
)
from rlhf_cli.data.reading.sources import Row, Source

_CHOSEN_COLUMN, _REJECTED_COLUMN = "chosen", "rejected"
_MARGIN_COLUMN, _LABEL_COLUMN = "margin", "label"

PROMPT_APART = {"explicit_prompt": True, "shared_prompt": False}
"""Pair formats, and whether the prompt has a separate column."""

_Turns = tuple[Message, ...]
PairFormat = RowFormat[Preference]
LabelledFormat = RowFormat[list[Labelled]]
"""A pair gives two labeled responses, the chosen one first."""


@dataclass(frozen=True, slots=True)
class PairColumns:
    """Columns set by the user; None selects them by name."""

    input_key: str | None
    chosen_key: str | None = None
    rejected_key: str | None = None
    output_key: str | None = None
    label_key: str | None = None


def choose_pair_format(source: Source, wanted: PairColumns, *, data_format: str) -> PairFormat:
    """Select the pair reader for a source: by `PROMPT_APART`, or by columns for 'auto'.

    Raises:
        UsageError: no format matches the columns, which the message lists.
    """
    return _pairs(Present(source, source.columns()), wanted, data_format)


def choose_labelled_format(source: Source, wanted: PairColumns, *, data_format: str) -> LabelledFormat:
    """Select the labeled response reader for a source: 'unpaired', 'preference', or by columns for 'auto'.

    Raises:
        UsageError: no format matches the columns, which the message lists.
    """
    present = Present(source, source.columns())
    # Explicit settings win over detection.
    if data_format == "preference" or (data_format == "auto" and _has_pairs(present, wanted)):
        pairs = _pairs(present, wanted, "auto")
        return LabelledFormat("preference", pairs.columns, lambda row: _both(pairs.read(row)))
    return _unpaired(present, wanted)


def _has_pairs(present: Present, wanted: PairColumns) -> bool:
    if wanted.label_key or wanted.output_key:
        return False
    both_there = {_CHOSEN_COLUMN, _REJECTED_COLUMN} <= set(present.names)
    return both_there or wanted.chosen_key is not None or wanted.rejected_key is not None


def _both(pair: Preference) -> list[Labelled]:
    sides = ((pair.chosen, True), (pair.rejected, False))
    return [Labelled(pair.prompt, response, desirable, pair.tools) for response, desirable in sides]


def _pairs(present: Present, wanted: PairColumns, data_format: str) -> PairFormat:
    chosen = present.named(wanted.chosen_key, "chosen_key") or present.first((_CHOSEN_COLUMN,))
    rejected = present.named(wanted.rejected_key, "rejected_key") or present.first((_REJECTED_COLUMN,))
    if chosen is None or rejected is None:
        side = "chosen" if chosen is None else "rejected"
        raise present.error(f"no column for the {side} response ({side}): set --{side}_key")
    apart = PROMPT_APART.get(data_format)
    # With `auto`, the first row decides whether prompts are separate.
    alone = _are_whole(present, wanted, (chosen, rejected)) if apart is None else not apart
    prompt = None if alone else _prompt_column(present, wanted, used=(chosen, rejected))
    if prompt is None and apart:
        raise present.error(f"no column for the prompt ({', '.join(PROMPT_COLUMNS)}): set --input_key")
    read_prompt = _reader_of_prompt(prompt, joined=wanted.input_key is None)

    def read(row: Row) -> Preference:
        for column in (chosen, rejected) if apart is not None else ():
            refuse(row, _fault_of_side(row, column, data_format))
        # Columns with the texts are not markers, even if they are named like one.
        refuse(row, fault_of_row_marks(row, (chosen, rejected, prompt or chosen)))
        sides = [_conversation(row, column, read_prompt) for column in (chosen, rejected)]
        return _preference(row, sides[0], sides[1], (chosen, rejected))

    columns = f"{chosen}, {rejected}" if prompt is None else f"{prompt} -> {chosen}, {rejected}"
    return PairFormat("", columns + (f", margin {_MARGIN_COLUMN}" if _MARGIN_COLUMN in present.names else ""), read)


def _unpaired(present: Present, wanted: PairColumns) -> LabelledFormat:
    label = present.named(wanted.label_key, "label_key") or present.first((_LABEL_COLUMN,))
    if label is None:
        raise present.error(
            f"no column of labels, desirable or not ({_LABEL_COLUMN}): set --label_key, "
            "or use pairs in columns chosen and rejected"
        )
    response = present.named(wanted.output_key, "output_key")
    # A column selected as label or prompt is not the response.
    left = tuple(name for name in RESPONSE_COLUMNS if name not in (label, wanted.input_key))
    response = response or present.only(left, "the response", "output_key")
    if response is None:
        # Without a response column, the last message of a conversation is the response.
        response = present.named(wanted.input_key, "input_key") or present.first(MESSAGE_COLUMNS)
        prompt = None
    else:
        alone = _are_whole(present, wanted, (response,))
        prompt = None if alone else _prompt_column(present, wanted, used=(response, label))
    if response is None:
        raise present.error(
            f"no column for the response ({', '.join(RESPONSE_COLUMNS)}; {', '.join(MESSAGE_COLUMNS)}): set "
            "--output_key, or a conversation with --input_key"
        )
    read_prompt = _reader_of_prompt(prompt, joined=wanted.input_key is None)

    def read(row: Row) -> list[Labelled]:
        turns = _conversation(row, response, read_prompt)
        refuse(row, fault_of_example(turns))
        turns = marked_by_row(row, turns, (response, label))
        refuse(row, fault_of_marks(turns[-1:]))
        return [Labelled(unmarked(turns[:-1]), turns[-1:], _truth(row, label), tools_of(row))]

    columns = response if prompt is None else f"{prompt} -> {response}"
    return LabelledFormat("unpaired", f"{columns}, label {label}", read)


def _prompt_column(present: Present, wanted: PairColumns, *, used: tuple[str, ...]) -> str | None:
    named = present.named(wanted.input_key, "input_key")
    candidates = tuple(name for name in PROMPT_COLUMNS if name not in used)
    left = tuple(name for name in MESSAGE_COLUMNS if name not in used)
    return named or present.only(candidates, "the prompt", "input_key") or present.first(left)


def _reader_of_prompt(column: str | None, *, joined: bool) -> Callable[[Row], _Turns]:
    """Return a prompt reader that also supports hh-style transcripts."""
    plain = prompt_reader(column, joined=joined) if column is not None else None

    def read(row: Row) -> _Turns:
        if plain is None or column is None:
            raise row.error(
                f"no prompt: a single response requires a prompt column ({', '.join(PROMPT_COLUMNS)}) or --input_key"
            )
        text = row.get(column)
        # hh-style transcripts contain the whole prompt in one text.
        prompt = with_system(prompt_of_transcript(text), row) if is_transcript(text) else plain(row)
        refuse(row, fault_of_prompt(prompt))
        return prompt

    return read


def _are_whole(present: Present, wanted: PairColumns, columns: tuple[str, ...]) -> bool:
    """Return whether the first row's cells are conversations that include the prompt. Raises UsageError if a prompt
    column is set too.
    """
    first = present.source.row(0)
    whole = all(_is_whole(first.get(column)) for column in columns)
    if whole and wanted.input_key is not None:
        raise present.error(
            f"{' and '.join(columns)} contain full conversations, whose prompt would replace "
            f"{wanted.input_key!r} (--input_key): remove it"
        )
    return whole


def _is_whole(value: object) -> bool:
    """Return whether a cell is a conversation with prompt, instead of only a response."""
    if is_transcript(value):
        return True
    dialogue = dialogue_of(value)
    role = str(dialogue[0].get("role", dialogue[0].get("from", "assistant"))) if dialogue else "assistant"
    # Without roles, a list of messages starts with the response.
    return ROLES.get(role.lower()) != "assistant"


def _fault_of_side(row: Row, column: str, data_format: str) -> str | None:
    """Return why the cell does not match the format setting, or None."""
    whole = _is_whole(row.get(column))
    if whole != PROMPT_APART[data_format]:
        return None
    held = "a conversation with its prompt" if whole else "no conversation with its prompt"
    found = described(row.get(column), row, column)
    return f"column {column!r} holds {held}, but rows are read as {data_format} (--data_format): it is {found}"


def _conversation(row: Row, column: str, read_prompt: Callable[[Row], _Turns]) -> _Turns:
    """Return the conversation that ends with this column's response: the cell, or the prompt followed by the cell."""
    turns = _turns(row, column)
    return read_prompt(row) + turns if turns[0].role == "assistant" else with_system(turns, row)


def _turns(row: Row, column: str) -> _Turns:
    value = row.get(column)
    if dialogue := dialogue_of(value):
        return messages_of(row, column, keys_of(dialogue))
    return turns_of_transcript(value) if is_transcript(value) else (Message("assistant", text_of(row, column)),)


def _preference(row: Row, chosen: _Turns, rejected: _Turns, columns: tuple[str, str]) -> Preference:
    for turns, column in zip((chosen, rejected), columns, strict=True):
        fault = fault_of_example(turns)
        refuse(row, f"{column}: {fault}" if fault else None)
    if chosen == rejected:
        raise row.error(f"{columns[0]} and {columns[1]} are equal")
    # Keep at least one message per side: one conversation may be the start of the other.
    common = min(num_common(chosen, rejected), len(chosen) - 1, len(rejected) - 1)
    if all(message.role == "system" for message in chosen[:common]):
        raise row.error(f"{columns[0]} and {columns[1]} have no common prompt: they start with different questions")
    for turns, column in zip((chosen, rejected), columns, strict=True):
        fault = fault_of_marks(turns[common:])
        refuse(row, f"{column}: {fault}" if fault else None)
    return Preference(unmarked(chosen[:common]), chosen[common:], rejected[common:], _margin(row), tools_of(row))


def _margin(row: Row) -> float | None:
    value = row.get(_MARGIN_COLUMN)
    if value is None or value == "":  # a CSV file has no null
        return None
    try:
        # bool is a subclass of int, but true is not a margin.
        margin = math.nan if isinstance(value, bool) else float(value)
    except (TypeError, ValueError):
        margin = math.nan
    if not math.isfinite(margin):
        raise row.error(f"column {_MARGIN_COLUMN!r} is not a number but {described(value, row, _MARGIN_COLUMN)}")
    return margin


def _truth(row: Row, column: str) -> bool:
    value = row.get(column)
    found = truth(value)
    if found is None:
        raise row.error(f"column {column!r} is neither true nor false (1 nor 0) but {described(value, row, column)}")
    return found
