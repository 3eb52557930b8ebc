"""Counts rows with special tokens in the text of messages, calls and tools, which the tokenizer reads as control
tokens.
"""

import json
import re
from collections.abc import Iterator
from typing import Protocol

from transformers import PreTrainedTokenizerBase

from rlhf_cli.data.formats.conversations import Conversation
from rlhf_cli.data.reading.sources import Row


class ControlReport(Protocol):
    """Report of rows with special tokens in messages: rows per token, and the first row."""

    control_rows: int
    control_tokens: dict[str, int]
    control_at: str


class ControlTokens:
    """Special tokens of a tokenizer."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        added = {token.content for token in tokenizer.added_tokens_decoder.values() if token.special}
        # Longest first, because one token may be the start of another.
        longest_first = sorted(filter(None, added), key=lambda token: (-len(token), token))
        self._pattern = re.compile("|".join(map(re.escape, longest_first))) if longest_first else None

    def within(self, conversation: Conversation) -> frozenset[str]:
        """Return special tokens in the text of messages, calls and tools."""
        if self._pattern is None:
            return frozenset()
        return frozenset(token for text in _texts(conversation) for token in self._pattern.findall(text))


def _texts(conversation: Conversation) -> Iterator[str]:
    for message in conversation.messages:
        yield from (message.content, message.reasoning)
        for call in message.tool_calls:
            yield from (call.name, json.dumps(call.arguments, ensure_ascii=False, default=str))
    for tool in conversation.tools:
        yield json.dumps(tool, ensure_ascii=False, default=str)


def note_controls(report: ControlReport, found: frozenset[str], row: Row) -> None:
    """Count a row with special tokens in its messages."""
    if not found:
        return
    report.control_rows += 1
    report.control_at = report.control_at or row.where
    for token in sorted(found):
        report.control_tokens[token] = report.control_tokens.get(token, 0) + 1


def controls_phrase(report: ControlReport) -> str:
    """Return the counts for a report; "" without such rows."""
    if not report.control_rows:
        return ""
    tokens = ", ".join(f"{token} in {count:,}" for token, count in report.control_tokens.items())
    return (
        f"{report.control_rows:,} with special tokens in the text of their messages, calls or tools, which become "
        f"control tokens ({tokens}; first: {report.control_at})"
    )
