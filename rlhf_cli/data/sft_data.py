"""Data sets as tokenised sequences for supervised fine-tuning.

Sequences lie in a temporary file that is mapped into memory, so that data may be larger than memory. They are not
packed here, and not kept for a next run.
"""

import collections.abc
from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa
from transformers import PreTrainedTokenizerBase

from rlhf_cli.config.data import DataConfig
from rlhf_cli.data.columns import Columns
from rlhf_cli.data.conversations import Conversation
from rlhf_cli.data.formats import Format, choose_format
from rlhf_cli.data.packing import Sequence
from rlhf_cli.data.rendering import Pieces, Renderer
from rlhf_cli.data.sources import Row, Rows, batches, load_rows
from rlhf_cli.data.store import StoredTable, TableWriter
from rlhf_cli.data.templates import TRIAL, TemplateFault
from rlhf_cli.data.tokenising import Tokeniser, Tokens
from rlhf_cli.errors import UsageError

BATCH_ROWS = 512
"""Rows tokenised at a time: enough for the tokenizer's threads, little memory."""
CHECKED_ROWS = 32
"""Rows at the start whose trained tokens are decoded and compared; later the first of each batch is."""
SCHEMA = pa.schema({"token_ids": pa.list_(pa.int32()), "spans": pa.list_(pa.int32())})


@dataclass
class SequenceReport:
    """How data were read: counts of rows, and of tokens after truncation."""

    sources: list[str] = field(default_factory=list)
    end_of_turn: str | None = None
    rows: int = 0
    sequences: int = 0
    tokens: int = 0
    trained_tokens: int = 0
    truncated: int = 0
    dropped_overlong: int = 0
    dropped_untrained: int = 0
    merged_starts: int = 0

    @property
    def summary(self) -> str:
        """The report in one line."""
        counted = {
            "truncated": self.truncated,
            "dropped as too long": self.dropped_overlong,
            "dropped with nothing to train on": self.dropped_untrained,
            "with leading white space that carries no loss": self.merged_starts,
        }
        parts = [
            "; ".join(self.sources),
            f"{self.rows:,} rows gave {self.sequences:,} sequences of {self.tokens:,} tokens, "
            f"{self.trained_tokens:,} trained",
            *(f"{count:,} {what}" for what, count in counted.items() if count),
        ]
        return ", ".join(parts) + (f"; turns end with {self.end_of_turn}" if self.end_of_turn else "")


class StoredSequences(collections.abc.Sequence[Sequence]):
    """Sequences in a file mapped into memory."""

    def __init__(self, table: StoredTable) -> None:
        self._table = table

    def __len__(self) -> int:
        return len(self._table)

    def __getitem__(self, index):  # type: ignore[no-untyped-def]
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        token_ids = self._table.numbers("token_ids", int(index))
        loss_mask = np.zeros(token_ids.size, dtype=bool)
        for start, stop in self._table.numbers("spans", int(index)).reshape(-1, 2):
            loss_mask[start:stop] = True
        return Sequence(token_ids, loss_mask)


@dataclass(frozen=True)
class SequenceData:
    """Tokenised data: `lengths` and `num_trained` (int32 [N]) are the tokens and trained tokens of each sequence."""

    sequences: collections.abc.Sequence[Sequence]
    lengths: np.ndarray
    num_trained: np.ndarray
    report: SequenceReport


def load_sft_sequences(
    config: DataConfig, tokenizer: PreTrainedTokenizerBase, *, dataset: str, split: str, seed: int
) -> SequenceData:
    """Tokenised sequences of a data set, in the order of its rows, with a report of how they were read.

    The assistant's text and the end-of-turn tokens behind it carry loss; of plain text, and in `pretrain_mode`,
    every token but the first. `dataset_probs` apply where `dataset` is the settings' own.

    Raises UsageError naming file and line of a row that cannot be used, or where no sequence is left.
    """
    probs = config.dataset_probs if dataset == config.dataset else None
    rows = load_rows(dataset, split=split, probs=probs, seed=seed, max_samples=config.max_samples)
    wanted = Columns(config.input_key, config.output_key)
    formats = [choose_format(source, wanted, data_format=config.data_format) for source in rows.sources]
    steps = _Steps(
        {source.name: form for source, form in zip(rows.sources, formats, strict=True)},
        Renderer(config, tokenizer),
        Tokeniser(tokenizer),
    )
    report = SequenceReport(sources=_described(rows, formats), rows=len(rows))
    if config.apply_chat_template and any(form.name != "text" for form in formats):
        report.end_of_turn = steps.tried_template()
    data = _collected(rows, steps, config, report)
    if not data.sequences:
        raise UsageError(f"no sequence is left to train on: {report.summary}")
    return data


def _described(rows: Rows, formats: list[Format]) -> list[str]:
    return [
        f"{source.name} ({form.name}: {form.columns}"
        + (f", {count:,} of {len(source):,} rows)" if count < len(source) else ")")
        for source, form, count in zip(rows.sources, formats, rows.used(), strict=True)
    ]


@dataclass(frozen=True, slots=True)
class _Steps:
    """What happens to a row: its source's format, then rendering, then the tokenizer."""

    formats: dict[str, Format]
    renderer: Renderer
    tokeniser: Tokeniser

    def tried_template(self) -> str:
        """What ends a turn by the chat template, after a trial of it. Raises UsageError if it cannot be used."""
        try:
            pieces = self.renderer.example(Conversation(TRIAL))
            (tokens,) = self.tokeniser.examples([pieces])
            if isinstance(tokens, TemplateFault):
                raise tokens
            self.tokeniser.check(tokens, pieces)
        except TemplateFault as fault:
            raise UsageError(f"{fault}; give another one with --tokenizer_chat_template FILE") from fault
        return " or ".join(self.renderer.template.ends_of_turn)

    def tokens(self, batch: list[Row], *, num_checked: int) -> list[Tokens]:
        """Tokens of the rows; those of the first `num_checked` are decoded and compared with their text."""
        rendered = [self._rendered(row) for row in batch]
        tokenised: list[Tokens] = []
        for row, pieces, tokens in zip(batch, rendered, self.tokeniser.examples(rendered), strict=True):
            try:
                if isinstance(tokens, TemplateFault):
                    raise tokens
                if len(tokenised) < num_checked:
                    self.tokeniser.check(tokens, pieces)
            except TemplateFault as fault:
                raise row.error(str(fault)) from fault
            tokenised.append(tokens)
        return tokenised

    def _rendered(self, row: Row) -> Pieces:
        try:
            return self.renderer.example(self.formats[row.source.name].read(row))
        except TemplateFault as fault:
            raise row.error(str(fault)) from fault


def _collected(rows: Rows, steps: _Steps, config: DataConfig, report: SequenceReport) -> SequenceData:
    """Every sequence that is kept; what happened to the rows is counted in the report."""
    writer = TableWriter(SCHEMA)
    lengths: list[int] = []
    num_trained: list[int] = []
    for number, batch in enumerate(batches(rows, BATCH_ROWS)):
        num_checked = max(1, CHECKED_ROWS - number * BATCH_ROWS)
        tokenised = steps.tokens(batch, num_checked=num_checked)
        if config.pretrain_mode:
            tokenised = [tokens.all_trained() for tokens in tokenised]
        kept = [
            fitting
            for row, tokens in zip(batch, tokenised, strict=True)
            if (fitting := _fitting(row, tokens, config, report))
        ]
        spans = [[bound for span in tokens.spans for bound in span] for tokens in kept]
        writer.append_columns({"token_ids": [tokens.ids for tokens in kept], "spans": spans})
        lengths += [len(tokens.ids) for tokens in kept]
        num_trained += [tokens.num_trained for tokens in kept]
        report.merged_starts += sum(tokens.merged for tokens in kept)
    report.sequences, report.tokens, report.trained_tokens = len(lengths), sum(lengths), sum(num_trained)
    arrays = np.array(lengths, dtype=np.int32), np.array(num_trained, dtype=np.int32)
    return SequenceData(StoredSequences(writer.finish()), *arrays, report)


def _fitting(row: Row, tokens: Tokens, config: DataConfig, report: SequenceReport) -> Tokens | None:
    """The tokens within `max_len`, by the policy for longer ones; None if the row is dropped."""
    overlong = len(tokens.ids) > config.max_len
    if overlong and config.overlong == "error":
        raise row.error(f"{len(tokens.ids)} tokens are more than max_len {config.max_len} (--overlong truncate|drop)")
    if overlong and config.overlong == "drop":
        report.dropped_overlong += 1
        return None
    tokens = tokens.cut(config.max_len)
    if tokens.num_trained == 0:
        report.dropped_untrained += 1
        return None
    report.truncated += overlong
    return tokens
