"""Prompts with ground truth for online training and evaluation.

Prompts are stored in row order in a memory-mapped temporary file.
"""

import collections.abc
import hashlib
import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar

import pyarrow as pa
from transformers import PreTrainedTokenizerBase

from rlhf_cli.agents.records import EnvironmentDescription
from rlhf_cli.config.data import DEFAULT_TEMPLATE, PromptConfig, TemplateConfig
from rlhf_cli.config.scoring import RewardConfig
from rlhf_cli.data.formats.conversations import Conversation, plain_message
from rlhf_cli.data.judges import Judges
from rlhf_cli.data.pictures.expanding import expanded
from rlhf_cli.data.pictures.marks import TEXT_MARK
from rlhf_cli.data.pictures.reading import BATCH_ROWS as PICTURE_BATCH_ROWS
from rlhf_cli.data.pictures.reading import PictureReader, check_image_key, made_in_order, refuse_pictures
from rlhf_cli.data.pictures.sources import SourcePicture
from rlhf_cli.data.pictures.storing import pictures_at, schema_with_pictures, stored_pictures
from rlhf_cli.data.prompt_report import PromptReport
from rlhf_cli.data.prompt_words import PromptWords, words_of
from rlhf_cli.data.reading.columns import described, dialogue_of, refuse_half_characters, refuse_images
from rlhf_cli.data.reading.sources import Row, RowFault, Source, batches, load_rows, read_sources
from rlhf_cli.data.store import StoredItems, StoredTable, TableWriter
from rlhf_cli.data.templates.kwargs import template_kwargs_of
from rlhf_cli.data.templates.prompt_templates import PromptTemplate, load_prompt_template
from rlhf_cli.data.templates.rendering import Renderer
from rlhf_cli.data.templates.text import TemplateFault
from rlhf_cli.data.tokenizing.control_tokens import ControlTokens, note_controls
from rlhf_cli.data.tokenizing.saved_tokenizer import SavedTokenizer
from rlhf_cli.data.tokenizing.tokenizer import Tokeniser, Tokens, note_largest
from rlhf_cli.errors import UsageError
from rlhf_cli.models.vision.pictures import PlacedPicture

A = TypeVar("A")
B = TypeVar("B")
BATCH_ROWS = 512
PASS_RATE = "pass_rate"
"""Column with the share of correct responses to a prompt."""
SCHEMA = pa.schema(
    {
        "prompt_ids": pa.list_(pa.int32()),
        "text": pa.large_string(),
        "label": pa.large_string(),
        "source": pa.string(),
        "index": pa.int64(),
        "data_source": pa.string(),
        "row": pa.large_string(),
    }
)


@dataclass(frozen=True)
class Prompt:
    """A tokenized prompt.

    - `text`: rendered text, including the template.
    - `label`: ground truth, None without.
    - `source`, `index`: dataset as named in the settings, and the row's index in it, from 0.
    - `data_source`: source name from the row.
    - `row`: JSON of the columns for reward files, or None.
    - `pictures`: images in token order. The text has one placeholder each.

    Example: row 16 of a file of sums: `Prompt([17, 10, 18, 28], "2+3=", "5", "sums.jsonl", 16)`.
    """

    prompt_ids: list[int]
    text: str
    label: str | None
    source: str
    index: int
    data_source: str | None = None
    row: str | None = None
    pictures: tuple[PlacedPicture, ...] = ()


def _prompt_at(table: StoredTable, row: int) -> Prompt:
    columns = {name: table.value(name, row) for name in SCHEMA.names}
    return Prompt(**columns, pictures=pictures_at(table, row))


@dataclass(frozen=True)
class PromptData:
    """Prompts in row order.

    - `fingerprint`: hash of all text and labels.
    - `row_of`, `conversation_of`: read a prompt's row again, or its messages with the system message from the settings.
    - `where`: file and line of a prompt's row.
    - `has_pictures`: the model supports images.
    - `end_ids`: end-of-response tokens of the chat template.
    """

    prompts: collections.abc.Sequence[Prompt]
    report: PromptReport
    fingerprint: str
    row_of: Callable[[Prompt], Row]
    conversation_of: Callable[[Prompt], Conversation]
    where: Callable[[Prompt], str]
    has_pictures: bool = False
    end_ids: tuple[int, ...] = ()


def load_prompts(
    config: PromptConfig,
    tokenizer: PreTrainedTokenizerBase,
    *,
    max_new_tokens: int,
    seed: int,
    template: TemplateConfig = DEFAULT_TEMPLATE,
    reward: RewardConfig | None = None,
    reader: PictureReader | None = None,
    environment: EnvironmentDescription | None = None,
) -> PromptData:
    """Load the prompts for these settings, with a report. `reward` determines which columns are kept for scoring.
    `reader` loads images; None for text models. With an `environment`, prompts contain its tools, and rows are kept for
    it.

    Prompts without room for `max_new_tokens` within `max_len` are dropped and counted, or raise an error, as set by
    `overlong_prompts`.

    Raises:
        UsageError: a row is invalid (the message contains file and line), or no prompt remains.
    """
    # Check before reading rows, which may take minutes.
    room = _room(config, max_new_tokens)
    rows = load_rows(
        config.prompt_data,
        split=config.prompt_split,
        probs=config.prompt_data_probs,
        seed=seed,
        max_samples=config.max_samples,
        data_format=config.data_format,
    )
    judges = Judges.of(reward)
    if environment is not None:
        # Environments receive the row's columns in `reset`.
        judges = replace(judges, keeps_rows=True)
    words = words_of(config, template, rows, judges, environment)
    check_image_key(rows, reader)
    steps = _steps(template, tokenizer, words, judges, reader)
    report = PromptReport(
        read_sources(rows, [words.formats[source.name].columns for source in rows.sources]), len(rows)
    )
    writer = TableWriter(schema_with_pictures(SCHEMA, has_pictures=reader is not None))
    fingerprint = hashlib.blake2b(digest_size=16)
    for whole in batches(rows, BATCH_ROWS if reader is None else PICTURE_BATCH_ROWS):
        kept = _kept_prompts(whole, steps, config, report, room=room)
        items = [_item(prompt, tokens) for prompt, tokens in kept]
        writer.append_columns({name: [item[name] for item in items] for name in writer.schema.names})
        for prompt, tokens in kept:
            # Rewards read these too, so a change must not be resumed.
            judged_by = [one for one in (prompt.data_source, prompt.row) if one is not None]
            digests = [standing.picture.digest.hex() for standing in tokens.pictures]
            fingerprint.update(json.dumps([prompt.text, prompt.label, *judged_by, *digests]).encode())
    if not report.prompts:
        first = "".join(f"; the first one is {listed[0]}" for listed in report.noted.values())
        raise UsageError(f"no prompt remains: {report.summary}{first}")
    sources = {source.name: source for source in rows.sources}
    origins = _Origins(sources, words)
    return PromptData(
        StoredItems(writer.finish(), _prompt_at),
        report,
        fingerprint.hexdigest(),
        origins.row_of,
        origins.conversation_of,
        origins.where,
        has_pictures=reader is not None,
        end_ids=steps.renderer.end_ids if isinstance(steps.renderer, Renderer) else (),
    )


def _item(prompt: Prompt, tokens: Tokens) -> dict[str, object]:
    """Return a prompt's stored columns."""
    return {name: getattr(prompt, name) for name in SCHEMA.names} | stored_pictures(tokens.pictures)


def _room(config: PromptConfig, max_new_tokens: int) -> int:
    """Return the maximum prompt length in tokens. Raises UsageError if it is below 1."""
    room = config.max_len - max_new_tokens
    if room < 1:
        raise UsageError(
            f"max_len {config.max_len} leaves no room for a prompt with max_new_tokens {max_new_tokens}: "
            f"raise max_len above {max_new_tokens}"
        )
    return room


def _steps(
    template: TemplateConfig,
    tokenizer: PreTrainedTokenizerBase,
    words: PromptWords,
    judges: Judges,
    reader: PictureReader | None,
) -> "_Steps":
    own = None
    if template.prompt_template is not None:
        mark = None if reader is None else reader.family.mark
        own = load_prompt_template(template.prompt_template, system_prompt=template.system_prompt, picture_mark=mark)
    # A custom prompt template writes the text itself, so the tokenizer adds BOS.
    plain = own is not None or not template.apply_chat_template
    renderer = own or Renderer(template, tokenizer)
    return _Steps(
        words,
        renderer,
        Tokeniser(tokenizer),
        ControlTokens(tokenizer),
        SavedTokenizer.of(tokenizer),
        judges,
        reader,
        plain=plain,
    )


@dataclass(frozen=True, slots=True)
class _Origins:
    """Maps prompts to their source rows."""

    sources: dict[str, Source]
    words: PromptWords

    def row_of(self, prompt: Prompt) -> Row:
        return self.sources[prompt.source].row(prompt.index)

    def conversation_of(self, prompt: Prompt) -> Conversation:
        row = self.row_of(prompt)
        # A system prompt from the settings is part of the messages, but not of the row.
        return self.words.asked(row, self.words.read(row)).with_system_prompt(self.words.system_prompt)

    def where(self, prompt: Prompt) -> str:
        return self.sources[prompt.source].where(prompt.index)


@dataclass(frozen=True, slots=True)
class _Draft:
    """A parsed row: messages, prompt text, label, and special tokens in the messages.

    `pictures` are the messages' images, after they are measured.
    """

    row: Row
    conversation: Conversation
    text: str
    label: str | None
    controls: frozenset[str]
    pictures: tuple[SourcePicture, ...] = ()


@dataclass(frozen=True, slots=True)
class _Steps:
    """Pipeline per row: read messages, render, tokenize."""

    words: PromptWords
    renderer: Renderer | PromptTemplate
    tokeniser: Tokeniser
    controls: ControlTokens
    saved: SavedTokenizer | None
    judges: Judges
    reader: PictureReader | None
    plain: bool

    def draft(self, row: Row) -> _Draft:
        """Parse a row and render its prompt. Raises RowFault."""
        conversation = self._read(row)
        try:
            text = self.renderer.prompt(self.words.asked(row, conversation), template_kwargs_of(row))
        except TemplateFault as fault:
            raise row.error(str(fault)) from fault
        refuse_half_characters(row, text)
        label = self.words.formats[row.source.name].read_label(row)
        return _Draft(row, conversation, text, label, self.controls.within(conversation))

    def measured(self, draft: _Draft) -> _Draft:
        """Measure the draft's images. Raises RowFault if one is unusable."""
        if self.reader is None:
            return draft
        return replace(draft, pictures=self.reader.pictures(draft.row, [draft.conversation])[0])

    def tokens(self, drafts: list[_Draft]) -> list[list[int]]:
        """Tokenize all prompts, with one placeholder per image.

        Raises UsageError if the tokenizer loses text that the model's tokenizer.json keeps.
        """
        if self.saved is not None:
            self.saved.compare(draft.text for draft in drafts)
        return self.tokeniser.prompts([draft.text for draft in drafts], plain=self.plain)

    def made(self, draft: _Draft, ids: list[int]) -> tuple[Prompt, Tokens]:
        """Return a row's prompt, and tokens with expanded images. Raises RowFault."""
        tokens = self._tokens(draft.row, ids, draft.pictures)
        if not tokens.ids:
            raise draft.row.error("the prompt is empty")
        return self._prompt(draft.row, tokens, draft.text, draft.label), tokens

    def _prompt(self, row: Row, tokens: Tokens, text: str, label: str | None) -> Prompt:
        source = self.judges.source_of(row)
        return Prompt(tokens.ids, text, label, row.source.name, row.index, source, self._kept(row))

    def _read(self, row: Row) -> Conversation:
        """Return a row's messages with images at the markers."""
        if self.reader is None:
            refuse_images(row)
        conversation = self.words.read(row)
        if self.reader is None:
            refuse_pictures(row, [conversation])
            return conversation
        return self.reader.placed(row, conversation)

    def _tokens(self, row: Row, ids: list[int], pictures: tuple[SourcePicture, ...]) -> Tokens:
        """Return the tokens with expanded images."""
        tokens = Tokens(ids, [])
        try:
            return tokens if self.reader is None else expanded(tokens, pictures, self.reader.family)
        except TemplateFault as fault:
            raise row.error(str(fault)) from fault

    def _kept(self, row: Row) -> str | None:
        """Return the row's columns for a reward file. The prompt is a message list if the row contains messages."""
        if not self.judges.keeps_rows:
            return None
        form = self.words.formats[row.source.name]
        messages = form.read_prompt(row).messages
        # Reward files expect the text marker of datasets instead of the internal one.
        listed = [{"role": message.role, "content": TEXT_MARK.join(message.pieces)} for message in messages]
        prompt = listed if dialogue_of(row.get(form.prompt_column)) else messages[-1].content
        columns = row if self.reader is None else self.reader.without_pictures(row)
        kept = {"prompt": prompt, "columns": columns}
        if self.words.environment is not None:
            asked = self.words.asked(row, self.words.read(row))
            kept["messages"] = [plain_message(message) for message in asked.messages]
        return json.dumps(kept, default=str)


def _kept_prompts(
    whole: list[Row], steps: _Steps, config: PromptConfig, report: PromptReport, *, room: int
) -> list[tuple[Prompt, Tokens]]:
    """Return a batch's valid prompts that fit, and update the report."""
    sound = _Sound(report, drops=config.invalid_rows == "drop")
    wanted = sound.kept(_tried(lambda row: (row, _is_wanted(row, config.pass_rate_range)), row) for row in whole)
    # Filter by pass rate first, which saves rendering.
    batch = [row for row, is_wanted in wanted if is_wanted]
    report.dropped_by_pass_rate += len(wanted) - len(batch)
    tried = [_tried(steps.draft, row) for row in batch]
    drafts = sound.kept(tried if steps.reader is None else made_in_order(partial(_tried, steps.measured), tried))
    listed = zip(drafts, steps.tokens(drafts), strict=True)
    made = sound.kept(_tried(lambda one: (one[0], *steps.made(*one)), one) for one in listed)
    for draft, prompt, _ in made:
        note_largest(report, prompt.prompt_ids, draft.row)
        note_controls(report, draft.controls, draft.row)
    kept = [(prompt, tokens) for draft, prompt, tokens in made if _fits(draft.row, prompt, room, config, report)]
    report.prompts += len(kept)
    report.labelled += sum(prompt.label is not None for prompt, _ in kept)
    report.longest = max([report.longest, *(len(prompt.prompt_ids) for prompt, _ in kept)])
    return kept


@dataclass(frozen=True, slots=True)
class _Sound:
    """Collects results without errors. Rows with errors are counted and dropped if enabled."""

    report: PromptReport
    drops: bool

    def kept(self, tried: Iterable[B | RowFault]) -> list[B]:
        """Return the successful results of a step."""
        found: list[B] = []
        for made in tried:
            if not isinstance(made, RowFault):
                found.append(made)
            elif self.drops:
                self.report.note("dropped_invalid", str(made))
            else:
                raise RowFault(f"{made}; use --invalid_rows drop to skip such rows") from made
        return found


def _tried(step: Callable[[A], B], item: A | RowFault) -> B | RowFault:
    """Apply a step to an item. Returns its error, or the error of an earlier step."""
    try:
        return item if isinstance(item, RowFault) else step(item)
    except RowFault as fault:
        return fault


def _is_wanted(row: Row, limits: tuple[float, float] | None) -> bool:
    """Return whether the row's pass rate is within the limits. An unknown pass rate (null) is not."""
    if limits is None:
        return True
    rate = row.get(PASS_RATE)
    if PASS_RATE not in row or not isinstance(rate, int | float | None) or isinstance(rate, bool):
        raise row.error(f"column {PASS_RATE!r} (--pass_rate_range) is {described(rate, row, PASS_RATE)}")
    return rate is not None and limits[0] <= rate <= limits[1]


def _fits(row: Row, prompt: Prompt, room: int, config: PromptConfig, report: PromptReport) -> bool:
    length = len(prompt.prompt_ids)
    if length > room and config.overlong_prompts == "error":
        raise row.error(f"the prompt's {length} tokens leave no room for max_new_tokens in max_len {config.max_len}")
    report.lengths[length] = report.lengths.get(length, 0) + 1
    if length <= room:
        return True
    report.note("dropped_overlong", f"{row.where}: {length:,} tokens")
    return False
