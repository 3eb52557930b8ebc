"""Renders conversations and documents as text pieces, with or without a chat template.

Tokenization is in `tokenizing`.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property

from transformers import PreTrainedTokenizerBase

from rlhf_cli.config.data import RESERVED, TemplateConfig
from rlhf_cli.data.formats.conversations import Conversation, Document, Message, Span
from rlhf_cli.data.templates.chat_template import ChatTemplate, Rendered
from rlhf_cli.data.templates.text import TemplateFault


@dataclass(frozen=True, slots=True)
class Pieces:
    """Texts of one sequence, tokenized separately and concatenated.

    Text from a chat template is a single piece with all special tokens. For `plain` text, BOS and EOS tokens are added,
    and prompt and response are separate pieces, so that training uses exactly the prompt tokens of generation.
    """

    texts: tuple[Rendered, ...]
    plain: bool


class Renderer:
    """Renders with the chat template, or with `input_template` if it is disabled."""

    def __init__(self, config: TemplateConfig, tokenizer: PreTrainedTokenizerBase) -> None:
        self._config = config
        self._tokenizer = tokenizer
        self._of_rows: dict[str, ChatTemplate] = {}

    @cached_property
    def template(self) -> ChatTemplate:
        """The tokenizer's chat template. Raises UsageError if it is missing or unusable."""
        return ChatTemplate(self._tokenizer, self._kwargs)

    @cached_property
    def _kwargs(self) -> dict[str, object]:
        return dict(json.loads(self._config.chat_template_kwargs))

    def _template_for(self, row_kwargs: Mapping[str, object]) -> ChatTemplate:
        """Return the template with a row's variables, which override the settings. Equal variables share a template."""
        if not row_kwargs:
            return self.template
        if taken := sorted(RESERVED & row_kwargs.keys()):
            raise TemplateFault(f"chat_template_kwargs: {taken[0]!r} is set by this program")
        # Templates are slow to analyze, and rows usually have few different variables.
        key = json.dumps(row_kwargs, sort_keys=True, default=str)
        if key not in self._of_rows:
            self._of_rows[key] = ChatTemplate(self._tokenizer, {**self._kwargs, **row_kwargs})
        return self._of_rows[key]

    @property
    def end_ids(self) -> tuple[int, ...]:
        """The chat template's end-of-turn token, if used and available."""
        return self.template.end_ids if self._config.apply_chat_template else ()

    def example(self, example: Conversation | Document, row_kwargs: Mapping[str, object] | None = None) -> Pieces:
        """Render a training example. Raises TemplateFault if that fails.

        Args:
            row_kwargs: template variables from the row.
        """
        if row_kwargs and (isinstance(example, Document) or not self._config.apply_chat_template):
            raise TemplateFault("chat_template_kwargs need a chat template, and this row is read without one")
        if isinstance(example, Document):
            return Pieces((_whole(example.text),), plain=True)
        if self._config.apply_chat_template:
            conversation = example.with_system_prompt(self._config.system_prompt)
            rendered = self._template_for(row_kwargs or {}).example(conversation)
            return Pieces((_with_marks(rendered, conversation.messages),), plain=False)
        *before, response = example.messages
        _refuse_tools(example)
        whole = response.with_reasoning_in_text()
        answer = replace(_whole(whole.content), num_inlined=int(bool(response.reasoning)), left_out=whole.left_out)
        if response.loss_weight != 1:
            answer = replace(answer, weights=(response.loss_weight,) * len(answer.spans))
        if response.loss_weight == 0:  # without a span, EOS is not trained either
            # Mark the answer as excluded, so that it is counted as such.
            answer = replace(answer, spans=(), weights=(), left_out=((0, len(answer.text)),))
        return Pieces((Rendered(self._around(tuple(before)), (), None), answer), plain=True)

    def prompt(self, conversation: Conversation, row_kwargs: Mapping[str, object] | None = None) -> str:
        """Render a generation prompt. Raises TemplateFault if that fails."""
        if self._config.apply_chat_template:
            template = self._template_for(row_kwargs or {})
            return template.prompt(conversation.with_system_prompt(self._config.system_prompt))
        if row_kwargs:
            raise TemplateFault("chat_template_kwargs need a chat template, and this row is read without one")
        _refuse_tools(conversation)
        return self._around(conversation.messages)

    def _around(self, messages: tuple[Message, ...]) -> str:
        """Render the single user message with the input template."""
        if [message.role for message in messages] != ["user"]:
            roles = ", ".join(message.role for message in messages)
            raise TemplateFault(f"without a chat template there is one prompt and its response, not {roles} before it")
        return in_input_template(messages[0].content, self._config.input_template)


def in_input_template(text: str, input_template: str | None) -> str:
    """Insert a prompt in the input template, in which a literal \n is a line break; without a template, return the
    text.
    """
    return (input_template or "{}").replace("\\n", "\n").replace("{}", text)


def _with_marks(rendered: Rendered, messages: tuple[Message, ...]) -> Rendered:
    """Add the loss weights of turns, and the characters excluded by markers: full turns, or parts of their content."""
    answers = [message for message in messages if message.role == "assistant"]
    left_out: list[Span] = []
    for (start, stop), answer in zip(rendered.spans, answers, strict=True):
        if answer.loss_weight == 0:
            left_out.append((start, stop))
        elif answer.left_out:
            place = _place_of(answer.content, rendered.text, start, stop)
            # Clip to the turn, because the content may extend beyond the trained span.
            left_out += [(max(place + begin, start), min(place + end, stop)) for begin, end in answer.left_out]
    weights = tuple(answer.loss_weight for answer in answers)
    if any(weight not in (0, 1) for weight in weights):
        rendered = replace(rendered, weights=weights)
    return replace(rendered, left_out=tuple(left_out)) if left_out else rendered


def _place_of(content: str, text: str, start: int, stop: int) -> int:
    """Return the position of the content's first character; templates may strip surrounding space."""
    kept = content.strip()
    if text.count(kept, start, stop) != 1:
        raise TemplateFault(
            f"a mark leaves out characters of the assistant's {content[:40]!r}, but the chat template does not write "
            "this text once and as it is"
        )
    return text.find(kept, start, stop) - (len(content) - len(content.lstrip()))


def _whole(text: str) -> Rendered:
    """Return the text with all of it trained, or nothing if it is blank."""
    return Rendered(text, ((0, len(text)),) if text.strip() else (), None)


def _refuse_tools(conversation: Conversation) -> None:
    """Raise TemplateFault if the conversation requires a chat template."""
    if conversation.pictures:
        raise TemplateFault("pictures need a chat template")
    if conversation.tools or any(message.tool_calls for message in conversation.messages):
        raise TemplateFault("tools and tool calls need a chat template")
