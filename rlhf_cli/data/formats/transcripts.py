"""Conversations as one text, as in Anthropic's hh-rlhf: '\\n\\nHuman: ...\\n\\nAssistant: ...'."""

import re
from typing import TypeGuard

from rlhf_cli.data.formats.conversations import Message

_TURN = re.compile(r"\n\n(Human|Assistant):")
"""Start of a turn."""


def is_transcript(value: object) -> TypeGuard[str]:
    """Return whether a cell is a transcript."""
    return isinstance(value, str) and value.startswith("\n\nHuman:")


def turns_of_transcript(text: str) -> tuple[Message, ...]:
    """Return the turns of a transcript."""
    # The text before the first turn is empty, because a transcript starts with one.
    _, *parts = _TURN.split(text)
    turns = zip(parts[::2], parts[1::2], strict=True)
    return tuple(Message("user" if speaker == "Human" else "assistant", text.strip()) for speaker, text in turns)


def prompt_of_transcript(text: str) -> tuple[Message, ...]:
    """Return the turns without a trailing empty 'Assistant:'."""
    turns = turns_of_transcript(text)
    return turns[:-1] if turns[-1] == Message("assistant", "") else turns


def without_answer(text: str) -> tuple[Message, ...]:
    """Return the turns before the assistant's last turn, if the transcript ends with it."""
    turns = turns_of_transcript(text)
    return turns[:-1] if turns[-1].role == "assistant" else turns
