"""Turns of an episode as text and tokens, by the chat template of the policy."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from transformers import PreTrainedTokenizerBase

from rlhf_cli.data.formats.conversations import Conversation, Message
from rlhf_cli.data.templates.chat_template import ChatTemplate
from rlhf_cli.data.templates.tool_calls import ParsedTurn, call_format_of
from rlhf_cli.data.templates.turn_bridge import TurnBridge
from rlhf_cli.data.tokenizing.decoding import text_of


class ChatDialogue:
    """Reads sampled turns and writes what stands between them. With tools, calls are read by the template's own marks.

    Args:
        tools: functions of the environment in OpenAI's form.
        end_ids: tokens at which the engine ends a turn.
        vocab_size: embeddings of the model.

    `end_ids` of the object are tokens at which a turn has to end.

    Raises:
        UsageError: the template has no place for calls or observations.
    """

    def __init__(
        self,
        template: ChatTemplate,
        tokenizer: PreTrainedTokenizerBase,
        tools: Sequence[dict[str, Any]],
        *,
        end_ids: Sequence[int],
        vocab_size: int,
    ) -> None:
        self._tokenizer = tokenizer
        self._tools = tuple(tools)
        self._calls = call_format_of(template, tokenizer, tools) if tools else None
        self.end_ids = tuple(sorted({*end_ids, *self._ends_of_calls()}))
        self._bridge = TurnBridge(template, tokenizer, tools, end_ids=self.end_ids, vocab_size=vocab_size)

    def _ends_of_calls(self) -> list[int]:
        """Return the token that ends a turn of calls, as gpt-oss's <|call|>, which ends no other turn."""
        if self._calls is None or not self._calls.end:
            return []
        return [self._tokenizer.convert_tokens_to_ids(self._calls.end)]

    def read(self, token_ids: Sequence[int]) -> ParsedTurn:
        """Return the text and the calls of a sampled turn."""
        if self._calls is None:
            return ParsedTurn(text_of(self._tokenizer, token_ids, skip_special_tokens=True), (), ())
        is_ended = bool(token_ids) and token_ids[-1] in self.end_ids
        own_ids = token_ids[:-1] if is_ended else token_ids
        return self._calls.parse(text_of(self._tokenizer, own_ids, skip_special_tokens=False))

    def between(self, conversation: Conversation, observations: Sequence[Message], *, last_id: int) -> list[int]:
        """Return the tokens from the end of a sampled turn, whose last token is `last_id`, to the start of the next."""
        return self._bridge.after(self._whole(conversation), observations, last_id=last_id)

    def opened(self, conversation: Conversation, observation: str) -> list[int]:
        """Return the prompt with an observation behind the text of the last message."""
        return self._bridge.opening(self._whole(conversation), observation)

    def _whole(self, conversation: Conversation) -> Conversation:
        return replace(conversation, tools=self._tools)
