"""Columns of a data source, and conversion of cells to text and messages.

Formats are defined in `formats`.
"""

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from rlhf_cli.data.formats.conversations import Message, Role
from rlhf_cli.data.formats.marks import marks_of_message, unread_marks
from rlhf_cli.data.formats.tools import tool_calls_of
from rlhf_cli.data.pictures.marks import IMAGE_COLUMNS, content_of_parts
from rlhf_cli.data.reading.json_cells import parsed, records
from rlhf_cli.data.reading.sources import COLUMN_ROWS, Row, Source
from rlhf_cli.errors import UsageError

T = TypeVar("T")
MESSAGE_COLUMNS = ("messages", "conversations", "conversation")
PROMPT_COLUMNS = ("prompt", "question", "instruction", "query", "problem", "input")
RESPONSE_COLUMNS = ("response", "answer", "output", "completion", "solution")
_SYSTEM_COLUMNS = ("system", "system_prompt")
_CONTEXT_COLUMNS = ("input", "context")
"""Columns added to an `instruction` in Alpaca and Dolly."""
_BESIDE_PROMPT = (*_CONTEXT_COLUMNS, "history")
"""Columns that extend a prompt, rejected unless used. `history` contains earlier turns in LLaMA-Factory data."""

_EMPTY: tuple[object, ...] = (None, "", [], {})
"""Values of empty cells; 0 is not empty."""
_VIDEO_COLUMNS = ("video", "videos")
"""Video columns, which are not supported."""

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
"""Role names in OpenAI, ShareGPT and Gemma data."""
MESSAGE_KEYS = {"messages": ("role", "content"), "sharegpt": ("from", "value")}
"""Keys of role and text per message format."""
REASONING_KEYS = ("reasoning_content", "reasoning", "thinking")
"""Keys for reasoning, in messages from reasoning model servers, in gpt-oss, and in chat templates."""

_OTHER_KEYS = ("tool_calls", "tool_call_id", "name", *REASONING_KEYS)
"""Additional message keys that are read, except role, text and loss markers."""


@dataclass(frozen=True, slots=True)
class Columns:
    """Columns set by the user; None selects them by name."""

    input_key: str | None
    output_key: str | None = None
    label_key: str | None = None


@dataclass(frozen=True, slots=True)
class Present:
    """Columns in a source's first rows."""

    source: Source
    names: list[str]

    def error(self, message: str) -> UsageError:
        """Return an error that lists the source's columns."""
        # Only the first rows were inspected, so say so for larger files.
        where = f" in the first {COLUMN_ROWS} rows" if len(self.source) > COLUMN_ROWS else ""
        return UsageError(f"{self.source.name}: {message}; columns present{where}: {', '.join(self.names)}")

    def has(self, name: str) -> bool:
        """Return whether a column exists, or an entry in one (`reward_model.ground_truth`)."""
        # Look for the full name first: a column's name may contain dots.
        if name in self.names or name.partition(".")[0] not in self.names:
            return name in self.names
        return any(name in self.source.row(index) for index in range(min(COLUMN_ROWS, len(self.source))))

    def named(self, name: str | None, setting: str) -> str | None:
        """Return the configured column. Raises UsageError if it does not exist."""
        if name is not None and not self.has(name):
            raise self.error(f"no column {name!r} (--{setting}){self._entries_beside(name)}")
        return name

    def _entries_beside(self, name: str) -> str:
        """Return the available entries of the column in which `name` is looked up, for messages."""
        column = name.rpartition(".")[0]
        held = self.source.row(0).get(column) if column else None
        return f", for {column!r} has {', '.join(held) or 'nothing'}" if isinstance(held, dict) else ""

    def first(self, candidates: tuple[str, ...]) -> str | None:
        """Return the first existing candidate."""
        return next((name for name in candidates if self.has(name)), None)

    def only(self, candidates: tuple[str, ...], meaning: str, setting: str) -> str | None:
        """Return the only existing candidate. Raises UsageError for several, because the choice is ambiguous."""
        found = [name for name in candidates if name in self.names]
        # Alpaca rows have both, and the input is context.
        if found and found[0] == "instruction":
            found = ["instruction"]  # Alpaca's input belongs to it
        if len(found) > 1:
            raise self.error(f"{' and '.join(found)} could all be {meaning}: choose one with --{setting}")
        return found[0] if found else None


@dataclass(frozen=True)
class RowFormat(Generic[T]):
    """Reader for a source's rows. `columns` describes the columns: 'question -> answer'."""

    name: str
    columns: str
    read: Callable[[Row], T]

    def __str__(self) -> str:
        return f"{self.name}: {self.columns}" if self.name else self.columns


def dialogue_of(value: object) -> list[dict[str, object]] | None:
    """Return the message list in a cell, in any storage form, also for a single message; None for other cells."""
    if isinstance(value, list) and value and isinstance(value[0], dict):
        return value
    listed = records(value)
    # A single message is stored as an object instead of a list.
    single = parsed(listed)
    listed = [single] if isinstance(single, dict) else listed
    if not isinstance(listed, list) or not listed:
        return None
    return listed if all(map(_is_message, listed)) else None


def _is_message(entry: object) -> bool:
    """Return whether parsed JSON is a message: training text may also be JSON."""
    if not isinstance(entry, dict):
        return False
    role_key, text_key = keys_of([entry])
    # Require a known role, because answers may be JSON objects too.
    return str(entry.get(role_key)).lower() in ROLES and (text_key in entry or "tool_calls" in entry)


def format_of(listed: list[dict[str, object]]) -> str:
    """Return the format of a message list, judged by its first message."""
    return "sharegpt" if "from" in listed[0] else "messages"


def keys_of(listed: list[dict[str, object]]) -> tuple[str, str]:
    """Return the keys of role and text in a message list."""
    return MESSAGE_KEYS[format_of(listed)]


def prompt_reader(column: str, *, joined: bool) -> Callable[[Row], tuple[Message, ...]]:
    """Return a prompt reader: text, with Alpaca context if `joined`, or a message list.

    If `joined`, other prompt columns are rejected; otherwise the settings select only this column.
    """
    # A column selected by the user is read alone.
    contexts = _CONTEXT_COLUMNS if joined and column == "instruction" else ()

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
    left = _filled(row, tuple(name for name in _BESIDE_PROMPT if name not in (column, context)))
    if left is not None:
        raise row.error(
            f"column {left!r} is not empty, but is not read beside {column!r}: put it into that column, or leave it "
            f"out with --input_key {column}"
        )


def response_turn(row: Row, column: str) -> tuple[Message, ...]:
    """Return the assistant's turn, a message list in TRL data."""
    if dialogue := dialogue_of(row.get(column)):
        return messages_of(row, column, keys_of(dialogue))
    return (Message("assistant", text_of(row, column)),)


def with_system(messages: tuple[Message, ...], row: Row) -> tuple[Message, ...]:
    """Prepend the row's system message, unless there is one."""
    column = _filled(row, _SYSTEM_COLUMNS)
    if column is None or not messages or messages[0].role == "system":
        return messages
    return (Message("system", text_of(row, column)), *messages)


def _filled(row: Row, columns: tuple[str, ...]) -> str | None:
    """Return the first non-empty column: a column may be empty in all first rows of a source."""
    return next((name for name in columns if row.get(name) not in _EMPTY), None)


def messages_of(row: Row, column: str, keys: tuple[str, str]) -> tuple[Message, ...]:
    """Parse the messages in a cell. Raises UsageError with row and reason."""
    cell = row.get(column)
    listed = dialogue_of(cell) or cell
    if not isinstance(listed, list):
        raise row.error(
            f"column {column!r} is not a list of messages but {described(cell, row, column)}{_fault_of_text(cell)}"
        )
    return tuple(_message(row, number, entry, keys) for number, entry in enumerate(listed, start=1))


def _fault_of_text(cell: object) -> str:
    """Return why text that starts like a message list is not one, for messages."""
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
    # Messages with calls have no content in OpenAI's format.
    if content is None and not calls:
        raise row.error(f"message {number} from {role} has null content")
    named = {key: str(entry[key]) for key in ("tool_call_id", "name") if role == "tool" and entry.get(key)}
    reasoning = _reasoning(row, number, role, entry)
    loss_weight, left_out = marks_of_message(
        row,
        number,
        role,
        entry,
        text_key=text_key,
        length=len(content or ""),
        has_more=bool(calls or reasoning),
    )
    unread = unread_marks(row, number, entry, (*keys, *_OTHER_KEYS)) if role == "assistant" else ()
    return Message(
        role,
        content or "",
        calls,
        reasoning=reasoning,
        pictures=pictures,
        loss_weight=loss_weight,
        left_out=left_out,
        unread=unread,
        **named,
    )


def _reasoning(row: Row, number: int, role: Role, entry: dict[str, object]) -> str:
    """Return separately stored reasoning, or ""."""
    given = {key: entry[key] for key in REASONING_KEYS if entry.get(key)}
    if not given:
        return ""
    key, reasoning = next(iter(given.items()))
    if role != "assistant":
        raise row.error(f"message {number} from {role} has {key}, which is the assistant's")
    if not isinstance(reasoning, str):
        raise row.error(f"message {number} has {key} that is not text: {reasoning!r:.60}")
    # Servers may send the same reasoning under two keys.
    if other := next((name for name in given if given[name] != reasoning), None):
        raise row.error(f"message {number} has two different thoughts, {key} and {other}")
    return reasoning if reasoning.strip() else ""


def _content(row: Row, number: int, role: Role, content: object) -> tuple[str | None, tuple[object, ...]]:
    """Return a message's text and images, also from multi-part content."""
    if content is None or isinstance(content, str):
        return content, ()
    if isinstance(content, list):
        return content_of_parts(row, number, role, content)
    raise row.error(f"message {number} has content that is not text: {content!r:.60}")


def text_of(row: Row, column: str) -> str:
    """Return a cell's text, also from finite numbers. Raises UsageError with row and content."""
    value = row.get(column)
    if isinstance(value, str):
        return value
    if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value):
        return str(value)
    raise row.error(f"column {column!r} is not text but {described(value, row, column)}")


def described(value: object, row: Row, column: str) -> str:
    """Describe a cell's invalid content, for messages."""
    if column not in row:
        return f"missing; columns present: {', '.join(row)}"
    return "null" if value is None else f"a {type(value).__name__}: {value!r:.60}"


_TRUTHS: dict[object, bool] = {True: True, False: False, "true": True, "false": False, "1": True, "0": False}
"""Labels for desirable and undesirable responses, in lower case; the numbers 1 and 0 equal True and False."""


def truth(value: object) -> bool | None:
    """Return whether a label means desirable, None for other labels."""
    # CSV files contain labels as text.
    known = value.strip().lower() if isinstance(value, str) else value
    return _TRUTHS.get(known) if isinstance(known, str | int | float) else None


ONLY_TEXT = "only text is read for this model or command; docs/howto/vision-models.md lists types that read images"
"""End of a message about a row with images."""


def refuse_images(row: Row) -> None:
    """Raise UsageError if the row has images: its text may refer to images that the model never receives."""
    # Check the names even if they are not selected: the text may refer to them.
    for column in (*IMAGE_COLUMNS, *_VIDEO_COLUMNS):
        if row.get(column):
            raise row.error(f"column {column!r} is not empty, but {ONLY_TEXT}")


def refuse_videos(row: Row) -> None:
    """Raise UsageError if the row has a video."""
    for column in _VIDEO_COLUMNS:
        if row.get(column):
            raise row.error(f"column {column!r} is not empty, but no videos are read, only images")


def refuse_half_characters(row: Row, text: str) -> None:
    """Raise UsageError if the text has an unpaired surrogate, such as from JSON of a truncated emoji."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        before, half = text[max(0, error.start - 20) : error.start], text[error.start]
        raise row.error(f"{half!r} after {before!r} is half of a character, which no tokenizer reads") from error


def refuse(row: Row, fault: str | None) -> None:
    """Raise UsageError with the row if there is an error."""
    if fault is not None:
        raise row.error(fault)
