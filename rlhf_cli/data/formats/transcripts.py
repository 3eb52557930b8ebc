"""Conversations written as one text, in the manner of Anthropic's hh-rlhf: '\\n\\nHuman: ...\\n\\nAssistant: ...'."""

import re
from typing import TypeGuard

from rlhf_cli.data.formats.conversations import Message

TURN = re.compile(r"\n\n(Human|Assistant):")
"""What begins a turn."""


def is_transcript(value: object) -> TypeGuard[str]:
    """Return whether a cell is a conversation in one text."""
    return isinstance(value, str) and value.startswith("\n\nHuman:")


def turns_of_transcript(text: str) -> tuple[Message, ...]:
    """Return the turns of the text."""
    _, *parts = TURN.split(text)
    turns = zip(parts[::2], parts[1::2], strict=True)
    return tuple(Message("user" if speaker == "Human" else "assistant", text.strip()) for speaker, text in turns)


def prompt_of_transcript(text: str) -> tuple[Message, ...]:
    """Return the turns without a last 'Assistant:', which only requests a response."""
    turns = turns_of_transcript(text)
    return turns[:-1] if turns[-1] == Message("assistant", "") else turns


def without_answer(text: str) -> tuple[Message, ...]:
    """Return the turns before the assistant's last turn, if the text ends with that turn."""
    turns = turns_of_transcript(text)
    return turns[:-1] if turns[-1].role == "assistant" else turns
