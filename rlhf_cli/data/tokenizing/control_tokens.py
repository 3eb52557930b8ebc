"""Special tokens that messages write in their text: the tokenizer reads them as control tokens, so rows are counted."""

import re
from collections.abc import Iterable
from typing import Protocol

from transformers import PreTrainedTokenizerBase

from rlhf_cli.data.formats.conversations import Message
from rlhf_cli.data.reading.sources import Row


class ControlReport(Protocol):
    """A report of rows with special tokens in their messages: rows by token, and the first row."""

    control_rows: int
    control_tokens: dict[str, int]
    control_at: str


class ControlTokens:
    """The special tokens of a tokenizer."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        added = {token.content for token in tokenizer.added_tokens_decoder.values() if token.special}
        longest_first = sorted(filter(None, added), key=lambda token: (-len(token), token))
        self._pattern = re.compile("|".join(map(re.escape, longest_first))) if longest_first else None

    def within(self, messages: Iterable[Message]) -> frozenset[str]:
        """Return the special tokens in the text of the messages."""
        if self._pattern is None:
            return frozenset()
        texts = (text for message in messages for text in (message.content, message.reasoning))
        return frozenset(token for text in texts for token in self._pattern.findall(text))


def note_controls(report: ControlReport, found: frozenset[str], row: Row) -> None:
    """Count a row with special tokens in its messages."""
    if not found:
        return
    report.control_rows += 1
    report.control_at = report.control_at or row.where
    for token in sorted(found):
        report.control_tokens[token] = report.control_tokens.get(token, 0) + 1


def controls_phrase(report: ControlReport) -> str:
    """Return the count as a part of a report's line; "" without such rows."""
    if not report.control_rows:
        return ""
    tokens = ", ".join(f"{token} in {count:,}" for token, count in report.control_tokens.items())
    return (
        f"{report.control_rows:,} with special tokens in the text of their messages, which become control tokens "
        f"({tokens}; first: {report.control_at})"
    )
