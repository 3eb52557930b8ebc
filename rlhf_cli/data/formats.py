"""Table of row formats: how the columns of a row become a conversation, and which format a data set has.

Preference pairs, unpaired labels, step labels and images have no format here.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeGuard

from rlhf_cli.data.conversations import (
    Conversation,
    Document,
    Message,
    Role,
    fault_of_example,
    fault_of_prompt,
)
from rlhf_cli.data.sources import Row, Source
from rlhf_cli.errors import UsageError

MESSAGE_COLUMNS = ("messages", "conversations", "conversation")
PROMPT_COLUMNS = ("prompt", "question", "instruction", "query", "problem", "input")
RESPONSE_COLUMNS = ("response", "answer", "output", "completion", "solution")
LABEL_COLUMNS = ("label", "answer", "ground_truth", "final_answer", "solution")
SYSTEM_COLUMNS = ("system", "system_prompt")
CONTEXT_COLUMNS = ("input", "context")
"""What Alpaca and Dolly add to an `instruction`."""

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

Example = Conversation | Document


@dataclass(frozen=True, slots=True)
class Columns:
    """Which columns the settings name; None leaves the choice to their names."""

    input_key: str | None
    output_key: str | None = None
    label_key: str | None = None


@dataclass(frozen=True, slots=True)
class Format:
    """How the rows of one source are read. `columns` says which are used: 'question -> answer'."""

    name: str
    columns: str
    read: Callable[[Row], Example]


@dataclass(frozen=True, slots=True)
class PromptFormat:
    """How the prompts of one source are read, and the ground truth (None where there is none)."""

    columns: str
    read_prompt: Callable[[Row], Conversation]
    read_label: Callable[[Row], str | None]


def choose_format(source: Source, wanted: Columns, *, data_format: str) -> Format:
    """The format of a source's rows: `data_format`, or by its columns if that is 'auto'.

    Raises UsageError naming the columns present where they fit no format, a named column is missing, or several
    columns could be meant.
    """
    present = _Present(source, source.columns())
    return FORMATS[present.detect(wanted) if data_format == "auto" else data_format](present, wanted)


def choose_prompt_format(source: Source, wanted: Columns) -> PromptFormat:
    """Where prompts and ground truths of a source stand. Raises UsageError naming the columns present."""
    present = _Present(source, source.columns())
    prompt = present.named(wanted.input_key, "input_key")
    prompt = prompt or present.only(PROMPT_COLUMNS, "the prompt", "input_key") or present.first(MESSAGE_COLUMNS)
    if prompt is None:
        raise present.error(f"no column for the prompt ({', '.join(PROMPT_COLUMNS + MESSAGE_COLUMNS)}): --input_key")
    label = present.named(wanted.label_key, "label_key")
    label = label or present.first(tuple(name for name in LABEL_COLUMNS if name != prompt))
    read = _prompt_reader(prompt, present, joined=wanted.input_key is None)

    def read_prompt(row: Row) -> Conversation:
        messages = read(row)
        _refuse(row, fault_of_prompt(messages))
        return Conversation(messages)

    def read_label(row: Row) -> str | None:
        return None if label is None else _label_text(row, label, required=wanted.label_key is not None)

    columns = prompt if label is None else f"{prompt}, label {label}"
    return PromptFormat(columns, read_prompt, read_label)


@dataclass(frozen=True, slots=True)
class _Present:
    """The columns a source has."""

    source: Source
    names: list[str]

    def error(self, message: str) -> UsageError:
        return UsageError(f"{self.source.name}: {message}; columns present: {', '.join(self.names)}")

    def named(self, name: str | None, setting: str) -> str | None:
        """A column the settings name, which must be there."""
        if name is not None and name not in self.names:
            raise self.error(f"no column {name!r} (--{setting})")
        return name

    def first(self, candidates: tuple[str, ...]) -> str | None:
        return next((name for name in candidates if name in self.names), None)

    def only(self, candidates: tuple[str, ...], meaning: str, setting: str) -> str | None:
        """The one candidate there is; more than one is for the user to decide."""
        found = [name for name in candidates if name in self.names]
        if found and found[0] == "instruction":
            found = ["instruction"]  # Alpaca's input goes with it
        if len(found) > 1:
            raise self.error(f"{' and '.join(found)} could all be {meaning}: choose one with --{setting}")
        return found[0] if found else None

    def detect(self, wanted: Columns) -> str:
        """Name of the format that the columns have."""
        listed = self.named(wanted.input_key, "input_key") or self.first(MESSAGE_COLUMNS)
        value = self.source.row(0).get(listed) if listed else None
        if wanted.output_key is None and (_is_dialogue(value) or listed in MESSAGE_COLUMNS):
            return "sharegpt" if _is_dialogue(value) and "from" in value[0] else "messages"
        if wanted.input_key or wanted.output_key or (self.first(PROMPT_COLUMNS) and self.first(RESPONSE_COLUMNS)):
            return "prompt_response"
        if "text" in self.names:
            return "text"
        raise self.error(
            "no format fits: expected a prompt and a response "
            f"({', '.join(PROMPT_COLUMNS)}; {', '.join(RESPONSE_COLUMNS)}), messages, conversations or text "
            "(others with --input_key and --output_key)"
        )


def _is_dialogue(value: Any) -> TypeGuard[list[dict[str, Any]]]:
    return isinstance(value, list) and bool(value) and isinstance(value[0], dict)


def _prompt_response(present: _Present, wanted: Columns) -> Format:
    prompt = present.named(wanted.input_key, "input_key")
    prompt = prompt or present.only(PROMPT_COLUMNS, "the prompt", "input_key")
    response = present.named(wanted.output_key, "output_key")
    left = tuple(name for name in RESPONSE_COLUMNS if name != prompt)
    response = response or present.only(left, "the response", "output_key")
    if prompt is None:
        raise present.error(f"no column for the prompt ({', '.join(PROMPT_COLUMNS)}): name it with --input_key")
    if response is None:
        raise present.error(f"no column for the response ({', '.join(RESPONSE_COLUMNS)}): name it with --output_key")
    read_prompt = _prompt_reader(prompt, present, joined=wanted.input_key is None)

    def read(row: Row) -> Example:
        messages = read_prompt(row) + _response(row, response)
        _refuse(row, fault_of_example(messages))
        return Conversation(messages)

    return Format("prompt_response", f"{prompt} -> {response}", read)


def _messages_in(name: str) -> Callable[[_Present, Columns], Format]:
    def make(present: _Present, wanted: Columns) -> Format:
        column = present.named(wanted.input_key, "input_key") or present.first(MESSAGE_COLUMNS)
        if column is None:
            raise present.error(f"no column with messages ({', '.join(MESSAGE_COLUMNS)}): name it with --input_key")
        system = present.first(SYSTEM_COLUMNS)

        def read(row: Row) -> Example:
            messages = _with_system(_messages(row, column, MESSAGE_KEYS[name]), row, system)
            _refuse(row, fault_of_example(messages))
            return Conversation(messages)

        return Format(name, column, read)

    return make


def _text(present: _Present, wanted: Columns) -> Format:
    column = present.named(wanted.input_key, "input_key") or present.named("text", "input_key")
    assert column is not None
    return Format("text", column, lambda row: Document(_string(row, column)))


FORMATS: dict[str, Callable[[_Present, Columns], Format]] = {
    "prompt_response": _prompt_response,
    "messages": _messages_in("messages"),
    "sharegpt": _messages_in("sharegpt"),
    "text": _text,
}
"""The formats by name."""


def _prompt_reader(column: str, present: _Present, *, joined: bool) -> Callable[[Row], tuple[Message, ...]]:
    """Reads the messages of a prompt: a text, with the Alpaca context where `joined`, or a list of messages."""
    context = present.first(CONTEXT_COLUMNS) if joined and column == "instruction" else None
    system = present.first(SYSTEM_COLUMNS)

    def read(row: Row) -> tuple[Message, ...]:
        if _is_dialogue(row.get(column)):
            messages = _messages(row, column, ("from", "value") if "from" in row[column][0] else ("role", "content"))
        else:
            text = _string(row, column)
            added = row.get(context) if context else None
            messages = (Message("user", f"{text}\n\n{added}" if added else text),)
        return _with_system(messages, row, system)

    return read


def _response(row: Row, column: str) -> tuple[Message, ...]:
    """The assistant's turn; TRL's data have it as a list of messages."""
    if _is_dialogue(row.get(column)):
        return _messages(row, column, ("role", "content"))
    return (Message("assistant", _string(row, column)),)


def _with_system(messages: tuple[Message, ...], row: Row, column: str | None) -> tuple[Message, ...]:
    content = row.get(column) if column else None
    if not content or not messages or messages[0].role == "system":
        return messages
    return (Message("system", str(content)), *messages)


def _messages(row: Row, column: str, keys: tuple[str, str]) -> tuple[Message, ...]:
    listed = row.get(column)
    if not isinstance(listed, list):
        raise row.error(f"column {column!r} is not a list of messages but {_described(listed, row, column)}")
    return tuple(_message(row, number, entry, keys) for number, entry in enumerate(listed, start=1))


def _message(row: Row, number: int, entry: Any, keys: tuple[str, str]) -> Message:
    role_key, text_key = keys
    if not isinstance(entry, dict) or role_key not in entry or text_key not in entry:
        has = f"has {', '.join(entry) or 'nothing'}" if isinstance(entry, dict) else f"is {entry!r:.40}"
        raise row.error(f"message {number} {has}, expected {role_key!r} and {text_key!r}")
    role = ROLES.get(str(entry[role_key]).lower())
    if role is None:
        raise row.error(f"message {number} has the unknown role {entry[role_key]!r}; known: {', '.join(ROLES)}")
    content = _parts_text(row, number, entry[text_key])
    if content is None:
        calls = " (tool calls are not read)" if entry.get("tool_calls") else ""
        raise row.error(f"message {number} from {role} has null content{calls}")
    return Message(role, content)


def _parts_text(row: Row, number: int, content: Any) -> str | None:
    """Text of a message, whose content may be OpenAI's list of parts."""
    if content is None or isinstance(content, str):
        return content
    if isinstance(content, list) and all(isinstance(p, dict) and isinstance(p.get("text"), str) for p in content):
        return "".join(part["text"] for part in content)
    raise row.error(f"message {number} has content that is not text: {content!r:.60}")


def _string(row: Row, column: str) -> str:
    value = row.get(column)
    if isinstance(value, str):
        return value
    if isinstance(value, int | float) and not isinstance(value, bool):
        return str(value)
    raise row.error(f"column {column!r} is not text but {_described(value, row, column)}")


def _described(value: Any, row: Row, column: str) -> str:
    if column not in row:
        return f"missing; columns present: {', '.join(row)}"
    return "null" if value is None else f"a {type(value).__name__}: {value!r:.60}"


def _label_text(row: Row, column: str, *, required: bool) -> str | None:
    """Ground truth as text: a list of one is its element, other lists and objects are JSON."""
    value = row.get(column)
    if isinstance(value, list) and len(value) == 1:
        value = value[0]
    if value is None and required:
        raise row.error(f"column {column!r} (--label_key) is {_described(value, row, column)}")
    if value is None or isinstance(value, str):
        return value
    return json.dumps(value, ensure_ascii=False)


def _refuse(row: Row, fault: str | None) -> None:
    if fault is not None:
        raise row.error(fault)
