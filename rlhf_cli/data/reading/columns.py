"""The columns of a source, and how the cells of a row become texts and messages.

Which columns make a format is the business of `formats`.
"""

import json
import math
from collections.abc import Callable
from dataclasses import dataclass

from rlhf_cli.data.formats.conversations import Message, Role
from rlhf_cli.data.formats.marks import marks_of_message, unread_marks
from rlhf_cli.data.formats.tools import tool_calls_of
from rlhf_cli.data.pictures.marks import IMAGE_COLUMNS, content_of_parts
from rlhf_cli.data.reading.json_cells import parsed, records
from rlhf_cli.data.reading.sources import COLUMN_ROWS, Row, Source
from rlhf_cli.errors import UsageError

MESSAGE_COLUMNS = ("messages", "conversations", "conversation")
PROMPT_COLUMNS = ("prompt", "question", "instruction", "query", "problem", "input")
RESPONSE_COLUMNS = ("response", "answer", "output", "completion", "solution")
SYSTEM_COLUMNS = ("system", "system_prompt")
CONTEXT_COLUMNS = ("input", "context")
"""What Alpaca and Dolly add to an `instruction`."""
BESIDE_PROMPT = (*CONTEXT_COLUMNS, "history")
"""Columns that belong to a prompt, refused unless they are read: the last has LLaMA-Factory's earlier turns."""

EMPTY: tuple[object, ...] = (None, "", [], {})
"""Values of an empty cell; 0 is a value."""
VIDEO_COLUMNS = ("video", "videos")
"""What belongs to the text of a row and is never read."""

ROLES: dict[str, Role] = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "human": "user",
    "assistant": "assistant",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "model": "assistant",
    "tool": "tool",
    "observation": "tool",
    "function": "tool",
    "function_call": "assistant",
}
"""Names of roles in OpenAI's, ShareGPT's and Gemma's data."""
MESSAGE_KEYS = {"messages": ("role", "content"), "sharegpt": ("from", "value")}
"""Keys of role and text in the formats that hold a list of messages."""
REASONING_KEYS = ("reasoning_content", "reasoning", "thinking")
"""Keys of an assistant's thought, in messages of reasoning models' servers and of gpt-oss, and for chat templates."""

OTHER_KEYS = ("tool_calls", "tool_call_id", "name", *REASONING_KEYS)
"""Keys of a message that are read besides its role, its text and its marks."""


@dataclass(frozen=True, slots=True)
class Columns:
    """Which columns the settings name; None leaves the choice to their names."""

    input_key: str | None
    output_key: str | None = None
    label_key: str | None = None


@dataclass(frozen=True, slots=True)
class Present:
    """The columns that a source has in its first rows."""

    source: Source
    names: list[str]

    def error(self, message: str) -> UsageError:
        """Return the error to raise about the source: it names the columns of the source."""
        where = f" in the first {COLUMN_ROWS} rows" if len(self.source) > COLUMN_ROWS else ""
        return UsageError(f"{self.source.name}: {message}; columns present{where}: {', '.join(self.names)}")

    def has(self, name: str) -> bool:
        """Return whether a column, or an entry inside one (`reward_model.ground_truth`), is there."""
        if name in self.names or name.partition(".")[0] not in self.names:
            return name in self.names
        return any(name in self.source.row(index) for index in range(min(COLUMN_ROWS, len(self.source))))

    def named(self, name: str | None, setting: str) -> str | None:
        """Return a column that the settings name. Raise UsageError if it is missing."""
        if name is not None and not self.has(name):
            raise self.error(f"no column {name!r} (--{setting}){self._entries_beside(name)}")
        return name

    def _entries_beside(self, name: str) -> str:
        """Return which entries the column has in which `name` looks for one, as part of a sentence."""
        column = name.rpartition(".")[0]
        held = self.source.row(0).get(column) if column else None
        return f", for {column!r} has {', '.join(held) or 'nothing'}" if isinstance(held, dict) else ""

    def first(self, candidates: tuple[str, ...]) -> str | None:
        """Return the first of the candidates that is there."""
        return next((name for name in candidates if self.has(name)), None)

    def only(self, candidates: tuple[str, ...], meaning: str, setting: str) -> str | None:
        """Return the only candidate there is. Raise UsageError for several, because the user has to decide."""
        found = [name for name in candidates if name in self.names]
        if found and found[0] == "instruction":
            found = ["instruction"]  # Alpaca's input goes with it
        if len(found) > 1:
            raise self.error(f"{' and '.join(found)} could all be {meaning}: choose one with --{setting}")
        return found[0] if found else None


def dialogue_of(value: object) -> list[dict[str, object]] | None:
    """Return the list of messages in a cell, in any form that a file may give it, also a single message; None for
    another cell.
    """
    if isinstance(value, list) and value and isinstance(value[0], dict):
        return value
    listed = records(value)
    single = parsed(listed)
    listed = [single] if isinstance(single, dict) else listed
    if not isinstance(listed, list) or not listed:
        return None
    return listed if all(map(_is_message, listed)) else None


def _is_message(entry: object) -> bool:
    """Return whether JSON of a text is a message, as text that is to be learned may be JSON, too."""
    if not isinstance(entry, dict):
        return False
    role_key, text_key = keys_of([entry])
    return str(entry.get(role_key)).lower() in ROLES and (text_key in entry or "tool_calls" in entry)


def format_of(listed: list[dict[str, object]]) -> str:
    """Return the name of the format that a list of messages has, by its first."""
    return "sharegpt" if "from" in listed[0] else "messages"


def keys_of(listed: list[dict[str, object]]) -> tuple[str, str]:
    """Return the keys of role and text in a list of messages."""
    return MESSAGE_KEYS[format_of(listed)]


def prompt_reader(column: str, *, joined: bool) -> Callable[[Row], tuple[Message, ...]]:
    """Return the reader of a prompt: a text, with the Alpaca context if `joined`, or a list of messages.

    If `joined`, other columns of the prompt are refused; otherwise the settings name this column alone.
    """
    contexts = CONTEXT_COLUMNS if joined and column == "instruction" else ()

    def read(row: Row) -> tuple[Message, ...]:
        dialogue = dialogue_of(row.get(column))
        context = None if dialogue else _filled(row, contexts)
        if joined:
            _refuse_unread(row, column, context)
        if dialogue:
            messages = messages_of(row, column, keys_of(dialogue))
        else:
            texts = [text_of(row, name) for name in (column, context) if name is not None]
            messages = (Message("user", "\n\n".join(texts)),)
        return with_system(messages, row)

    return read


def _refuse_unread(row: Row, column: str, context: str | None) -> None:
    left = _filled(row, tuple(name for name in BESIDE_PROMPT if name not in (column, context)))
    if left is not None:
        raise row.error(
            f"column {left!r} is not empty, but is not read beside {column!r}: put it into that column, or leave it "
            f"out with --input_key {column}"
        )


def response_turn(row: Row, column: str) -> tuple[Message, ...]:
    """Return the assistant's turn; TRL's data have it as a list of messages."""
    if dialogue := dialogue_of(row.get(column)):
        return messages_of(row, column, keys_of(dialogue))
    return (Message("assistant", text_of(row, column)),)


def with_system(messages: tuple[Message, ...], row: Row) -> tuple[Message, ...]:
    """Return the messages with the row's system message first, unless they have one."""
    column = _filled(row, SYSTEM_COLUMNS)
    if column is None or not messages or messages[0].role == "system":
        return messages
    return (Message("system", text_of(row, column)), *messages)


def _filled(row: Row, columns: tuple[str, ...]) -> str | None:
    """Return the first of the columns that the row fills: all first rows of a source may leave a column empty."""
    return next((name for name in columns if row.get(name) not in EMPTY), None)


def messages_of(row: Row, column: str, keys: tuple[str, str]) -> tuple[Message, ...]:
    """Return the messages in a cell. Raise UsageError that names the row and the fault."""
    cell = row.get(column)
    listed = dialogue_of(cell) or cell
    if not isinstance(listed, list):
        raise row.error(
            f"column {column!r} is not a list of messages but {described(cell, row, column)}{_fault_of_text(cell)}"
        )
    return tuple(_message(row, number, entry, keys) for number, entry in enumerate(listed, start=1))


def _fault_of_text(cell: object) -> str:
    """Return why a text that begins like a list of messages is none, as the end of a sentence."""
    if not isinstance(cell, str) or not cell.lstrip().startswith("["):
        return ""
    try:
        json.loads(cell)
    except ValueError as error:
        return f", which is not valid JSON ({error}): write the column with json.dumps"
    return ", whose entries are no messages"


def _message(row: Row, number: int, entry: object, keys: tuple[str, str]) -> Message:
    role_key, text_key = keys
    called = isinstance(entry, dict) and bool(entry.get("tool_calls"))
    if not isinstance(entry, dict) or role_key not in entry or (text_key not in entry and not called):
        has = f"has {', '.join(entry) or 'nothing'}" if isinstance(entry, dict) else f"is {entry!r:.40}"
        raise row.error(f"message {number} {has}, expected {role_key!r} and {text_key!r}")
    role = ROLES.get(str(entry[role_key]).lower())
    if role is None:
        raise row.error(f"message {number} has the unknown role {entry[role_key]!r}; known: {', '.join(ROLES)}")
    content, pictures = _content(row, number, role, entry.get(text_key))
    calls = tool_calls_of(row, number, role, entry.get("tool_calls"))
    if content is None and not calls:
        raise row.error(f"message {number} from {role} has null content")
    named = {key: str(entry[key]) for key in ("tool_call_id", "name") if role == "tool" and entry.get(key)}
    reasoning = _reasoning(row, number, role, entry)
    is_trained, left_out = marks_of_message(
        row,
        number,
        role,
        entry,
        text_key=text_key,
        length=len(content or ""),
        has_more=bool(calls or reasoning),
    )
    unread = unread_marks(row, number, entry, (*keys, *OTHER_KEYS)) if role == "assistant" else ()
    return Message(
        role,
        content or "",
        calls,
        reasoning=reasoning,
        pictures=pictures,
        is_trained=is_trained,
        left_out=left_out,
        unread=unread,
        **named,
    )


def _reasoning(row: Row, number: int, role: Role, entry: dict[str, object]) -> str:
    """Return the assistant's thought if the message has it apart, else ""."""
    given = {key: entry[key] for key in REASONING_KEYS if entry.get(key)}
    if not given:
        return ""
    key, reasoning = next(iter(given.items()))
    if role != "assistant":
        raise row.error(f"message {number} from {role} has {key}, which is the assistant's")
    if not isinstance(reasoning, str):
        raise row.error(f"message {number} has {key} that is not text: {reasoning!r:.60}")
    if other := next((name for name in given if given[name] != reasoning), None):
        raise row.error(f"message {number} has two different thoughts, {key} and {other}")
    return reasoning if reasoning.strip() else ""


def _content(row: Row, number: int, role: Role, content: object) -> tuple[str | None, tuple[object, ...]]:
    """Return the text of a message and its pictures; the content may be OpenAI's list of parts."""
    if content is None or isinstance(content, str):
        return content, ()
    if isinstance(content, list):
        return content_of_parts(row, number, role, content)
    raise row.error(f"message {number} has content that is not text: {content!r:.60}")


def text_of(row: Row, column: str) -> str:
    """Return the text in a cell; finite numbers are text too. Raise UsageError that names the row and the cell's
    content.
    """
    value = row.get(column)
    if isinstance(value, str):
        return value
    if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value):
        return str(value)
    raise row.error(f"column {column!r} is not text but {described(value, row, column)}")


def described(value: object, row: Row, column: str) -> str:
    """Return a description of a cell's wrong content, for messages."""
    if column not in row:
        return f"missing; columns present: {', '.join(row)}"
    return "null" if value is None else f"a {type(value).__name__}: {value!r:.60}"


TRUTHS: dict[object, bool] = {True: True, False: False, "true": True, "false": False, "1": True, "0": False}
"""Labels of desirable and undesirable responses, in lower case; the numbers 1 and 0 are equal to True and False."""


def truth(value: object) -> bool | None:
    """Return whether a label marks a response as desirable, None for any other label."""
    known = value.strip().lower() if isinstance(value, str) else value
    return TRUTHS.get(known) if isinstance(known, str | int | float) else None


def refuse_images(row: Row) -> None:
    """Raise UsageError that names the row if it comes with images: its text would refer to pictures that the model
    never sees.
    """
    for column in (*IMAGE_COLUMNS, *VIDEO_COLUMNS):
        if row.get(column):
            raise row.error(f"column {column!r} is not empty, but only text is read for this model or command")


def refuse_videos(row: Row) -> None:
    """Raise UsageError that names the row if it comes with a video."""
    for column in VIDEO_COLUMNS:
        if row.get(column):
            raise row.error(f"column {column!r} is not empty, but no videos are read, only images")


def refuse_half_characters(row: Row, text: str) -> None:
    """Raise UsageError that names the row if its text has half of a character, as JSON of a cut emoji has."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        before, half = text[max(0, error.start - 20) : error.start], text[error.start]
        raise row.error(f"{half!r} after {before!r} is half of a character, which no tokenizer reads") from error


def refuse(row: Row, fault: str | None) -> None:
    """Raise UsageError that names the row if there is a fault."""
    if fault is not None:
        raise row.error(fault)
