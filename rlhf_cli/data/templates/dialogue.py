"""Turns of an episode as text and tokens, in the policy's chat template."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from transformers import PreTrainedTokenizerBase

from rlhf_cli.data.formats.conversations import Conversation, Message, Tool, ToolCall
from rlhf_cli.data.templates.chat_template import ChatTemplate
from rlhf_cli.data.templates.text import TRIAL, TemplateFault
from rlhf_cli.data.templates.tool_calls import ParsedTurn, begins_thought, call_format_of, written_call
from rlhf_cli.data.templates.turn_bridge import TurnBridge, tool_results
from rlhf_cli.data.tokenizing.decoding import text_of

_NUM_LAST = 16
"""Number of tokens that fit a reasoning marker."""


class ChatDialogue:
    """Parses sampled turns, and renders the text between them. Tool calls use the template's markers.

    Args:
        tools: environment functions in OpenAI format.
        end_ids: tokens at which the engine ends a turn.
        vocab_size: number of embeddings in the model.

    The attribute `end_ids` contains all tokens that must end a turn.

    Raises:
        UsageError: the template does not support calls or observations.
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
        self._template, self._tokenizer = template, tokenizer
        self._tools = tuple(tools)
        self._calls = call_format_of(template, tokenizer, tools) if tools else None
        # Sort the set, because the order must not depend on hashing.
        self.end_ids = tuple(sorted({*end_ids, *self._ends_of_calls()}))
        self._bridge = TurnBridge(template, tokenizer, tools, end_ids=self.end_ids, vocab_size=vocab_size)

    def _ends_of_calls(self) -> list[int]:
        """Return the token that ends only turns with calls, such as gpt-oss's <|call|>."""
        if self._calls is None or not self._calls.end:
            return []
        return [self._tokenizer.convert_tokens_to_ids(self._calls.end)]

    def read(self, token_ids: Sequence[int], *, behind: Sequence[int] | None = None) -> ParsedTurn:
        """Parse text and calls of a sampled turn.

        Args:
            behind: tokens before the turn, which may start reasoning; None for the first turn. DeepSeek R1's template
            starts none after a tool result.
        """
        if self._calls is None:
            return ParsedTurn(text_of(self._tokenizer, token_ids, skip_special_tokens=True), (), ())
        # The end token is not part of the text, whose last call it would hide.
        is_ended = bool(token_ids) and token_ids[-1] in self.end_ids
        own_ids = token_ids[:-1] if is_ended else token_ids
        opens_thought = None
        if behind is not None:
            last = text_of(self._tokenizer, behind[-_NUM_LAST:], skip_special_tokens=False)
            opens_thought = begins_thought(last)
        text = text_of(self._tokenizer, own_ids, skip_special_tokens=False)
        return self._calls.parse(text, opens_thought=opens_thought)

    def written(self, text: str) -> list[int]:
        """Tokenize a turn that was not sampled, up to its first end token, which is added if missing."""
        # Text without an end would continue into the observation.
        ids = list(self._tokenizer(text, add_special_tokens=False)["input_ids"])
        end = next((place for place, token in enumerate(ids) if token in self.end_ids), None)
        return [*ids, self._end_of(ids)] if end is None else ids[: end + 1]

    def _end_of(self, token_ids: Sequence[int]) -> int:
        """Return the end token of such a turn. Templates may end a turn before tool results differently."""
        calls = self.read(token_ids).calls
        try:
            if calls:
                result = tool_results([(calls[0].name, "")], first=0)
                known = self._bridge.after(Conversation(TRIAL[:2]), result, last_id=-1)
            else:
                known = self._tokenizer(self._template.ends_of_turn[0], add_special_tokens=False)["input_ids"]
        except TemplateFault:
            known = []
        # The first of these that the engine also stops at.
        return next(end for end in (*known, self._tokenizer.eos_token_id, *self.end_ids) if end in self.end_ids)

    def example_calls(self) -> list[str]:
        """Return a turn with a made-up call per tool, in the template's notation."""
        if self._calls is None:
            return []
        calls = [ToolCall(tool["function"]["name"], _made_up(tool["function"])) for tool in self._tools]
        written = (written_call(self._template, self._tokenizer, self._calls, call) for call in calls)
        return [text for text in written if text is not None]

    def between(self, conversation: Conversation, observations: Sequence[Message], *, last_id: int) -> list[int]:
        """Return the tokens between a sampled turn with last token `last_id` and the next turn."""
        return self._bridge.after(self._whole(conversation), observations, last_id=last_id)

    def opened(self, conversation: Conversation, observation: str) -> list[int]:
        """Return the prompt with an observation appended to the last message."""
        return self._bridge.opening(self._whole(conversation), observation)

    def prompt(self, conversation: Conversation) -> list[int]:
        """Render a conversation up to the next turn. Control tokens in messages become plain text.

        Raises:
            TemplateFault: the template rejects the conversation, or a token has no embedding.
        """
        return self._bridge.prompt(self._whole(conversation))

    def token_text(self, token_id: int) -> str:
        """Decode a single token."""
        return text_of(self._tokenizer, [token_id], skip_special_tokens=False)

    def _whole(self, conversation: Conversation) -> Conversation:
        return replace(conversation, tools=self._tools)


_MADE_UP: dict[object, object] = {"integer": 1, "number": 1.0, "boolean": True, "array": [], "object": {}}
"""Sample argument values by JSON type; other types are text."""


def _made_up(function: Tool) -> dict[str, object]:
    """Return sample arguments for a tool's required parameters."""
    parameters = function.get("parameters") or {}
    schemas = parameters.get("properties") or {}
    return {name: _made_up_value(schemas.get(name) or {}) for name in parameters.get("required", ())}


def _made_up_value(schema: Mapping[str, Any]) -> object:
    return schema["enum"][0] if schema.get("enum") else _MADE_UP.get(str(schema.get("type")), "1")
