"""The records between formats and tokenising, and what every conversation must satisfy.

Images are not represented.
"""

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


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A function the assistant asks for."""

    name: str
    arguments: dict[str, Any]
    id: str | None = None


@dataclass(frozen=True, slots=True)
class Message:
    """One turn of a conversation. An assistant's may be tool calls with or without text; a tool's may name its call.

    `reasoning` is what the assistant thought before it, where the row has that apart from the content. `weight` is what
    the row says of the turn's share in the loss, None where it says nothing; it makes no other message.
    """

    role: Role
    content: str
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str | None = None
    name: str | None = None
    reasoning: str = ""
    weight: Any = field(default=None, compare=False)

    def with_reasoning_in_text(self) -> "Message":
        """The same message with its reasoning before the content, in the tags of reasoning models."""
        if not self.reasoning:
            return self
        return replace(self, content=f"<think>\n{self.reasoning.strip()}\n</think>\n\n{self.content}", reasoning="")


@dataclass(frozen=True, slots=True)
class Conversation:
    """Messages in order: at most one system message first, then user and assistant in turns.

    `tools` describes the functions that may be called, each as {"type": "function", "function": {...}}.
    """

    messages: tuple[Message, ...]
    tools: tuple[dict[str, Any], ...] = ()

    def with_system_prompt(self, content: str | None) -> "Conversation":
        """The same conversation with this system message first, unless it has one or `content` is None."""
        if content is None or self.messages[0].role == "system":
            return self
        return replace(self, messages=(Message("system", content), *self.messages))


@dataclass(frozen=True, slots=True)
class Document:
    """Plain text, all of which is trained on."""

    text: str


@dataclass(frozen=True, slots=True)
class Preference:
    """Two ways to go on from the same prompt, of which the first is better.

    Each side begins where the conversations may differ and ends with an assistant turn; `margin` says by how much the
    first is better, None where nothing does.
    """

    prompt: tuple[Message, ...]
    chosen: tuple[Message, ...]
    rejected: tuple[Message, ...]
    margin: float | None
    tools: tuple[dict[str, Any], ...] = ()


@dataclass(frozen=True, slots=True)
class Labelled:
    """A response to a prompt, and whether it is desirable; the response ends with an assistant turn."""

    prompt: tuple[Message, ...]
    response: tuple[Message, ...]
    desirable: bool
    tools: tuple[dict[str, Any], ...] = ()


def fault_of_order(messages: tuple[Message, ...]) -> str | None:
    """What is wrong with the order of the roles, None if nothing is."""
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
    """Why a model cannot learn from the conversation, None if it can."""
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


def fault_of_weights(trained: tuple[Message, ...]) -> str | None:
    """Whether a turn asks for a weight that training does not give, None if none does.

    OpenAI's fine-tuning leaves out turns of weight 0; here every turn of the assistant that is trained counts alike.
    """
    for message in trained:
        if message.role == "assistant" and message.weight not in (None, 1):
            return f"a turn has weight {message.weight!r}, but every turn that is trained has weight 1"
    return None


def num_common(first: tuple[Message, ...], second: tuple[Message, ...]) -> int:
    """Messages at the start that two conversations have in common."""
    pairs = enumerate(zip(first, second, strict=False))
    return next((place for place, (a, b) in pairs if a != b), min(len(first), len(second)))


def fault_of_prompt(messages: tuple[Message, ...]) -> str | None:
    """Why the conversation is no prompt, None if it is one."""
    fault = fault_of_order(messages)
    if fault is not None:
        return fault
    last = messages[-1].role
    return f"a prompt ends with a user turn, this one with {last}" if last not in ("user", "tool") else None
