"""From rows to checked tokens: what all offline data sets have in common, and the report of how they were read.

Which tokens of a row make an item, and how items are stored, is the business of `sft_data` and `preference_data`.
"""

import gc
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Generic, TypeVar

import numpy as np
import pyarrow as pa

from rlhf_cli.config.data import OfflineDataConfig
from rlhf_cli.data.cache import KeptTableWriter, read_kept
from rlhf_cli.data.encoding import Batch, Draft, Encoded, Encoder, Found
from rlhf_cli.data.formats.conversations import Conversation, Document
from rlhf_cli.data.pictures.reading import BATCH_ROWS as PICTURE_BATCH_ROWS
from rlhf_cli.data.pictures.storing import FILES, files_are_unchanged
from rlhf_cli.data.reading.columns import refuse_images
from rlhf_cli.data.reading.sources import ReadSource, Row, RowFault, Rows, batches
from rlhf_cli.data.store import StoredTable, TableWriter
from rlhf_cli.data.templates.rendering import Pieces
from rlhf_cli.data.templates.turn_spans import Span
from rlhf_cli.data.tokenizing.control_tokens import controls_phrase, note_controls
from rlhf_cli.data.tokenizing.tokenizer import Tokens, note_largest
from rlhf_cli.errors import UsageError
from rlhf_cli.models.folders import one_at_a_time

BATCH_ROWS = 512
"""Rows tokenised at a time: enough for the tokenizer's threads, little memory."""
BATCHES_AT_ONCE = 2
"""Batches tokenised at a time: while Python takes over the tokens of one, the tokenizer's threads go on."""
CHECKED_ROWS = 32
"""Rows at the start whose trained tokens are decoded and compared; later the first of each batch is."""

KNOWN_BEFORE = {"items_are", "sources", "end_of_turn", "rows"}
"""Fields of a report that are known before any row is read."""
MAX_NOTED = 5
"""Rows that a report names for each thing that happened to rows."""
COUNTED = {
    "truncated": "truncated",
    "dropped_invalid": "dropped as invalid",
    "dropped_overlong": "dropped as too long",
    "dropped_untrained": "dropped with nothing to train on",
    "dropped_equal": "dropped as equal within max_len",
    "merged_starts": "with leading white space that carries no loss",
    "unthought_turns": "earlier turns without the thought they had, which the chat template drops",
    "marked_rows": "with text that a mark leaves out of the loss",
    "inlined_thoughts": "turns whose reasoning_content became <think> text, as no chat template reads it",
}
"""Fields of a report that count the fate of rows, in words."""
ORIGIN = {"source": pa.int32(), "index": pa.int64()}
"""Columns of every table: number of the source among the sources of the rows, and number of the row in it."""

Progress = Callable[[int, int], None]
T = TypeVar("T")


@dataclass
class DataReport:
    """The report of a reading: counts of rows and items, and of tokens after truncation.

    `items_are` names the items: 'sequences'. `details` counts special items: {'with a margin': 12}. `lengths` counts
    rows, or labelled responses, by their tokens before any row is cut or dropped for its length; a pair counts with its
    longer side, prompt included. `noted` names the first rows of each counter, with the reason. `largest_token` is the
    largest token id before any row is cut, `largest_token_at` the first row that has it. `control_rows` counts rows
    with special tokens in their messages, `control_tokens` the rows of each token.
    """

    items_are: str
    sources: list[ReadSource] = field(default_factory=list)
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
    inlined_thoughts: int = 0
    marked_rows: int = 0
    largest_token: int = -1
    largest_token_at: str = ""
    control_rows: int = 0
    control_tokens: dict[str, int] = field(default_factory=dict)
    control_at: str = ""
    lengths: dict[int, int] = field(default_factory=dict)
    noted: dict[str, list[str]] = field(default_factory=dict)

    def note(self, counter: str, note: str) -> None:
        """Count a row with one of the counters, and keep its note if it is among the first."""
        setattr(self, counter, getattr(self, counter) + 1)
        listed = self.noted.setdefault(counter, [])
        if len(listed) < MAX_NOTED:
            listed.append(note)

    def count_turns(self, *sides: Tokens) -> None:
        """Count the special turns of an item; its sides have all turns but one in common."""
        self.marked_rows += any(bool(side.left_out) for side in sides)
        self.merged_starts += any(side.merged for side in sides)
        self.unthought_turns += max(side.num_unthought for side in sides)
        self.inlined_thoughts += max(side.num_inlined for side in sides)

    def counts(self) -> dict[str, object]:
        """Return all counts, without the facts that are known before any row is read."""
        return {name: value for name, value in asdict(self).items() if name not in KNOWN_BEFORE}

    def take(self, counts: dict[str, object]) -> None:
        """Take over the counts of an earlier reading of the same data."""
        for name, value in counts.items():
            setattr(self, name, value)
        self.lengths = {int(length): count for length, count in self.lengths.items()}  # JSON made words of them

    def longest(self, config: OfflineDataConfig) -> int:
        """Return the tokens of the longest row that is kept, after truncation."""
        drops = config.overlong == "drop"
        kept = (length for length in self.lengths if not drops or length <= config.max_len)
        return min(max(kept, default=0), config.max_len)

    @property
    def summary(self) -> str:
        """The report in one line."""
        counted = self.details | {what: getattr(self, counter) for counter, what in COUNTED.items()}
        parts = [
            "; ".join(map(str, self.sources)),
            f"{self.rows:,} rows gave {self.items:,} {self.items_are} of {self.tokens:,} tokens, "
            f"{self.trained_tokens:,} trained",
            *(f"{count:,} {what}" for what, count in counted.items() if count),
            controls_phrase(self),
        ]
        return ", ".join(filter(None, parts)) + (f"; turns end with {self.end_of_turn}" if self.end_of_turn else "")


@dataclass(frozen=True)
class Origins:
    """The origin of each item: its source and row."""

    rows: Rows
    table: StoredTable

    def __call__(self, item: int) -> str:
        """Return the file and line of the row that an item was made from."""
        return self.rows.sources[self.table.value("source", item)].where(self.table.value("index", item))


@contextmanager
def older_objects_uncollected() -> Iterator[None]:
    """Make Python's garbage collector ignore the objects that exist before the block.

    Many lists of tokens make the collector go through a million objects of imported packages again and again: an eighth
    to a sixth of all time.
    """
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


@dataclass(frozen=True, slots=True)
class Preparation(Generic[T]):
    """The steps from rows to the columns of a table.

    `read` returns the row as read and the examples to tokenise; `mark` may give their texts other spans; `make` returns
    the stored columns of a row, one dict an item, or no item. A row for which one of them raises RowFault stops
    everything, or is dropped and counted, by `invalid_rows`. `progress` is called with the number of rows done and of
    all rows.
    """

    schema: pa.Schema
    read: Callable[[Row], tuple[T, list[Conversation | Document]]]
    make: Callable[[Encoded[T], DataReport], list[dict[str, object]]]
    encoder: Encoder
    drops_invalid: bool
    progress: Progress
    mark: Callable[[Row, T, list[Pieces]], list[Pieces]] = lambda row, read, texts: texts

    def table(self, rows: Rows, report: DataReport, *, kept_at: Path | None) -> StoredTable:
        """Return all items, and count the rows in the report. Items are read from `kept_at`, or kept there."""
        if kept_at is None:
            return self._fill(TableWriter(self.schema), rows, report).finish()
        with one_at_a_time(kept_at):
            kept = read_kept(kept_at, self.schema)
            if kept is not None and files_are_unchanged(kept.table):
                report.take(kept.counts)
                return kept.table
            with KeptTableWriter(self.schema, kept_at) as writer:
                self._fill(writer, rows, report)
                if self.encoder.reader is not None and report.dropped_invalid:
                    return writer.finish()  # a picture that is missing may be there next time
                return writer.keep(report.counts())

    @older_objects_uncollected()
    def _fill(self, writer: TableWriter, rows: Rows, report: DataReport) -> TableWriter:
        numbers = {source.name: number for number, source in enumerate(rows.sources)}
        for num_rows, drafts, tokens in self._tokenised(rows):
            items: list[dict[str, object]] = []
            for draft, found in zip(drafts, tokens, strict=True):
                origin = {"source": numbers[draft.row.source.name], "index": draft.row.index}
                items += [item | origin for item in self._made(draft, found, report)]
            writer.append_columns({name: [item[name] for item in items] for name in self.schema.names})
            report.items += len(items)
            self.progress(num_rows, len(rows))
        return writer

    def _tokenised(self, rows: Rows) -> Iterator[Batch]:
        """Yield rows as read with their tokens, batch by batch.

        Batches are tokenised in threads while the next ones are read and rendered: the tokenizer releases Python's
        lock.
        """
        num_rows = 0
        waiting: deque[Future[Batch]] = deque()
        with ThreadPoolExecutor(BATCHES_AT_ONCE) as executor:
            for batch in batches(rows, BATCH_ROWS if self.encoder.reader is None else PICTURE_BATCH_ROWS):
                drafts = self.encoder.measured([self._draft(row) for row in batch])
                num_checked = max(1, CHECKED_ROWS - num_rows)
                num_rows += len(batch)
                waiting.append(executor.submit(self._with_tokens, num_rows, drafts, num_checked=num_checked))
                if len(waiting) > BATCHES_AT_ONCE:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()

    def _with_tokens(self, num_rows: int, drafts: list[Draft], *, num_checked: int) -> Batch:
        return num_rows, drafts, self.encoder.tokens(drafts, num_checked=num_checked)

    def _draft(self, row: Row) -> Draft:
        """Return a row's text or its fault, which is raised later: batches before this one may have faults too."""
        try:
            if self.encoder.reader is None:
                refuse_images(row)
            read, found = self.read(row)
            examples = self.encoder.placed(row, found)
            texts = self.mark(row, read, self.encoder.rendered(row, examples))
            return Draft(row, read, examples, texts, controls=self.encoder.controls(examples))
        except RowFault as fault:
            return Draft(row, None, (), [], fault)

    def _made(self, draft: Draft, tokens: Found, report: DataReport) -> list[dict[str, object]]:
        """Return the items of a row, none if the row is at fault and such rows are dropped."""
        try:
            if isinstance(tokens, RowFault):
                raise tokens
            for part in tokens:
                note_largest(report, part.ids, draft.row)
            note_controls(report, draft.controls, draft.row)
            for key in _unread_keys(draft):
                what = f"with the key {key!r} in messages, which may be a mark and is not known"
                report.details[what] = report.details.get(what, 0) + 1
            return self.make(Encoded(draft.row, draft.read, tokens), report)
        except RowFault as fault:
            if not self.drops_invalid:
                raise RowFault(f"{fault}; --invalid_rows drop leaves such rows out") from fault
            report.note("dropped_invalid", str(fault))
            return []


def _unread_keys(draft: Draft) -> list[str]:
    """Return the keys of a row's messages that may be marks and are not known, each once."""
    conversations = (example for example in draft.examples if isinstance(example, Conversation))
    return sorted({key for talk in conversations for message in talk.messages for key in message.unread})


def fitting(row: Row, tokens: list[Tokens], config: OfflineDataConfig, report: DataReport) -> list[Tokens] | None:
    """Return the examples of a row within `max_len`, by the policy for longer ones; None if the row is dropped.

    Dropped rows are counted here. The caller counts cut rows, because it may find more reasons to drop a row.
    """
    longest = max(len(part.ids) for part in tokens)
    report.lengths[longest] = report.lengths.get(longest, 0) + 1
    overlong = longest > config.max_len
    if overlong and config.overlong == "error":
        raise UsageError(
            f"{row.where}: {longest} tokens are more than max_len {config.max_len} (--overlong truncate|drop)"
        )
    if overlong and config.overlong == "drop":
        report.note("dropped_overlong", f"{row.where}: {longest:,} tokens")
        return None
    cut = [part.cut(config.max_len) for part in tokens] if overlong else tokens
    if any(part.num_trained == 0 for part in cut):
        within = f" within the first {config.max_len:,} of {longest:,} tokens" if overlong else ""
        by_marks = ": marks leave it out" if any(part.left_out for part in cut) else ""
        report.note("dropped_untrained", f"{row.where}: nothing to train on{within}{by_marks}")
        return None
    return cut


def count_cut(row: Row, whole: list[Tokens], kept: list[Tokens], report: DataReport) -> None:
    """Count a row that is kept if something of it was cut off."""
    if kept != whole:
        report.note("truncated", f"{row.where}: {max(len(part.ids) for part in whole):,} tokens")


def contents_digest(table: StoredTable) -> str:
    """Return a hash of the items of a table in their order, wherever their rows come from."""
    return table.digest(name for name in table.names if name not in ORIGIN and name != FILES)


def no_progress(done: int, total: int) -> None:
    """Show nothing."""


def flat(spans: list[Span]) -> list[int]:
    """Return the bounds of spans one after the other, as they are stored."""
    return [bound for span in spans for bound in span]


def mask_of(spans: np.ndarray, length: int) -> np.ndarray:
    """Stored bounds of spans as a mask over `length` tokens, bool."""
    mask = np.zeros(length, dtype=bool)
    for start, stop in spans.reshape(-1, 2):
        mask[start:stop] = True
    return mask
