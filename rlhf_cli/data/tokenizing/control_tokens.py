"""Finds special tokens in the text of messages, calls and tools, which the tokenizer reads as control tokens."""

import json
import re
from collections.abc import Iterator

from transformers import PreTrainedTokenizerBase

from rlhf_cli.data.formats.conversations import Conversation


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
