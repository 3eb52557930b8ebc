"""Prompts with ground truth for online training and evaluation.

Prompts are stored in row order in a memory-mapped temporary file.
"""

import collections.abc
import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import pyarrow as pa
from transformers import PreTrainedTokenizerBase

from rlhf_cli.agents.records import EnvironmentDescription
from rlhf_cli.config.data import DEFAULT_TEMPLATE, PromptConfig, TemplateConfig
from rlhf_cli.config.scoring import RewardConfig
from rlhf_cli.data.encoding import Draft, PromptEncoder
from rlhf_cli.data.formats.choosing import prompt_formats
from rlhf_cli.data.formats.conversations import Conversation, plain_message
from rlhf_cli.data.formats.table import PromptFormat
from rlhf_cli.data.formats.tools import TOOLS_COLUMN, with_tools
from rlhf_cli.data.judges import Judges
from rlhf_cli.data.loading import RowPipeline
from rlhf_cli.data.pictures.marks import TEXT_MARK
from rlhf_cli.data.pictures.reading import PictureReader, check_image_key
from rlhf_cli.data.pictures.storing import pictures_at, schema_with_pictures, stored_pictures
from rlhf_cli.data.preparing import DataReport
from rlhf_cli.data.reading.columns import described, dialogue_of, refuse_images
from rlhf_cli.data.reading.sources import Row, Rows, Source, load_rows, read_sources
from rlhf_cli.data.store import StoredItems, StoredTable, TableWriter
from rlhf_cli.data.templates.kwargs import KWARGS_COLUMN, template_kwargs_of
from rlhf_cli.data.templates.prompt_templates import FormatPrompt, load_format_prompt
from rlhf_cli.data.templates.text import TemplateFault
from rlhf_cli.data.tokenizing.tokenizer import Tokens
from rlhf_cli.errors import UsageError
from rlhf_cli.models.vision.pictures import PlacedPicture

PASS_RATE = "pass_rate"
"""Column with the share of correct responses to a prompt."""
_SCHEMA = pa.schema(
    {
        "prompt_ids": pa.list_(pa.int32()),
        "teacher_ids": pa.list_(pa.int32()),
        "text": pa.large_string(),
        "label": pa.large_string(),
        "source": pa.string(),
        "index": pa.int64(),
        "data_source": pa.string(),
        "row": pa.large_string(),
    }
)


@dataclass(frozen=True, slots=True)
class _PromptWords:
    """Reads prompt messages: format per source, `wording` of the text, system prompt, and environment."""

    formats: dict[str, PromptFormat]
    wording: FormatPrompt | None
    system_prompt: str | None
    environment: EnvironmentDescription | None

    def read(self, row: Row) -> Conversation:
        """Return the row's messages."""
        return self.formats[row.source.name].read_prompt(row)

    def asked(self, row: Row, conversation: Conversation) -> Conversation:
        """Return the model's messages. Raises TemplateFault."""
        worded = conversation if self.wording is None else self.wording.applied(conversation)
        if self.environment is None:
            return worded
        if conversation.pictures:
            raise row.error("the row has images, which environments do not support")
        if template_kwargs_of(row):
            raise row.error(f"column {KWARGS_COLUMN!r} is set per row; with an environment, use --{KWARGS_COLUMN}")
        if self.environment.is_program and conversation.tools:
            raise row.error(f"column {TOOLS_COLUMN!r} has tools, but an agent program defines its own: drop the column")
        return with_tools(worded, self.environment.tools, row).with_system_prompt(self.system_prompt)


@dataclass(frozen=True)
class Prompt:
    """A tokenized prompt.

    - `text`: rendered text, including the template.
    - `label`: ground truth, None without.
    - `source`, `index`: dataset as named in the settings, and the row's index in it, from 0.
    - `data_source`: source name from the row.
    - `row`: JSON of the columns for reward files, or None.
    - `pictures`: images in token order. The text has one placeholder each.
    - `teacher_ids`: the prompt as the teacher reads it, if `teacher_context_key` is set.
    - `teacher`: number of the teacher that scores responses.

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
    teacher_ids: list[int] | None = None
    teacher: int = 0


def _prompt_at(table: StoredTable, row: int) -> Prompt:
    columns = {name: table.value(name, row) for name in _SCHEMA.names}
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
    report: DataReport
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
    words = _words_of(config, template, rows, judges, environment)
    check_image_key(rows, reader)
    encoder = PromptEncoder(template, tokenizer, reader)
    found = read_sources(rows, [words.formats[source.name].columns for source in rows.sources])
    report = DataReport("prompts", found, rows=len(rows))
    drops = config.invalid_rows == "drop"
    pipeline = _PromptPipeline(rows, encoder, report, drops, config, words, judges, room)
    table = pipeline.fill(TableWriter(schema_with_pictures(_SCHEMA, has_pictures=reader is not None))).finish()
    if not report.items:
        first = "".join(f"; the first one is {listed[0]}" for listed in report.noted.values())
        raise UsageError(f"no prompt remains: {report.summary}{first}")
    origins = _Origins({source.name: source for source in rows.sources}, words)
    return PromptData(
        StoredItems(table, _prompt_at),
        report,
        pipeline.digest.hexdigest(),
        origins.row_of,
        origins.conversation_of,
        origins.where,
        has_pictures=reader is not None,
        end_ids=encoder.end_ids,
    )


def _room(config: PromptConfig, max_new_tokens: int) -> int:
    """Return the maximum prompt length in tokens. Raises UsageError if it is below 1."""
    room = config.max_len - max_new_tokens
    if room < 1:
        raise UsageError(
            f"max_len {config.max_len} leaves no room for a prompt with max_new_tokens {max_new_tokens}: "
            f"raise max_len above {max_new_tokens}"
        )
    return room


@dataclass(frozen=True, slots=True)
class _Origins:
    """Maps prompts to their source rows."""

    sources: dict[str, Source]
    words: _PromptWords

    def row_of(self, prompt: Prompt) -> Row:
        return self.sources[prompt.source].row(prompt.index)

    def conversation_of(self, prompt: Prompt) -> Conversation:
        row = self.row_of(prompt)
        # A system prompt from the settings is part of the messages, but not of the row.
        return self.words.asked(row, self.words.read(row)).with_system_prompt(self.words.system_prompt)

    def where(self, prompt: Prompt) -> str:
        return self.sources[prompt.source].where(prompt.index)


@dataclass(frozen=True)
class _PromptPipeline(RowPipeline):
    """Pipeline from rows to prompts. `digest` hashes all text and labels."""

    encoder: PromptEncoder
    config: PromptConfig
    words: _PromptWords
    judges: Judges
    room: int
    digest: hashlib.blake2b = field(default_factory=lambda: hashlib.blake2b(digest_size=16))

    def _draft(self, row: Row) -> Draft | None:
        # Filter by pass rate first, which saves rendering.
        if not _is_wanted(row, self.config.pass_rate_range):
            self.report.dropped_by_pass_rate += 1
            return None
        if self.encoder.reader is None:
            refuse_images(row)
        examples = self.encoder.placed(row, [self.words.read(row)])
        (conversation,) = examples
        assert isinstance(conversation, Conversation)
        try:
            asked = self.words.asked(row, conversation)
            text = self.encoder.rendered(row, asked)
            key = self.config.teacher_context_key
            teachers = None if key is None else self._teachers_prompt(row, asked, key)
        except TemplateFault as fault:
            raise row.error(str(fault)) from fault
        label = self.words.formats[row.source.name].read_label(row)
        controls = self.encoder.controls(examples)
        return Draft(row, label, examples, [], prompt=text, teacher_prompt=teachers, controls=controls)

    def _teachers_prompt(self, row: Row, asked: Conversation, key: str) -> str:
        """Render the prompt with the teacher's context. Raises TemplateFault or RowFault."""
        # Before the text of the last message, so that a prompt to complete keeps its end.
        context = row.get(key)
        if not isinstance(context, str) or not context.strip():
            raise row.error(f"column {key!r} (--teacher_context_key) is {described(context, row, key)}, not a text")
        if asked.pictures:
            raise row.error("the row has images, which --teacher_context_key does not support")
        *before, last = asked.messages
        last = replace(last, content=f"{context}\n\n{last.content}")
        return self.encoder.rendered(row, replace(asked, messages=(*before, last)))

    def _items(self, draft: Draft, tokens: list[Tokens]) -> list[dict[str, object]]:
        row, label, ids, pictures = draft.row, draft.read, tokens[0].ids, tokens[0].pictures
        teacher_ids = tokens[1].ids if draft.teacher_prompt is not None else None
        # The teacher reads the same response after its own, longer prompt.
        if not self._fits(row, max(len(ids), len(teacher_ids or ()))):
            return []
        self.report.labelled += label is not None
        self.report.longest_prompt = max(self.report.longest_prompt, len(ids))
        source, kept = self.judges.source_of(row), self._kept(row)
        # Rewards read these too, so a change must not be resumed.
        others = [one for one in (source, kept, draft.teacher_prompt) if one is not None]
        digests = [standing.picture.digest.hex() for standing in pictures]
        self.digest.update(json.dumps([draft.prompt, label, *others, *digests]).encode())
        prompt = Prompt(ids, draft.prompt, label, row.source.name, row.index, source, kept, teacher_ids=teacher_ids)
        return [{name: getattr(prompt, name) for name in _SCHEMA.names} | stored_pictures(pictures)]

    def _fits(self, row: Row, length: int) -> bool:
        """Return whether the prompt has room for a response, and count it."""
        if length > self.room and self.config.overlong_prompts == "error":
            # Not a RowFault, because only invalid rows are dropped.
            raise UsageError(
                f"{row.where}: the prompt's {length} tokens leave no room for max_new_tokens in max_len "
                f"{self.config.max_len}"
            )
        self.report.lengths[length] = self.report.lengths.get(length, 0) + 1
        if length <= self.room:
            return True
        self.report.note("dropped_overlong", f"{row.where}: {length:,} tokens")
        return False

    def _kept(self, row: Row) -> str | None:
        """Return the row's columns for a reward file. The prompt is a message list if the row contains messages."""
        if not self.judges.keeps_rows:
            return None
        form = self.words.formats[row.source.name]
        messages = form.read_prompt(row).messages
        # Reward files expect the text marker of datasets instead of the internal one.
        listed = [{"role": message.role, "content": TEXT_MARK.join(message.pieces)} for message in messages]
        prompt = listed if dialogue_of(row.get(form.prompt_column)) else messages[-1].content
        columns = row if self.encoder.reader is None else self.encoder.reader.without_pictures(row)
        kept = {"prompt": prompt, "columns": columns}
        if self.words.environment is not None:
            asked = self.words.asked(row, self.words.read(row))
            kept["messages"] = [plain_message(message) for message in asked.messages]
        return json.dumps(kept, default=str)


def _is_wanted(row: Row, limits: tuple[float, float] | None) -> bool:
    """Return whether the row's pass rate is within the limits. An unknown pass rate (null) is not."""
    if limits is None:
        return True
    rate = row.get(PASS_RATE)
    if PASS_RATE not in row or not isinstance(rate, int | float | None) or isinstance(rate, bool):
        raise row.error(f"column {PASS_RATE!r} (--pass_rate_range) is {described(rate, row, PASS_RATE)}")
    return rate is not None and limits[0] <= rate <= limits[1]


def _words_of(
    config: PromptConfig,
    template: TemplateConfig,
    rows: Rows,
    judges: Judges,
    environment: EnvironmentDescription | None,
) -> _PromptWords:
    """Find all sources' formats. Raises UsageError if one is unknown."""
    formats = prompt_formats(config, rows.sources, verifiers=judges.verifiers)
    wording = load_format_prompt(template.format_prompt) if template.format_prompt is not None else None
    return _PromptWords(formats, wording, template.system_prompt, environment)
