"""Loads datasets: rows are parsed, rendered, tokenized and stored as items, with one report.

A kind of offline data is a row of functions: `SEQUENCES` in sft_data.py, `PAIRS` and `RESPONSES` in preference_data.py,
`STEPS` in step_data.py. Prompts are in prompts.py.
"""

import collections.abc
import gc
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Generic, TypeVar

import numpy as np
import pyarrow as pa
from transformers import PreTrainedTokenizerBase

from rlhf_cli.config.data import (
    DEFAULT_TEMPLATE,
    DataConfig,
    LabelledDataConfig,
    PreferenceDataConfig,
    StepDataConfig,
    TemplateConfig,
)
from rlhf_cli.data.cache import KeptTableWriter, kept_path, read_kept
from rlhf_cli.data.encoding import Batch, Draft, Encoded, Encoder, ExampleEncoder, Found
from rlhf_cli.data.formats.conversations import Conversation, Document
from rlhf_cli.data.pictures.reading import BATCH_ROWS as PICTURE_BATCH_ROWS
from rlhf_cli.data.pictures.reading import PictureReader, check_image_key
from rlhf_cli.data.pictures.storing import FILES, files_are_unchanged, patches_of, schema_with_pictures
from rlhf_cli.data.preparing import DataReport
from rlhf_cli.data.reading.columns import RowFormat, refuse_images
from rlhf_cli.data.reading.sources import Row, RowFault, Rows, Source, batches, load_rows, read_sources
from rlhf_cli.data.store import StoredItems, StoredTable, TableWriter
from rlhf_cli.data.templates.rendering import Pieces
from rlhf_cli.data.tokenizing.tokenizer import Tokens
from rlhf_cli.errors import UsageError
from rlhf_cli.models.folders import one_at_a_time

BATCH_ROWS = 512
"""Rows per tokenization batch: enough for the tokenizer's threads, with little memory."""
BATCHES_AT_ONCE = 2
"""Batches in flight: the tokenizer's threads work while Python converts the previous batch."""
CHECKED_ROWS = 32
"""Number of initial rows with verified trained tokens. Later, the first row of each batch is verified."""
ORIGIN = {"source": pa.int32(), "index": pa.int64()}
"""Columns in every table: source number, and row index in the source."""

Progress = Callable[[int, int], None]
"""Called with the number of processed and total rows."""
Settings = TypeVar("Settings", bound=DataConfig | PreferenceDataConfig | LabelledDataConfig | StepDataConfig)
Read = TypeVar("Read")
Item = TypeVar("Item", covariant=True)


def no_progress(done: int, total: int) -> None:
    """Ignore progress."""


@dataclass(frozen=True)
class Kind(Generic[Settings, Read, Item]):
    """A kind of offline data.

    - `items_are`: name of the items, such as 'sequences'.
    - `schema`: stored columns, without the row's origin and images.
    - `formats`: selects the row format per source name.
    - `examples`: returns the conversations or texts of a parsed row to tokenize.
    - `mark`: may change the spans of rendered text.
    - `make`: returns a row's stored columns, one dict per item, and counts them in the report.
    - `item_at`: reads an item.
    """

    items_are: str
    schema: dict[str, pa.DataType]
    formats: Callable[[Settings, Sequence[Source]], dict[str, RowFormat[Read]]]
    examples: Callable[[Row, Read, Settings], list[Conversation | Document]]
    make: Callable[[Encoded[Read], Settings, DataReport], list[dict[str, object]]]
    item_at: Callable[[StoredTable, int], Item]
    mark: Callable[[Row, Read, list[Pieces], Settings], list[Pieces]] = lambda row, read, texts, config: texts

    def load(
        self,
        config: Settings,
        tokenizer: PreTrainedTokenizerBase,
        *,
        dataset: str,
        split: str,
        seed: int,
        template: TemplateConfig = DEFAULT_TEMPLATE,
        progress: Progress = no_progress,
        reader: PictureReader | None = None,
    ) -> "LoadedData[Item]":
        """Load and tokenize a dataset's items in row order, with a report.

        `dataset_probs` apply only if `dataset` is the training dataset. `reader` loads images; None for text models.

        Raises:
            UsageError: a row is invalid (the message contains file and line), or no item remains.
        """
        rows = load_rows(
            dataset,
            split=split,
            probs=config.dataset_probs if dataset == config.dataset else None,
            seed=seed,
            max_samples=config.max_samples,
            data_format=config.data_format,
        )
        # Detect formats before rendering, so that a wrong column fails at once.
        formats = self.formats(config, rows.sources)
        forms = [str(formats[source.name]) for source in rows.sources]
        check_image_key(rows, reader)
        report = DataReport(self.items_are, read_sources(rows, forms), rows=len(rows))
        encoder = ExampleEncoder(template, tokenizer, reader)
        # Plain text uses no template, which a base model may not have.
        if template.apply_chat_template and any(form.name != "text" for form in formats.values()):
            report.end_of_turn = encoder.tried_template()
        schema = schema_with_pictures(pa.schema(self.schema | ORIGIN), has_pictures=reader is not None)
        kept_at = kept_path(
            config, tokenizer, rows, kind=self.items_are, formats=forms, template=template, reader=reader
        )
        drops = config.invalid_rows == "drop"
        pipeline = _KindPipeline(rows, encoder, report, drops, self, config, formats, schema)
        table = pipeline.table(progress, kept_at=kept_at)
        if len(table) == 0:
            raise UsageError(f"no {report.items_are[:-1]} remains for training: {report.summary}")
        numbers = [name for name, column in self.schema.items() if column in (pa.int32(), pa.bool_())]
        return LoadedData(
            StoredItems(table, self.item_at),
            {name: table.column(name) for name in numbers},
            report,
            row_of=lambda item: rows.sources[table.value("source", item)].row(table.value("index", item)),
            # Paths and times of images are left out, since they differ between machines.
            fingerprint=lambda: table.digest(name for name in table.names if name not in ORIGIN and name != FILES),
            patches=patches_of(table),
        )


@dataclass(frozen=True)
class LoadedData(Generic[Item]):
    """Items in row order, read from a memory-mapped file on access, so data may exceed the memory. Packing is separate.

    - `columns`: numbers per item, int32 or bool [N], by name: lengths in tokens, and `num_trained`, which are trained
      tokens, or labeled steps.
    - `row_of`: reads an item's row again.
    - `fingerprint`: returns a hash of all items, independent of their source.
    - `patches`: image patches per item, int64 [N]; None for text models.
    """

    items: collections.abc.Sequence[Item]
    columns: dict[str, np.ndarray]
    report: DataReport
    row_of: Callable[[int], Row]
    fingerprint: Callable[[], str]
    patches: np.ndarray | None = None

    def where(self, item: int) -> str:
        """Return the file and line of an item's row."""
        return self.row_of(item).where


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


@dataclass(frozen=True)
class RowPipeline(ABC):
    """Pipeline from rows to table columns, in batches. Subclasses parse rows and make items."""

    rows: Rows
    encoder: Encoder
    report: DataReport
    drops_invalid: bool

    @abstractmethod
    def _draft(self, row: Row) -> Draft | None:
        """Parse and render a row; None if it is filtered out. Raises RowFault."""

    @abstractmethod
    def _items(self, draft: Draft, tokens: list[Tokens]) -> list[dict[str, object]]:
        """Return the stored columns of a row's items. Raises RowFault."""

    @older_objects_uncollected()
    def fill(self, writer: TableWriter, progress: Progress = no_progress) -> TableWriter:
        """Write the items of all rows."""
        for num_rows, drafts, tokens in self._tokenised():
            made = zip(drafts, tokens, strict=True)
            items = [item for draft, found in made for item in self._made(draft, found)]
            writer.append_columns({name: [item[name] for item in items] for name in writer.schema.names})
            self.report.items += len(items)
            progress(num_rows, len(self.rows))
        return writer

    def _tokenised(self) -> Iterator[Batch]:
        """Yield parsed rows with tokens, batch by batch.

        Threads tokenize batches while the next ones are read and rendered: the tokenizer releases the GIL.
        """
        num_rows = 0
        waiting: deque[Future[Batch]] = deque()
        # Slow tokenizers are Python code with caches, so the rendering thread must not use them at the same time.
        at_once = BATCHES_AT_ONCE if self.encoder.is_fast else 0
        with ThreadPoolExecutor(BATCHES_AT_ONCE) as executor:
            for batch in batches(self.rows, BATCH_ROWS if self.encoder.reader is None else PICTURE_BATCH_ROWS):
                drafted = [self._tried_draft(row) for row in batch]
                drafts = self.encoder.measured([draft for draft in drafted if draft is not None])
                # Check at least one row per batch, since formats may change within a dataset.
                num_checked = max(1, CHECKED_ROWS - num_rows)
                num_rows += len(batch)
                waiting.append(executor.submit(self._with_tokens, num_rows, drafts, num_checked=num_checked))
                # Limit the queue, because rendered batches take memory.
                if len(waiting) > at_once:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()

    def _with_tokens(self, num_rows: int, drafts: list[Draft], *, num_checked: int) -> Batch:
        return num_rows, drafts, self.encoder.tokens(drafts, num_checked=num_checked)

    def _tried_draft(self, row: Row) -> Draft | None:
        """Render a row, or store its error. Errors are raised later in row order, because earlier batches may also have
        some.
        """
        try:
            return self._draft(row)
        except RowFault as fault:
            return Draft(row, None, (), [], fault)

    def _made(self, draft: Draft, tokens: Found) -> list[dict[str, object]]:
        """Return a row's items; none if it is invalid and such rows are dropped."""
        try:
            if isinstance(tokens, RowFault):
                raise tokens
            for part in tokens:
                # Note tokens before truncation: the check protects the embedding for any max_len.
                self.report.note_largest(part.ids, draft.row)
            self.report.note_controls(draft.controls, draft.row)
            return self._items(draft, tokens)
        except RowFault as fault:
            if not self.drops_invalid:
                raise RowFault(f"{fault}; use --invalid_rows drop to skip such rows") from fault
            self.report.note("dropped_invalid", str(fault))
            return []


@dataclass(frozen=True)
class _KindPipeline(RowPipeline, Generic[Settings, Read, Item]):
    """Pipeline for a kind of offline data."""

    encoder: ExampleEncoder
    kind: Kind[Settings, Read, Item]
    config: Settings
    formats: dict[str, RowFormat[Read]]
    schema: pa.Schema

    def table(self, progress: Progress, *, kept_at: Path | None) -> StoredTable:
        """Return all items and update the report. Items are loaded from, or saved to, the cache file `kept_at`."""
        if kept_at is None:
            return self.fill(TableWriter(self.schema), progress).finish()
        # Another process may be writing the same entry: wait, then read it.
        with one_at_a_time(kept_at):
            kept = read_kept(kept_at, self.schema)
            # Images may have been replaced since the table was made.
            if kept is not None and files_are_unchanged(kept.table):
                self.report.take(kept.counts)
                return kept.table
            with KeptTableWriter(self.schema, kept_at) as writer:
                self.fill(writer, progress)
                if self.encoder.reader is not None and self.report.dropped_invalid:
                    return writer.finish()  # do not cache: a missing image may exist next time
                return writer.keep(self.report.counts())

    def _draft(self, row: Row) -> Draft:
        if self.encoder.reader is None:
            refuse_images(row)
        read = self.formats[row.source.name].read(row)
        examples = self.encoder.placed(row, self.kind.examples(row, read, self.config))
        texts = self.kind.mark(row, read, self.encoder.rendered(row, examples), self.config)
        return Draft(row, read, examples, texts, controls=self.encoder.controls(examples))

    def _items(self, draft: Draft, tokens: list[Tokens]) -> list[dict[str, object]]:
        for key in _unread_keys(draft):
            what = f"with the key {key!r} in messages, which may be a mark and is not known"
            self.report.details[what] = self.report.details.get(what, 0) + 1
        origin = {"source": self._numbers[draft.row.source.name], "index": draft.row.index}
        made = self.kind.make(Encoded(draft.row, draft.read, tokens), self.config, self.report)
        return [item | origin for item in made]

    @cached_property
    def _numbers(self) -> dict[str, int]:
        """Numbers of the sources by name."""
        return {source.name: number for number, source in enumerate(self.rows.sources)}


def _unread_keys(draft: Draft) -> list[str]:
    """Return unknown message keys that may be loss markers, without duplicates."""
    conversations = (example for example in draft.examples if isinstance(example, Conversation))
    return sorted({key for talk in conversations for message in talk.messages for key in message.unread})
