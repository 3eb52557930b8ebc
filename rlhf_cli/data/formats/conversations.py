"""The records between formats and tokenising, and what every conversation must satisfy."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

Role = Literal["system", "user", "assistant", "tool"]

NEXT_ROLES: dict[Role | None, tuple[Role, ...]] = {
    None: ("system", "user"),
    "system": ("user",),
    "user": ("assistant",),
    "assistant": ("user", "tool"),
    "tool": ("tool", "assistant", "user"),
}
"""Which roles may follow which; None is the start."""


MARK = "\ufffc"
"""Unicode's object replacement character: stands for a picture in the content of a message."""


Span = tuple[int, int]
"""Two places in a text: its first character, and the one behind its last."""

Tool = dict[str, Any]
"""A function that may be called, as {"type": "function", "function": {...}}."""


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A function the assistant asks for."""

    name: str
    arguments: dict[str, object]
    id: str | None = None


@dataclass(frozen=True, slots=True)
class Message:
    """One turn of a conversation. An assistant's turn may be tool calls with or without text; a tool's turn may name
    its call.

    `reasoning` is the assistant's thought, if the row has it apart from the content. `pictures` are the pictures of the
    message as the row has them, one for each `MARK` in the content (`pictures/marks`).

    Marks of the row (`formats/marks`) make no other message: a turn that is not trained carries no loss, `left_out` are
    the characters of the content that carry none, and `unread` are keys that may be marks and are not known.
    """

    role: Role
    content: str
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str | None = None
    name: str | None = None
    reasoning: str = ""
    pictures: tuple[object, ...] = ()
    is_trained: bool = field(default=True, compare=False)
    left_out: tuple[Span, ...] = field(default=(), compare=False)
    unread: tuple[str, ...] = field(default=(), compare=False)

    @property
    def pieces(self) -> tuple[str, ...]:
        """The texts between the pictures; all of the content without pictures."""
        return tuple(self.content.split(MARK)) if self.pictures else (self.content,)

    def with_reasoning_in_text(self) -> "Message":
        """Return the message with its reasoning before the content, in the tags of reasoning models."""
        if not self.reasoning:
            return self
        thought = f"<think>\n{self.reasoning.strip()}\n</think>\n\n"
        left_out = tuple((start + len(thought), stop + len(thought)) for start, stop in self.left_out)
        return replace(self, content=thought + self.content, reasoning="", left_out=left_out)


@dataclass(frozen=True, slots=True)
class Conversation:
    """Messages in order: at most one system message first, then user and assistant in turns.

    `tools` describes the functions that may be called.
    """

    messages: tuple[Message, ...]
    tools: tuple[Tool, ...] = ()

    @property
    def pictures(self) -> tuple[object, ...]:
        """The pictures of all messages."""
        return tuple(picture for message in self.messages for picture in message.pictures)

    def with_system_prompt(self, content: str | None) -> "Conversation":
        """Return the conversation with this system message first, unless it has one or `content` is None."""
        if content is None or self.messages[0].role == "system":
            return self
        return replace(self, messages=(Message("system", content), *self.messages))


@dataclass(frozen=True, slots=True)
class Document:
    """Plain text, all of which is trained on."""

    text: str


@dataclass(frozen=True, slots=True)
class Preference:
    """Two ways to continue one prompt, of which the first is better.

    Each side begins at the first message that may differ and ends with an assistant turn. `margin` is the lead of the
    first side, None if the row has no margin.
    """

    prompt: tuple[Message, ...]
    chosen: tuple[Message, ...]
    rejected: tuple[Message, ...]
    margin: float | None
    tools: tuple[Tool, ...] = ()


@dataclass(frozen=True, slots=True)
class Labelled:
    """A response to a prompt, and whether it is desirable; the response ends with an assistant turn."""

    prompt: tuple[Message, ...]
    response: tuple[Message, ...]
    desirable: bool
    tools: tuple[Tool, ...] = ()


@dataclass(frozen=True, slots=True)
class Solution:
    """A prompt and a response in steps, each with a label: 1 right, 0 wrong, a probability, or None for unknown."""

    prompt: tuple[Message, ...]
    steps: tuple[str, ...]
    labels: tuple[float | None, ...]


def fault_of_order(messages: tuple[Message, ...]) -> str | None:
    """Return the fault in the order of the roles, None if there is none."""
    if not messages:
        return "the conversation has no messages"
    previous: Role | None = None
    for number, message in enumerate(messages, start=1):
        if message.role not in NEXT_ROLES[previous]:
            after = f"after {previous}" if previous else "at the start"
            return f"message {number} is from {message.role} {after}, expected {' or '.join(NEXT_ROLES[previous])}"
        previous = message.role
    return None


def fault_of_example(messages: tuple[Message, ...]) -> str | None:
    """Return the reason why a model cannot learn from the conversation, None if it can."""
    fault = fault_of_order(messages)
    if fault is not None:
        return fault
    answers = [message for message in messages if message.role == "assistant"]
    if not answers:
        return "the conversation has no assistant turn"
    if any(not answer.content.strip() and not answer.tool_calls for answer in answers):
        return "the response is empty"
    last = messages[-1].role
    return f"the conversation ends with {last}, expected an assistant turn at its end" if last != "assistant" else None


def unmarked(messages: tuple[Message, ...]) -> tuple[Message, ...]:
    """Return the messages without their marks, for prompts: nothing of them is trained in any case."""
    return tuple(replace(message, is_trained=True, left_out=()) for message in messages)


def num_common(first: tuple[Message, ...], second: tuple[Message, ...]) -> int:
    """Return the number of messages at the start that two conversations have in common."""
    pairs = enumerate(zip(first, second, strict=False))
    return next((place for place, (a, b) in pairs if a != b), min(len(first), len(second)))


def fault_of_prompt(messages: tuple[Message, ...]) -> str | None:
    """Return the reason why the conversation is no prompt, None if it is one."""
    fault = fault_of_order(messages)
    if fault is not None:
        return fault
    last = messages[-1].role
    return f"a prompt ends with a user turn, this one with {last}" if last not in ("user", "tool") else None


def plain_message(message: Message) -> dict[str, Any]:
    """Return a message as JSON, without its pictures and marks."""
    calls = [{"name": call.name, "arguments": call.arguments, "id": call.id} for call in message.tool_calls]
    kept = {"tool_call_id": message.tool_call_id, "name": message.name, "reasoning": message.reasoning}
    return {"role": message.role, "content": message.content, "tool_calls": calls, **kept}


def message_of(plain: Mapping[str, Any]) -> Message:
    """Return the message that `plain_message` made JSON of."""
    return Message(**{**plain, "tool_calls": tuple(ToolCall(**call) for call in plain["tool_calls"])})
