"""Prompts with their ground truth for online training and evaluation.

Prompts lie in a temporary file that is mapped into memory. Their order here is that of the rows.
"""

import collections.abc
import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass, field

import pyarrow as pa
from transformers import PreTrainedTokenizerBase

from rlhf_cli.config.data import PromptConfig
from rlhf_cli.data.columns import Columns, described, refuse_half_characters
from rlhf_cli.data.conversations import Conversation
from rlhf_cli.data.formats import PromptFormat, choose_prompt_format
from rlhf_cli.data.preparing import MAX_NOTED
from rlhf_cli.data.prompt_templates import PromptTemplate, load_prompt_template
from rlhf_cli.data.rendering import Renderer
from rlhf_cli.data.sources import ReadSource, Row, batches, load_rows, read_sources
from rlhf_cli.data.store import StoredItems, TableWriter
from rlhf_cli.data.templates import TemplateFault
from rlhf_cli.data.tokenising import Tokeniser, note_largest
from rlhf_cli.errors import UsageError

BATCH_ROWS = 512
PASS_RATE = "pass_rate"
"""Column with the share of a model's responses to a prompt that were right."""
SCHEMA = pa.schema(
    {
        "prompt_ids": pa.list_(pa.int32()),
        "text": pa.large_string(),
        "label": pa.large_string(),
        "source": pa.string(),
        "index": pa.int64(),
    }
)


@dataclass(frozen=True)
class Prompt:
    """A prompt in the tokens that generation starts from.

    `text` is the rendered text, template included; `label` the ground truth, None where the row has none; `source`
    the data set as named in the settings and `index` the number of the row in it, from 0.
    """

    prompt_ids: list[int]
    text: str
    label: str | None
    source: str
    index: int


@dataclass
class PromptReport:
    """How prompts were read.

    `lengths` counts all prompts by their tokens; `noted` names the first ones that were dropped, and why.
    """

    sources: list[ReadSource] = field(default_factory=list)
    rows: int = 0
    prompts: int = 0
    labelled: int = 0
    dropped_by_pass_rate: int = 0
    dropped_overlong: int = 0
    longest: int = 0
    """Tokens of the longest prompt that was kept."""
    largest_token: int = -1
    """The largest token id, and the first row that has it."""
    largest_token_at: str = ""
    lengths: dict[int, int] = field(default_factory=dict)
    noted: list[str] = field(default_factory=list)

    @property
    def summary(self) -> str:
        """The report in one line."""
        dropped = f", {self.dropped_by_pass_rate:,} left out by their pass rate" if self.dropped_by_pass_rate else ""
        dropped += f", {self.dropped_overlong:,} dropped as too long" if self.dropped_overlong else ""
        return (
            f"{'; '.join(map(str, self.sources))}, {self.rows:,} rows gave {self.prompts:,} prompts of at most "
            f"{self.longest:,} tokens, {self.labelled:,} with ground truth{dropped}"
        )


@dataclass(frozen=True)
class PromptData:
    """Prompts in the order of their rows.

    `fingerprint` is of all texts and labels; `row_of` reads a prompt's row again, and `conversation_of` the messages in
    it, the system message of the settings included; `where` gives file and line of a prompt's row.
    """

    prompts: collections.abc.Sequence[Prompt]
    report: PromptReport
    fingerprint: str
    row_of: Callable[[Prompt], Row]
    conversation_of: Callable[[Prompt], Conversation]
    where: Callable[[Prompt], str]


def load_prompts(
    config: PromptConfig, tokenizer: PreTrainedTokenizerBase, *, max_new_tokens: int, seed: int
) -> PromptData:
    """Prompts of the settings' data sets, with a report of how they were read.

    Prompts that leave no room for `max_new_tokens` within `max_len` are dropped and counted, or an error, by
    `overlong_prompts`. Raises UsageError naming file and line of a row that cannot be used, or where none is left.
    """
    room = config.max_len - max_new_tokens
    if room < 1:
        raise UsageError(
            f"max_len {config.max_len} leaves no room for a prompt beside max_new_tokens {max_new_tokens}: "
            f"raise max_len above {max_new_tokens}"
        )
    rows = load_rows(
        config.prompt_data,
        split=config.prompt_split,
        probs=config.prompt_data_probs,
        seed=seed,
        max_samples=config.max_samples,
    )
    wanted = Columns(config.input_key, label_key=config.label_key)
    formats = {
        source.name: choose_prompt_format(source, wanted, data_format=config.data_format) for source in rows.sources
    }
    report = PromptReport(read_sources(rows, [formats[source.name].columns for source in rows.sources]), len(rows))
    writer = TableWriter(SCHEMA)
    fingerprint = hashlib.blake2b(digest_size=16)
    template = None
    if config.prompt_template is not None:
        template = load_prompt_template(config.prompt_template, system_prompt=config.system_prompt)
    plain = template is not None or not config.apply_chat_template
    steps = _Steps(formats, template or Renderer(config, tokenizer), Tokeniser(tokenizer), plain=plain)
    for whole in batches(rows, BATCH_ROWS):
        batch = [row for row in whole if _is_wanted(row, config.pass_rate_range)]
        report.dropped_by_pass_rate += len(whole) - len(batch)
        read = zip(batch, steps.prompts(batch), strict=True)
        kept = [prompt for row, prompt in read if _fits(row, prompt, room, config, report)]
        writer.append_columns({name: [getattr(prompt, name) for prompt in kept] for name in SCHEMA.names})
        for prompt in kept:
            fingerprint.update(json.dumps([prompt.text, prompt.label]).encode())
        report.prompts += len(kept)
        report.labelled += sum(prompt.label is not None for prompt in kept)
        report.longest = max([report.longest, *(len(prompt.prompt_ids) for prompt in kept)])
    if not report.prompts:
        raise UsageError(f"no prompt is left: {report.summary}")
    sources = {source.name: source for source in rows.sources}

    def row_of(prompt: Prompt) -> Row:
        return sources[prompt.source].row(prompt.index)

    def conversation_of(prompt: Prompt) -> Conversation:
        conversation = formats[prompt.source].read_prompt(row_of(prompt))
        return conversation.with_system_prompt(config.system_prompt)

    return PromptData(
        StoredItems(writer.finish(), lambda table, row: Prompt(**table.row(row))),
        report,
        fingerprint.hexdigest(),
        row_of,
        conversation_of,
        where=lambda prompt: sources[prompt.source].where(prompt.index),
    )


@dataclass(frozen=True, slots=True)
class _Steps:
    """What happens to a row: its source's format, then rendering, then the tokenizer."""

    formats: dict[str, PromptFormat]
    renderer: Renderer | PromptTemplate
    tokeniser: Tokeniser
    plain: bool

    def prompts(self, batch: list[Row]) -> list[Prompt]:
        texts = [self._text(row) for row in batch]
        labels = [self.formats[row.source.name].read_label(row) for row in batch]
        ids = self.tokeniser.prompts(texts, plain=self.plain)
        return [
            Prompt(prompt_ids, text, label, row.source.name, row.index)
            for prompt_ids, text, label, row in zip(ids, texts, labels, batch, strict=True)
        ]

    def _text(self, row: Row) -> str:
        try:
            text = self.renderer.prompt(self.formats[row.source.name].read_prompt(row))
        except TemplateFault as fault:
            raise row.error(str(fault)) from fault
        refuse_half_characters(row, text)
        return text


def _is_wanted(row: Row, limits: tuple[float, float] | None) -> bool:
    """Whether the row's pass rate is within the limits; a prompt of unknown rate (null) is not."""
    if limits is None:
        return True
    rate = row.get(PASS_RATE)
    if PASS_RATE not in row or not isinstance(rate, int | float | None) or isinstance(rate, bool):
        raise row.error(f"column {PASS_RATE!r} (--pass_rate_range) is {described(rate, row, PASS_RATE)}")
    return rate is not None and limits[0] <= rate <= limits[1]


def _fits(row: Row, prompt: Prompt, room: int, config: PromptConfig, report: PromptReport) -> bool:
    length = len(prompt.prompt_ids)
    if length == 0:
        raise row.error("the prompt has no tokens")
    note_largest(report, prompt.prompt_ids, row)
    if length > room and config.overlong_prompts == "error":
        raise row.error(f"the prompt's {length} tokens leave no room for max_new_tokens in max_len {config.max_len}")
    report.lengths[length] = report.lengths.get(length, 0) + 1
    if length <= room:
        return True
    report.dropped_overlong += 1
    if len(report.noted) < MAX_NOTED:
        report.noted.append(f"{row.where}: {length:,} tokens")
    return False
