"""The records between formats and tokenising, and what every conversation must satisfy.

Tool definitions, tool calls in structured form and images are not represented.
"""

from dataclasses import dataclass
from typing import Literal

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
class Message:
    """One turn of a conversation."""

    role: Role
    content: str


@dataclass(frozen=True, slots=True)
class Conversation:
    """Messages in order: at most one system message first, then user and assistant in turns."""

    messages: tuple[Message, ...]

    def with_system_prompt(self, content: str | None) -> "Conversation":
        """The same conversation with this system message first, unless it has one or `content` is None."""
        if content is None or self.messages[0].role == "system":
            return self
        return Conversation((Message("system", content), *self.messages))


@dataclass(frozen=True, slots=True)
class Document:
    """Plain text, all of which is trained on."""

    text: str


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
    answers = [message.content for message in messages if message.role == "assistant"]
    if not answers:
        return "the conversation has no assistant turn"
    return "the response is empty" if any(not answer.strip() for answer in answers) else None


def fault_of_prompt(messages: tuple[Message, ...]) -> str | None:
    """Why the conversation is no prompt, None if it is one."""
    fault = fault_of_order(messages)
    if fault is not None:
        return fault
    last = messages[-1].role
    return f"a prompt ends with a user turn, this one with {last}" if last not in ("user", "tool") else None
