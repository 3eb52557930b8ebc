"""Datasets of tokenized sequences for supervised fine-tuning.

Sequences are in a memory-mapped file, so data may exceed the memory. Packing is separate.
"""

import collections.abc
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
from transformers import PreTrainedTokenizerBase

from rlhf_cli.config.data import DEFAULT_TEMPLATE, DataConfig, TemplateConfig
from rlhf_cli.data.cache import kept_path
from rlhf_cli.data.data_sets import not_empty, rows_of, with_tried_template
from rlhf_cli.data.encoding import Encoded, Encoder
from rlhf_cli.data.formats.choosing import sequence_formats
from rlhf_cli.data.formats.conversations import Conversation, Document
from rlhf_cli.data.formats.marks import fault_of_marks
from rlhf_cli.data.packing.packs import TokenSequence
from rlhf_cli.data.pictures.reading import PictureReader, check_image_key
from rlhf_cli.data.pictures.storing import patches_of, pictures_at, schema_with_pictures, stored_pictures
from rlhf_cli.data.preparing import (
    ORIGIN,
    DataReport,
    Origins,
    Preparation,
    Progress,
    contents_digest,
    count_cut,
    fitting,
    flat,
    mask_of,
    no_progress,
)
from rlhf_cli.data.reading.sources import Row, read_sources
from rlhf_cli.data.store import StoredItems, StoredTable

SCHEMA = pa.schema(
    {
        "token_ids": pa.list_(pa.int32()),
        "spans": pa.list_(pa.int32()),
        "length": pa.int32(),
        "num_trained": pa.int32(),
        **ORIGIN,
    }
)


def _sequence_at(table: StoredTable, row: int) -> TokenSequence:
    token_ids = table.numbers("token_ids", row)
    return TokenSequence(token_ids, mask_of(table.numbers("spans", row), token_ids.size), pictures_at(table, row))


@dataclass(frozen=True)
class SequenceData:
    """Tokenized data: `lengths` and `num_trained` (int32 [N]) are tokens and trained tokens per sequence.

    `patches` (int64 [N]) are image patches per sequence, None for text models. `where` returns the file and line of a
    sequence's row; `fingerprint` hashes tokens and loss masks.
    """

    sequences: collections.abc.Sequence[TokenSequence]
    lengths: np.ndarray
    num_trained: np.ndarray
    report: DataReport
    where: collections.abc.Callable[[int], str]
    fingerprint: collections.abc.Callable[[], str]
    patches: np.ndarray | None = None


def load_sft_sequences(
    config: DataConfig,
    tokenizer: PreTrainedTokenizerBase,
    *,
    dataset: str,
    split: str,
    seed: int,
    template: TemplateConfig = DEFAULT_TEMPLATE,
    progress: Progress = no_progress,
    reader: PictureReader | None = None,
) -> SequenceData:
    """Load and tokenize a dataset's sequences in row order, with a report.

    Assistant text and the following end-of-turn tokens are trained; in plain text, or with `pretrain_mode`, all tokens
    except the first. `dataset_probs` apply only if `dataset` is the training dataset. `progress` is called with the
    number of processed and total rows.

    Raises:
        UsageError: a row is invalid (the message contains file and line), or no sequence remains.
    """
    rows = rows_of(config, dataset, split, seed)
    formats = sequence_formats(config, rows.sources)
    check_image_key(rows, reader)
    forms = [f"{formats[source.name].name}: {formats[source.name].columns}" for source in rows.sources]
    report = DataReport("sequences", read_sources(rows, forms), rows=len(rows))
    encoder = Encoder(template, tokenizer, reader)
    # Plain text uses no template, which a base model may not have.
    if any(form.name != "text" for form in formats.values()):
        encoder = with_tried_template(encoder, template, report)

    def read(row: Row) -> tuple[None, list[Conversation | Document]]:
        example = formats[row.source.name].read(row)
        if config.pretrain_mode and isinstance(example, Conversation) and fault_of_marks(example.messages):
            raise row.error("a marker excludes text from the loss, but --pretrain_mode trains on all text: remove one")
        return None, [example]

    def make(encoded: Encoded[None], report: DataReport) -> list[dict[str, object]]:
        return _sequence(encoded, config, report)

    schema = schema_with_pictures(SCHEMA, has_pictures=reader is not None)
    preparation = Preparation(schema, read, make, encoder, config.invalid_rows == "drop", progress)
    kept_at = kept_path(config, tokenizer, rows, kind="sequences", formats=forms, template=template, reader=reader)
    table = not_empty(preparation.table(rows, report, kept_at=kept_at), report)
    sequences = StoredItems(table, _sequence_at)
    return SequenceData(
        sequences,
        table.column("length"),
        table.column("num_trained"),
        report,
        where=Origins(rows, table),
        fingerprint=lambda: contents_digest(table),
        patches=patches_of(table),
    )


def _sequence(encoded: Encoded[None], config: DataConfig, report: DataReport) -> list[dict[str, object]]:
    tokens = encoded.tokens
    # Before truncation, because the spans change which tokens remain trained.
    if config.pretrain_mode:
        tokens = [part.all_trained() for part in tokens]
    kept = fitting(encoded.row, tokens, config, report)
    if kept is None:
        return []
    count_cut(encoded.row, tokens, kept, report)
    (sequence,) = kept
    report.tokens += len(sequence.ids)
    report.trained_tokens += sequence.num_trained
    report.count_turns(sequence)
    pictures = stored_pictures(sequence.pictures)
    item = {"token_ids": sequence.ids, "spans": flat(sequence.spans), "length": len(sequence.ids)}
    return [item | pictures | {"num_trained": sequence.num_trained}]
