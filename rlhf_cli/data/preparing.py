"""Converts rows to checked tokens, for all offline datasets, and reports counts.

How tokens become stored items is defined in `sft_data` and `preference_data`.
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
"""Rows per tokenization batch: enough for the tokenizer's threads, with little memory."""
BATCHES_AT_ONCE = 2
"""Batches in flight: the tokenizer's threads work while Python converts the previous batch."""
CHECKED_ROWS = 32
"""Number of initial rows with verified trained tokens. Later, the first row of each batch is verified."""

KNOWN_BEFORE = {"items_are", "sources", "end_of_turn", "rows"}
"""Report fields known before rows are read."""
MAX_NOTED = 5
"""Maximum number of rows listed per counter."""
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
"""Counter fields with descriptions."""
ORIGIN = {"source": pa.int32(), "index": pa.int64()}
"""Columns in every table: source number, and row index in the source."""

Progress = Callable[[int, int], None]
T = TypeVar("T")


@dataclass
class DataReport:
    """Report of loading a dataset: counts of rows, items, and tokens after truncation.

    - `items_are`: name of the items, such as 'sequences'.
    - `details`: counts of special items, such as {'with a margin': 12}.
    - `lengths`: number of rows or labeled responses by tokens, before truncation. A pair counts with its longer side,
      including the prompt.
    - `noted`: first rows per counter, with the reason.
    - `largest_token`: largest token ID before truncation; `largest_token_at` is its first row.
    - `control_rows`: number of rows with special tokens in messages; `control_tokens` counts rows per token.
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
        """Increment a counter, and store the note if it is among the first."""
        setattr(self, counter, getattr(self, counter) + 1)
        listed = self.noted.setdefault(counter, [])
        if len(listed) < MAX_NOTED:
            listed.append(note)

    def count_turns(self, *sides: Tokens) -> None:
        """Count special turns of an item. Its sides share all turns except one."""
        self.marked_rows += any(bool(side.left_out) for side in sides)
        # Sides of a pair share turns, so take the maximum instead of the sum.
        self.merged_starts += any(side.merged for side in sides)
        self.unthought_turns += max(side.num_unthought for side in sides)
        self.inlined_thoughts += max(side.num_inlined for side in sides)

    def counts(self) -> dict[str, object]:
        """Return all counts, without the fields known before reading."""
        return {name: value for name, value in asdict(self).items() if name not in KNOWN_BEFORE}

    def take(self, counts: dict[str, object]) -> None:
        """Restore the counts from an earlier run on the same data."""
        for name, value in counts.items():
            setattr(self, name, value)
        self.lengths = {int(length): count for length, count in self.lengths.items()}  # JSON keys are strings

    def longest(self, config: OfflineDataConfig) -> int:
        """Return the number of tokens in the longest kept row, after truncation."""
        drops = config.overlong == "drop"
        kept = (length for length in self.lengths if not drops or length <= config.max_len)
        return min(max(kept, default=0), config.max_len)

    @property
    def summary(self) -> str:
        """One-line summary."""
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
    """Maps items to their source rows."""

    rows: Rows
    table: StoredTable

    def __call__(self, item: int) -> str:
        """Return the file and line of an item's row."""
        return self.rows.sources[self.table.value("source", item)].where(self.table.value("index", item))


@contextmanager
def older_objects_uncollected() -> Iterator[None]:
    """Exclude existing objects from garbage collection within the block.

    Allocating many token lists triggers collections that traverse a million objects of imported packages: 12 to 17% of
    the total time.
    """
    # freeze moves existing objects to a generation that is not collected.
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


@dataclass(frozen=True, slots=True)
class Preparation(Generic[T]):
    """Pipeline from rows to table columns.

    - `read`: parses a row and returns examples to tokenize.
    - `mark`: may change the spans of rendered text.
    - `make`: returns a row's stored columns, one dict per item.
    - `progress`: called with the number of processed and total rows.

    With `drops_invalid`, rows that raise RowFault are dropped and counted; otherwise the error is raised.
    """

    schema: pa.Schema
    read: Callable[[Row], tuple[T, list[Conversation | Document]]]
    make: Callable[[Encoded[T], DataReport], list[dict[str, object]]]
    encoder: Encoder
    drops_invalid: bool
    progress: Progress
    mark: Callable[[Row, T, list[Pieces]], list[Pieces]] = lambda row, read, texts: texts

    def table(self, rows: Rows, report: DataReport, *, kept_at: Path | None) -> StoredTable:
        """Return all items and update the report. Items are loaded from, or saved to, the cache file `kept_at`."""
        if kept_at is None:
            return self._fill(TableWriter(self.schema), rows, report).finish()
        # Another process may be writing the same entry: wait, then read it.
        with one_at_a_time(kept_at):
            kept = read_kept(kept_at, self.schema)
            # Images may have been replaced since the table was made.
            if kept is not None and files_are_unchanged(kept.table):
                report.take(kept.counts)
                return kept.table
            with KeptTableWriter(self.schema, kept_at) as writer:
                self._fill(writer, rows, report)
                if self.encoder.reader is not None and report.dropped_invalid:
                    return writer.finish()  # do not cache: a missing image may exist next time
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
        """Yield parsed rows with tokens, batch by batch.

        Threads tokenize batches while the next ones are read and rendered: the tokenizer releases the GIL.
        """
        num_rows = 0
        waiting: deque[Future[Batch]] = deque()
        with ThreadPoolExecutor(BATCHES_AT_ONCE) as executor:
            for batch in batches(rows, BATCH_ROWS if self.encoder.reader is None else PICTURE_BATCH_ROWS):
                drafts = self.encoder.measured([self._draft(row) for row in batch])
                # Check at least one row per batch, since formats may change within a dataset.
                num_checked = max(1, CHECKED_ROWS - num_rows)
                num_rows += len(batch)
                waiting.append(executor.submit(self._with_tokens, num_rows, drafts, num_checked=num_checked))
                # Limit the queue, because rendered batches take memory.
                if len(waiting) > BATCHES_AT_ONCE:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()

    def _with_tokens(self, num_rows: int, drafts: list[Draft], *, num_checked: int) -> Batch:
        return num_rows, drafts, self.encoder.tokens(drafts, num_checked=num_checked)

    def _draft(self, row: Row) -> Draft:
        """Render a row, or store its error. Errors are raised later in row order, because earlier batches may also have
        some.
        """
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
        """Return a row's items; none if it is invalid and such rows are dropped."""
        try:
            if isinstance(tokens, RowFault):
                raise tokens
            for part in tokens:
                # Note tokens before truncation: the check protects the embedding for any max_len.
                note_largest(report, part.ids, draft.row)
            note_controls(report, draft.controls, draft.row)
            for key in _unread_keys(draft):
                what = f"with the key {key!r} in messages, which may be a mark and is not known"
                report.details[what] = report.details.get(what, 0) + 1
            return self.make(Encoded(draft.row, draft.read, tokens), report)
        except RowFault as fault:
            if not self.drops_invalid:
                raise RowFault(f"{fault}; use --invalid_rows drop to skip such rows") from fault
            report.note("dropped_invalid", str(fault))
            return []


def _unread_keys(draft: Draft) -> list[str]:
    """Return unknown message keys that may be loss markers, without duplicates."""
    conversations = (example for example in draft.examples if isinstance(example, Conversation))
    return sorted({key for talk in conversations for message in talk.messages for key in message.unread})


def fitting(row: Row, tokens: list[Tokens], config: OfflineDataConfig, report: DataReport) -> list[Tokens] | None:
    """Apply the policy for long rows. Returns the row's examples within `max_len`; None if the row is dropped.

    Counts dropped rows. The caller counts truncated rows, because it may drop the row for other reasons.
    """
    longest = max(len(part.ids) for part in tokens)
    # Count lengths before dropping, for the histogram.
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
    """Count a kept row if it was truncated."""
    if kept != whole:
        report.note("truncated", f"{row.where}: {max(len(part.ids) for part in whole):,} tokens")


def contents_digest(table: StoredTable) -> str:
    """Hash a table's items in order, independent of their source."""
    # Paths and times of images are left out, since they differ between machines.
    return table.digest(name for name in table.names if name not in ORIGIN and name != FILES)


def no_progress(done: int, total: int) -> None:
    """Ignore progress."""


def flat(spans: list[Span]) -> list[int]:
    """Flatten spans to a list of bounds, as stored."""
    return [bound for span in spans for bound in span]


def mask_of(spans: np.ndarray, length: int) -> np.ndarray:
    """Convert stored bounds to a bool mask over `length` tokens."""
    mask = np.zeros(length, dtype=bool)
    for start, stop in spans.reshape(-1, 2):
        mask[start:stop] = True
    return mask
