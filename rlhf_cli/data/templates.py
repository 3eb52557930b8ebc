"""Chat templates: conversations as text, and which characters of that text the assistant wrote.

Nothing is tokenised here but a trial conversation, which shows what the template ends a turn with. A template whose
assistant turns cannot be told apart from what it writes around them is refused.
"""

import re
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jinja2
from transformers import PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import render_jinja_template

from rlhf_cli.data.conversations import Conversation, Message
from rlhf_cli.errors import UsageError

GENERATION_BLOCK = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")
SPACE = re.compile(r"\s*")
TRIAL = (
    Message("user", "first question"),
    Message("assistant", "first answer"),
    Message("user", "second question"),
    Message("assistant", "second answer"),
)
"""Rendered once to learn how the template ends a turn; no template has a reason to alter these words."""

Span = tuple[int, int]


class TemplateFault(ValueError):
    """Why the template makes it impossible to train on a conversation."""


@dataclass(frozen=True, slots=True)
class Rendered:
    """A conversation as text. `spans` bound the characters that carry loss: each assistant's text and end of turn.

    `prompt` is what a rollout of the first turn would start from, where the text continues exactly that, else None.
    """

    text: str
    spans: tuple[Span, ...]
    prompt: str | None


class ChatTemplate:
    """The tokenizer's chat template. Raises UsageError where it has none."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        if tokenizer.chat_template is None:
            raise UsageError(
                "the tokenizer has no chat template: give one with --tokenizer_chat_template FILE, "
                "or train on plain text with --no_apply_chat_template and --input_template"
            )
        self._tokenizer = tokenizer
        self._template: str = tokenizer.get_chat_template()
        self._special_tokens = dict(tokenizer.special_tokens_map)
        self._marks_turns = GENERATION_BLOCK.search(self._template) is not None

    @cached_property
    def ends_of_turn(self) -> tuple[str, ...]:
        """The tokens that the template writes after the assistant, as text: after the last turn first, then others.

        Raises TemplateFault if it ends turns with no token of its own.
        """
        text, _ = self._render(TRIAL)
        encoding = self._tokenizer(text, add_special_tokens=False)
        ends = []
        for answer in (TRIAL[3].content, TRIAL[1].content):
            found = text.find(answer)
            if found < 0:
                raise TemplateFault("the chat template leaves out or alters what the assistant says")
            place = skip_space(text, found + len(answer))
            token = encoding.char_to_token(place) if place < len(text) else None
            added = None if token is None else self._tokenizer.added_tokens_decoder.get(encoding["input_ids"][token])
            if added is None or not text.startswith(added.content, place):
                follows = repr(text[found + len(answer) :][:30]) if place < len(text) else "nothing"
                raise TemplateFault(
                    f"the chat template writes no end-of-turn token after the assistant's text ({follows} is no "
                    "special token of the tokenizer), so the model would never learn to stop"
                )
            ends.append(added.content)
        return tuple(dict.fromkeys(ends))

    def prompt(self, conversation: Conversation) -> str:
        """Text that the assistant's next turn would continue. Raises TemplateFault if the template refuses it."""
        return self._render(conversation.messages, add_generation_prompt=True)[0]

    def example(self, conversation: Conversation) -> Rendered:
        """Text of a whole conversation and the spans of its assistant turns.

        Spans come from the template's `{% generation %}` blocks if it has them, else from comparing the text with
        that of the messages before each turn. Raises TemplateFault where a turn is not in the text as it was given
        (white space around it aside), or without an end of turn.
        """
        text, marked = self._render(conversation.messages)
        if self._marks_turns:
            return Rendered(text, self._marked_turns(conversation, text, marked), None)
        spans: list[Span] = []
        prompt = None
        for number, message in enumerate(conversation.messages):
            if message.role != "assistant":
                continue
            before = self._render(conversation.messages[:number], add_generation_prompt=True)[0]
            floor = spans[-1][1] if spans else 0
            span = self._turn_at(text, len(before), message.content) if text.startswith(before) else None
            if span and not spans:
                prompt = before
            span = span or self._turn_behind(conversation.messages[:number], text, message.content, floor)
            spans.append(span)
        return Rendered(text, tuple(spans), prompt)

    def _render(self, messages: tuple[Message, ...], *, add_generation_prompt: bool = False) -> tuple[str, list[Span]]:
        """Text, and the spans of its generation blocks (none for a prompt)."""
        chat: list[dict[str, Any]] = [{"role": m.role, "content": m.content} for m in messages]
        try:
            texts, marked = render_jinja_template(
                conversations=[chat],
                chat_template=self._template,
                return_assistant_tokens_mask=self._marks_turns and not add_generation_prompt,
                add_generation_prompt=add_generation_prompt,
                **self._special_tokens,
            )
        except (jinja2.TemplateError, TypeError) as error:
            raise TemplateFault(f"the chat template does not take this conversation: {error}") from error
        return texts[0], marked[0] if marked else []

    def _turn_at(self, text: str, start: int, content: str) -> Span | None:
        """Span from `start` over this content and the end of turn; None if the text goes on otherwise."""
        body = content.strip()
        begin = skip_space(text, start)
        if not text.startswith(body, begin):
            return None
        stop = skip_space(text, begin + len(body))
        end = next((end for end in self.ends_of_turn if text.startswith(end, stop)), None)
        return None if end is None else (start, stop + len(end))

    def _turn_behind(self, before: tuple[Message, ...], text: str, content: str, floor: int) -> Span:
        """Span of a turn before which the template writes more than, or other than, its generation prompt.

        Qwen 3 puts an empty thought there, DeepSeek R1 opens one in the generation prompt alone.
        """
        body = content.strip()
        for prompted in (True, False):
            context = self._render(before, add_generation_prompt=prompted)[0]
            shared = _num_shared(context, text)
            if prompted and shared < len(context):
                continue
            begin = text.find(body, max(shared, floor))
            while begin >= 0 and not any(end in text[max(shared, floor) : begin] for end in self.ends_of_turn):
                span = self._turn_at(text, begin, content)
                if span is not None:
                    return span
                begin = text.find(body, begin + 1)
        raise TemplateFault(f"the chat template leaves out or alters what the assistant says: {content[:60]!r}")

    def _marked_turns(self, conversation: Conversation, text: str, marked: list[Span]) -> tuple[Span, ...]:
        """The generation blocks, less white space behind the end of turn."""
        turns = [message.content for message in conversation.messages if message.role == "assistant"]
        if len(turns) != len(marked):
            raise TemplateFault(
                f"the chat template has {len(marked)} generation blocks for {len(turns)} assistant turns"
            )
        spans = []
        for content, (start, stop) in zip(turns, marked, strict=True):
            span = self._turn_at(text, start, content)
            if span is None or text[span[1] : stop].strip():
                raise TemplateFault(
                    f"the chat template's generation block {text[start:stop][:60]!r} is not the assistant's text "
                    f"{content[:60]!r} and the end of turn"
                )
            if span[1] > stop:
                raise TemplateFault(
                    "the chat template's generation block ends before the end-of-turn token "
                    f"{text[stop : span[1]]!r}, so the model would never learn to stop"
                )
            spans.append(span)
        return tuple(spans)


def _num_shared(first: str, second: str) -> int:
    """Characters at the start that two texts have in common."""
    pairs = enumerate(zip(first, second, strict=False))
    return next((place for place, (a, b) in pairs if a != b), min(len(first), len(second)))


def skip_space(text: str, position: int) -> int:
    """Position of the first character from `position` on that is not white space."""
    match = SPACE.match(text, position)
    return match.end() if match else position
