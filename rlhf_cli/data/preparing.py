"""From rows to checked tokens: what all offline data sets have in common, and the report of how they were read.

Which tokens of a row make an item, and how items are stored, is the business of `sft_data` and `preference_data`.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import numpy as np
import pyarrow as pa
from transformers import PreTrainedTokenizerBase

from rlhf_cli.config.data import OfflineDataConfig
from rlhf_cli.data.conversations import Conversation, Document
from rlhf_cli.data.rendering import Pieces, Renderer
from rlhf_cli.data.sources import Row, RowFault, Rows, batches
from rlhf_cli.data.store import StoredTable, TableWriter
from rlhf_cli.data.templates import TRIAL, TemplateFault
from rlhf_cli.data.tokenising import Tokeniser, Tokens
from rlhf_cli.data.turns import Span
from rlhf_cli.errors import UsageError

BATCH_ROWS = 512
"""Rows tokenised at a time: enough for the tokenizer's threads, little memory."""
CHECKED_ROWS = 32
"""Rows at the start whose trained tokens are decoded and compared; later the first of each batch is."""

T = TypeVar("T")
S = TypeVar("S")


@dataclass
class DataReport:
    """How data were read: counts of rows and items, and of tokens after truncation.

    `items_are` names the items: 'sequences'; `details` counts what is special about them: {'with a margin': 12}.
    """

    items_are: str
    sources: list[str] = field(default_factory=list)
    end_of_turn: str | None = None
    rows: int = 0
    items: int = 0
    tokens: int = 0
    trained_tokens: int = 0
    details: dict[str, int] = field(default_factory=dict)
    truncated: int = 0
    dropped_invalid: int = 0
    dropped_overlong: int = 0
    dropped_untrained: int = 0
    dropped_equal: int = 0
    merged_starts: int = 0
    unthought_turns: int = 0

    @property
    def summary(self) -> str:
        """The report in one line."""
        counted = self.details | {
            "truncated": self.truncated,
            "dropped as invalid": self.dropped_invalid,
            "dropped as too long": self.dropped_overlong,
            "dropped with nothing to train on": self.dropped_untrained,
            "dropped as equal within max_len": self.dropped_equal,
            "with leading white space that carries no loss": self.merged_starts,
            "earlier turns without the thought they had, which the chat template drops": self.unthought_turns,
        }
        parts = [
            "; ".join(self.sources),
            f"{self.rows:,} rows gave {self.items:,} {self.items_are} of {self.tokens:,} tokens, "
            f"{self.trained_tokens:,} trained",
            *(f"{count:,} {what}" for what, count in counted.items() if count),
        ]
        return ", ".join(parts) + (f"; turns end with {self.end_of_turn}" if self.end_of_turn else "")


def described(rows: Rows, formats: list[str]) -> list[str]:
    """Each source with how it is read, and how many of its rows are used where not all are."""
    return [
        f"{source.name} ({form}" + (f", {count:,} of {len(source):,} rows)" if count < len(source) else ")")
        for source, form, count in zip(rows.sources, formats, rows.used(), strict=True)
    ]


@dataclass(frozen=True, slots=True)
class Encoded(Generic[T]):
    """What was read from a row, and the tokens of its examples."""

    row: Row
    read: T
    tokens: list[Tokens]


class Encoder:
    """Renders and tokenises what rows say, and checks that the trained tokens are those of the assistant."""

    def __init__(self, config: OfflineDataConfig, tokenizer: PreTrainedTokenizerBase) -> None:
        self._renderer = Renderer(config, tokenizer)
        self._tokeniser = Tokeniser(tokenizer)

    def tried_template(self) -> str:
        """What ends a turn by the chat template, after a trial of it. Raises UsageError if it cannot be used."""
        try:
            pieces = self._renderer.example(Conversation(TRIAL))
            (tokens,) = self._tokeniser.examples([pieces])
            if isinstance(tokens, TemplateFault):
                raise tokens
            self._tokeniser.check(tokens, pieces)
        except TemplateFault as fault:
            raise UsageError(f"{fault}; give another one with --tokenizer_chat_template FILE") from fault
        return " or ".join(self._renderer.template.ends_of_turn)

    def rendered(self, row: Row, examples: list[Conversation | Document]) -> list[Pieces]:
        """Text of a row's examples. Raises RowFault."""
        try:
            return [self._renderer.example(example) for example in examples]
        except TemplateFault as fault:
            raise row.error(str(fault)) from fault

    def tokens(self, texts: list[tuple[Row, list[Pieces]]]) -> list[list[Tokens] | RowFault]:
        """Tokens of every row's examples, or why one of them has none."""
        tokenised = iter(self._tokeniser.examples([pieces for _, listed in texts for pieces in listed]))
        found: list[list[Tokens] | RowFault] = []
        for row, listed in texts:
            tokens = [next(tokenised) for _ in listed]
            fault = next((part for part in tokens if isinstance(part, TemplateFault)), None)
            found.append(row.error(str(fault)) if fault else [part for part in tokens if isinstance(part, Tokens)])
        return found

    def check(self, row: Row, tokens: list[Tokens], texts: list[Pieces]) -> None:
        """Raises UsageError if the trained tokens do not decode to what the assistant said.

        The template is at fault, not this row: no row is dropped for it.
        """
        try:
            for part, pieces in zip(tokens, texts, strict=True):
                self._tokeniser.check(part, pieces)
        except TemplateFault as fault:
            raise UsageError(f"{row.where}: {fault}") from fault


@dataclass(frozen=True, slots=True)
class Preparation(Generic[T]):
    """How rows become the columns of a table.

    `read` gives what a row says and the examples to tokenise; `make` what is stored of a row, one dict an item, which
    may be none. A row for which either raises RowFault stops everything, or is dropped and counted, by `invalid_rows`.
    """

    schema: pa.Schema
    read: Callable[[Row], tuple[T, list[Conversation | Document]]]
    make: Callable[[Encoded[T], DataReport], list[dict[str, Any]]]
    encoder: Encoder
    drops_invalid: bool

    def table(self, rows: Rows, report: DataReport) -> StoredTable:
        """All items; what happened to the rows is counted in the report."""
        writer = TableWriter(self.schema)
        for number, batch in enumerate(batches(rows, BATCH_ROWS)):
            items = self._items(batch, report, num_checked=max(1, CHECKED_ROWS - number * BATCH_ROWS))
            writer.append_columns({name: [item[name] for item in items] for name in self.schema.names})
            report.items += len(items)
        return writer.finish()

    def _items(self, batch: list[Row], report: DataReport, *, num_checked: int) -> list[dict[str, Any]]:
        drafts = [draft for row in batch for draft in self._unless_invalid(report, self._draft, row)]
        found = self.encoder.tokens([(row, texts) for row, _, texts in drafts])
        items: list[dict[str, Any]] = []
        for (row, read, texts), tokens in zip(drafts, found, strict=True):
            if num_checked > 0 and not isinstance(tokens, RowFault):
                self.encoder.check(row, tokens, texts)
                num_checked -= 1
            items += self._unless_invalid(report, self._made, row, read, tokens, report)
        return items

    def _unless_invalid(self, report: DataReport, step: Callable[..., list[S]], *args: Any) -> list[S]:
        """What the step gives; nothing where its row is at fault and such rows are dropped."""
        try:
            return step(*args)
        except RowFault:
            if not self.drops_invalid:
                raise
            report.dropped_invalid += 1
            return []

    def _draft(self, row: Row) -> list[tuple[Row, T, list[Pieces]]]:
        read, examples = self.read(row)
        return [(row, read, self.encoder.rendered(row, examples))]

    def _made(self, row: Row, read: T, tokens: list[Tokens] | RowFault, report: DataReport) -> list[dict[str, Any]]:
        if isinstance(tokens, RowFault):
            raise tokens
        return self.make(Encoded(row, read, tokens), report)


def fitting(row: Row, tokens: list[Tokens], config: OfflineDataConfig, report: DataReport) -> list[Tokens] | None:
    """The examples of a row within `max_len`, by the policy for longer ones; None if the row is dropped.

    What is dropped is counted here, what is cut by the caller, who may find more reasons to drop it.
    """
    longest = max(len(part.ids) for part in tokens)
    overlong = longest > config.max_len
    if overlong and config.overlong == "error":
        raise UsageError(
            f"{row.where}: {longest} tokens are more than max_len {config.max_len} (--overlong truncate|drop)"
        )
    if overlong and config.overlong == "drop":
        report.dropped_overlong += 1
        return None
    cut = [part.cut(config.max_len) for part in tokens]
    if any(part.num_trained == 0 for part in cut):
        report.dropped_untrained += 1
        return None
    return cut


def flat(spans: list[Span]) -> list[int]:
    """Bounds of spans one after the other, as they are stored."""
    return [bound for span in spans for bound in span]


def mask_of(spans: np.ndarray, length: int) -> np.ndarray:
    """Stored bounds of spans as a mask over `length` tokens, bool."""
    mask = np.zeros(length, dtype=bool)
    for start, stop in spans.reshape(-1, 2):
        mask[start:stop] = True
    return mask
