"""Renders and tokenizes rows, and checks that trained tokens decode to the assistant's text."""

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Generic, TypeVar

from transformers import PreTrainedTokenizerBase

from rlhf_cli.config.data import TemplateConfig
from rlhf_cli.data.formats.conversations import Conversation, Document
from rlhf_cli.data.pictures.expanding import expanded
from rlhf_cli.data.pictures.reading import PictureReader, made_in_order, refuse_pictures
from rlhf_cli.data.pictures.sources import SourcePicture
from rlhf_cli.data.reading.columns import refuse_half_characters
from rlhf_cli.data.reading.sources import Row, RowFault
from rlhf_cli.data.templates.kwargs import template_kwargs_of
from rlhf_cli.data.templates.prompt_templates import load_prompt_template
from rlhf_cli.data.templates.rendering import Pieces, Renderer
from rlhf_cli.data.templates.text import TRIAL, TemplateFault
from rlhf_cli.data.tokenizing.saved_tokenizer import SavedTokenizer
from rlhf_cli.data.tokenizing.tokenizer import Tokeniser, Tokens, require_offsets
from rlhf_cli.errors import UsageError

T = TypeVar("T")


class _ControlTokens:
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


@dataclass(frozen=True, slots=True)
class Encoded(Generic[T]):
    """A parsed row with its tokenized examples."""

    row: Row
    read: T
    tokens: list[Tokens]


@dataclass(frozen=True, slots=True)
class Draft:
    """A parsed row with its rendered text, or the error.

    - `read`: the parsed row; a prompt's ground truth.
    - `texts`, `prompt`: rendered examples, or the rendered prompt; `teacher_prompt`: the teacher's, if it differs.
    - `controls`: special tokens in the row's messages.
    - `pictures`: images per example, after they are measured.
    """

    row: Row
    read: Any
    examples: Sequence[Conversation | Document]
    texts: list[Pieces]
    fault: RowFault | None = None
    prompt: str = ""
    teacher_prompt: str | None = None
    controls: frozenset[str] = frozenset()
    pictures: Sequence[tuple[SourcePicture, ...]] = ()


Found = list[Tokens] | RowFault
"""Tokens of a row's examples, or the error."""
Batch = tuple[int, list[Draft], list[Found]]
"""Number of rows up to the end of the batch, parsed rows, and tokens."""


class Encoder(ABC):
    """Tokenizes parsed rows. `reader` loads images; None for text models."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, reader: PictureReader | None) -> None:
        self.reader = reader
        self.is_fast = tokenizer.is_fast
        self._tokeniser = Tokeniser(tokenizer)
        self._controls = _ControlTokens(tokenizer)
        self._saved = SavedTokenizer.of(tokenizer)

    def placed(self, row: Row, examples: list[Conversation | Document]) -> list[Conversation | Document]:
        """Place a row's images at the markers. Raises RowFault."""
        if self.reader is None:
            refuse_pictures(row, examples)
            return examples
        return [self.reader.example(row, example) for example in examples]

    def measured(self, drafts: list[Draft]) -> list[Draft]:
        """Measure the drafts' images, and add images or the error."""
        return drafts if self.reader is None else made_in_order(partial(_measured, self.reader), drafts)

    def controls(self, examples: list[Conversation | Document]) -> frozenset[str]:
        """Return special tokens written as text in a row's messages."""
        conversations = (example for example in examples if isinstance(example, Conversation))
        return frozenset[str]().union(*map(self._controls.within, conversations))

    @abstractmethod
    def tokens(self, drafts: list[Draft], *, num_checked: int) -> list[Found]:
        """Tokenize all rows. The first `num_checked` may be verified.

        Raises UsageError if a text is lost. This is caused by the template or tokenizer, not by the row, so the row is
        not dropped.
        """

    def _expanded(self, draft: Draft, tokens: list[Tokens]) -> list[Tokens]:
        """Return a row's tokens with expanded images. Raises RowFault."""
        if self.reader is None:
            return tokens
        try:
            pairs = zip(tokens, draft.pictures, strict=True)
            return [expanded(part, pictures, self.reader.family) for part, pictures in pairs]
        except TemplateFault as fault:
            raise draft.row.error(str(fault)) from fault


class ExampleEncoder(Encoder):
    """Renders and tokenizes training examples, and checks that trained tokens decode to the assistant's text."""

    def __init__(
        self, template: TemplateConfig, tokenizer: PreTrainedTokenizerBase, reader: PictureReader | None
    ) -> None:
        # Fail before any row is read.
        require_offsets(tokenizer)
        super().__init__(tokenizer, reader)
        self._renderer = Renderer(template, tokenizer)

    def tried_template(self) -> str:
        """Test the chat template, and return its end-of-turn text.

        Token checks are skipped if the vocabulary cannot represent the English test text (digits, DNA); then only the
        rows' text is checked.

        Raises UsageError if the template is unusable.
        """
        try:
            pieces = self._renderer.example(Conversation(TRIAL))
            if all(self._tokeniser.writes(message.content) for message in TRIAL):
                self._try_tokens(pieces)
        except TemplateFault as fault:
            raise UsageError(f"{fault}; set another one with --tokenizer_chat_template FILE") from fault
        return " or ".join(self._renderer.template.ends_of_turn)

    def _try_tokens(self, pieces: Pieces) -> None:
        (tokens,) = self._tokeniser.examples([pieces])
        if isinstance(tokens, TemplateFault):
            raise tokens
        self._tokeniser.check(tokens, pieces)

    def rendered(self, row: Row, examples: list[Conversation | Document]) -> list[Pieces]:
        """Render a row's examples. Raises RowFault if that fails."""
        try:
            row_kwargs = template_kwargs_of(row)
            found = [self._renderer.example(example, row_kwargs) for example in examples]
        except TemplateFault as fault:
            raise row.error(str(fault)) from fault
        # Check rendered text, since templates may add characters.
        for rendered in (part for pieces in found for part in pieces.texts):
            refuse_half_characters(row, rendered.text)
        return found

    def tokens(self, drafts: list[Draft], *, num_checked: int) -> list[Found]:
        """Tokenize all rows' examples. The first `num_checked` are decoded and compared with their text.

        Raises:
            UsageError: the texts differ, or the tokenizer loses text. This is caused by the template or tokenizer, not
            by the row, so the row is not dropped.
        """
        # Tokenize all examples in one call: the tokenizer uses threads within it.
        examples = [pieces for draft in drafts for pieces in draft.texts]
        if self._saved is not None:
            self._saved.compare(piece.text for pieces in examples for piece in pieces.texts)
        tokenised = iter(self._tokeniser.examples(examples))
        found: list[Found] = []
        for draft in drafts:
            parts = [next(tokenised) for _ in draft.texts]
            try:
                tokens = self._sound(draft, parts, is_checked=num_checked > 0)
            except RowFault as fault:
                found.append(fault)
                continue
            # Decrease only for rows without errors, so that the intended number is checked.
            num_checked -= 1
            found.append(tokens)
        return found

    def _sound(self, draft: Draft, parts: list[Tokens | TemplateFault], *, is_checked: bool) -> list[Tokens]:
        """Return a row's tokens with expanded images. Raises RowFault."""
        fault = draft.fault or next((part for part in parts if isinstance(part, TemplateFault)), None)
        if fault is not None:
            raise fault if isinstance(fault, RowFault) else draft.row.error(str(fault))
        tokens = [part for part in parts if isinstance(part, Tokens)]
        if is_checked:
            self._check(draft, tokens)
        # After the check, which compares the text including excluded ranges.
        return self._expanded(draft, [part.without_left_out() for part in tokens])

    def _check(self, draft: Draft, tokens: list[Tokens]) -> None:
        try:
            for part, pieces in zip(tokens, draft.texts, strict=True):
                self._tokeniser.check(part, pieces)
        except TemplateFault as fault:
            raise UsageError(f"{draft.row.where}: {fault}") from fault


class PromptEncoder(Encoder):
    """Renders and tokenizes prompts, with one placeholder per image before they are expanded."""

    def __init__(
        self, template: TemplateConfig, tokenizer: PreTrainedTokenizerBase, reader: PictureReader | None
    ) -> None:
        super().__init__(tokenizer, reader)
        own = None
        if template.prompt_template is not None:
            mark = None if reader is None else reader.family.mark
            own = load_prompt_template(
                template.prompt_template, system_prompt=template.system_prompt, picture_mark=mark
            )
        # A custom prompt template writes the text itself, so the tokenizer adds BOS.
        self._plain = own is not None or not template.apply_chat_template
        self._renderer = own or Renderer(template, tokenizer)

    @property
    def end_ids(self) -> tuple[int, ...]:
        """End-of-response tokens of the chat template."""
        return self._renderer.end_ids if isinstance(self._renderer, Renderer) else ()

    def rendered(self, row: Row, conversation: Conversation) -> str:
        """Render a prompt. Raises TemplateFault, or RowFault for half of a character."""
        text = self._renderer.prompt(conversation, template_kwargs_of(row))
        refuse_half_characters(row, text)
        return text

    def tokens(self, drafts: list[Draft], *, num_checked: int) -> list[Found]:
        """Tokenize all prompts, each followed by the teacher's if it differs, without verification."""
        texts = [text for draft in drafts if draft.fault is None for text in _prompts(draft)]
        if self._saved is not None:
            self._saved.compare(texts)
        ids = iter(self._tokeniser.prompts(texts, plain=self._plain))
        return [draft.fault or self._sound(draft, [next(ids) for _ in _prompts(draft)]) for draft in drafts]

    def _sound(self, draft: Draft, ids: list[list[int]]) -> Found:
        """Return the tokens of a row's prompts, or the error."""
        try:
            own, *teachers = (Tokens(one, []) for one in ids)
            (tokens,) = self._expanded(draft, [own])
            return [tokens, *teachers] if tokens.ids else draft.row.error("the prompt is empty")
        except RowFault as fault:
            return fault


def _prompts(draft: Draft) -> list[str]:
    return [draft.prompt] if draft.teacher_prompt is None else [draft.prompt, draft.teacher_prompt]


def _measured(reader: PictureReader, draft: Draft) -> Draft:
    try:
        return draft if draft.fault else replace(draft, pictures=reader.pictures(draft.row, draft.examples))
    except RowFault as fault:
        return replace(draft, fault=fault)


def _texts(conversation: Conversation) -> Iterator[str]:
    for message in conversation.messages:
        yield from (message.content, message.reasoning)
        for call in message.tool_calls:
            yield from (call.name, json.dumps(call.arguments, ensure_ascii=False, default=str))
    for tool in conversation.tools:
        yield json.dumps(tool, ensure_ascii=False, default=str)
