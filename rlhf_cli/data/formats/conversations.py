"""Records between formats and tokenization, with validity checks for conversations."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

Role = Literal["system", "user", "assistant", "tool"]

_NEXT_ROLES: dict[Role | None, tuple[Role, ...]] = {
    None: ("system", "user"),
    "system": ("user",),
    "user": ("assistant",),
    "assistant": ("user", "tool"),
    "tool": ("tool", "assistant", "user"),
}
"""Roles that may follow each role; None is the start."""


MARK = "\ufffc"
"""Unicode object replacement character, which represents an image in message content."""


Span = tuple[int, int]
"""Start and end (exclusive) of a text range."""

Tool = dict[str, Any]
"""A callable function, as {"type": "function", "function": {...}}."""


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A function call by the assistant."""

    name: str
    arguments: dict[str, object]
    id: str | None = None


@dataclass(frozen=True, slots=True)
class Message:
    """One turn of a conversation. An assistant turn may contain tool calls with or without text; a tool turn may name
    its call.

    `reasoning` is the assistant's reasoning, if stored separately from the content. `pictures` are images as in the
    row, one per `MARK` in the content (`pictures/marks`).

    Loss markers (`formats/marks`) do not affect equality: `loss_weight` multiplies the loss of a turn, `left_out` are
    character ranges without loss, and `unread` are unknown keys that may be markers.
    """

    role: Role
    content: str
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str | None = None
    name: str | None = None
    reasoning: str = ""
    pictures: tuple[object, ...] = ()
    loss_weight: float = field(default=1.0, compare=False)
    left_out: tuple[Span, ...] = field(default=(), compare=False)
    unread: tuple[str, ...] = field(default=(), compare=False)

    @property
    def pieces(self) -> tuple[str, ...]:
        """Text between images; the full content without images."""
        return tuple(self.content.split(MARK)) if self.pictures else (self.content,)

    def with_reasoning_in_text(self) -> "Message":
        """Move the reasoning into the content, in <think> tags."""
        # The format of Qwen 3 and DeepSeek R1, for templates without a field for reasoning.
        if not self.reasoning:
            return self
        thought = f"<think>\n{self.reasoning.strip()}\n</think>\n\n"
        # Shift the ranges, which are relative to the content.
        left_out = tuple((start + len(thought), stop + len(thought)) for start, stop in self.left_out)
        return replace(self, content=thought + self.content, reasoning="", left_out=left_out)


@dataclass(frozen=True, slots=True)
class Conversation:
    """Messages in order: at most one system message, then alternating user and assistant turns.

    `tools` describes callable functions.
    """

    messages: tuple[Message, ...]
    tools: tuple[Tool, ...] = ()

    @property
    def pictures(self) -> tuple[object, ...]:
        """Images of all messages."""
        return tuple(picture for message in self.messages for picture in message.pictures)

    def with_system_prompt(self, content: str | None) -> "Conversation":
        """Prepend a system message, unless there is one or `content` is None."""
        if content is None or self.messages[0].role == "system":
            return self
        return replace(self, messages=(Message("system", content), *self.messages))


@dataclass(frozen=True, slots=True)
class Document:
    """Plain text, trained in full."""

    text: str


@dataclass(frozen=True, slots=True)
class Preference:
    """Two continuations of a prompt; `chosen` is better.

    Each side starts at the first message that may differ and ends with an assistant turn. `margin` is the preference
    strength, or None.
    """

    prompt: tuple[Message, ...]
    chosen: tuple[Message, ...]
    rejected: tuple[Message, ...]
    margin: float | None
    tools: tuple[Tool, ...] = ()


@dataclass(frozen=True, slots=True)
class Labelled:
    """A response to a prompt, labeled desirable or not. It ends with an assistant turn."""

    prompt: tuple[Message, ...]
    response: tuple[Message, ...]
    desirable: bool
    tools: tuple[Tool, ...] = ()


@dataclass(frozen=True, slots=True)
class Solution:
    """A prompt with a solution in steps, each labeled 1 (correct), 0 (wrong), a probability, or None (unknown)."""

    prompt: tuple[Message, ...]
    steps: tuple[str, ...]
    labels: tuple[float | None, ...]


def _fault_of_order(messages: tuple[Message, ...]) -> str | None:
    """Return the error in the role order, or None."""
    if not messages:
        return "the conversation has no messages"
    previous: Role | None = None
    for number, message in enumerate(messages, start=1):
        if message.role not in _NEXT_ROLES[previous]:
            after = f"after {previous}" if previous else "at the start"
            return f"message {number} is from {message.role} {after}, expected {' or '.join(_NEXT_ROLES[previous])}"
        previous = message.role
    return None


def fault_of_example(messages: tuple[Message, ...]) -> str | None:
    """Return why the conversation is not a training example, or None."""
    fault = _fault_of_order(messages)
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
    """Remove loss markers from prompt messages, which are not trained in any case."""
    return tuple(replace(message, loss_weight=1.0, left_out=()) for message in messages)


def num_common(first: tuple[Message, ...], second: tuple[Message, ...]) -> int:
    """Return the number of common leading messages."""
    # Lists may have different lengths: one may be a prefix of the other.
    pairs = enumerate(zip(first, second, strict=False))
    return next((place for place, (a, b) in pairs if a != b), min(len(first), len(second)))


def fault_of_prompt(messages: tuple[Message, ...]) -> str | None:
    """Return why the conversation is not a prompt, or None."""
    fault = _fault_of_order(messages)
    if fault is not None:
        return fault
    last = messages[-1].role
    return f"a prompt ends with a user turn, this one with {last}" if last not in ("user", "tool") else None


def plain_message(message: Message) -> dict[str, Any]:
    """Return a message as JSON, without images and loss markers."""
    calls = [{"name": call.name, "arguments": call.arguments, "id": call.id} for call in message.tool_calls]
    kept = {"tool_call_id": message.tool_call_id, "name": message.name, "reasoning": message.reasoning}
    return {"role": message.role, "content": message.content, "tool_calls": calls, **kept}


def message_of(plain: Mapping[str, Any]) -> Message:
    """Restore a message from `plain_message`."""
    return Message(**{**plain, "tool_calls": tuple(ToolCall(**call) for call in plain["tool_calls"])})
