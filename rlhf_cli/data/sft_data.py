"""Sequences for supervised fine-tuning, as a kind of offline data.

Assistant text and the following end-of-turn tokens are trained; in plain text, or with `pretrain_mode`, all tokens
except the first.
"""

import numpy as np
import pyarrow as pa

from rlhf_cli.config.data import DataConfig
from rlhf_cli.data.encoding import Encoded
from rlhf_cli.data.formats.choosing import sequence_formats
from rlhf_cli.data.formats.conversations import Conversation
from rlhf_cli.data.formats.marks import fault_of_marks
from rlhf_cli.data.formats.table import Example
from rlhf_cli.data.loading import Kind
from rlhf_cli.data.packing.loss_weights import WEIGHTS
from rlhf_cli.data.packing.packs import TokenSequence
from rlhf_cli.data.pictures.storing import pictures_at, stored_pictures
from rlhf_cli.data.preparing import FRACTIONS, NUMBERS, DataReport, count_cut, fitting, flat, mask_of
from rlhf_cli.data.reading.sources import Row
from rlhf_cli.data.store import StoredTable


def _sequence_at(table: StoredTable, row: int) -> TokenSequence:
    token_ids = table.numbers("token_ids", row)
    spans, weights = table.numbers("spans", row), table.numbers("weights", row)
    # Without weights, a sequence needs no column.
    columns = {WEIGHTS: np.repeat(weights, np.diff(spans.reshape(-1, 2)).ravel())} if weights.size else {}
    return TokenSequence(token_ids, mask_of(spans, token_ids.size), pictures_at(table, row), columns)


def _examples(row: Row, example: Example, config: DataConfig) -> list[Example]:
    if config.pretrain_mode and isinstance(example, Conversation) and fault_of_marks(example.messages):
        raise row.error("a marker excludes text from the loss, but --pretrain_mode trains on all text: remove one")
    return [example]


def _sequence(encoded: Encoded[Example], config: DataConfig, report: DataReport) -> list[dict[str, object]]:
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
    if sequence.weights:
        report.note("weighted_rows", encoded.row.where)
    pictures = stored_pictures(sequence.pictures)
    item = {"token_ids": sequence.ids, "spans": flat(sequence.spans), "weights": list(sequence.weights)}
    return [item | pictures | {"length": len(sequence.ids), "num_trained": sequence.num_trained}]


SEQUENCES = Kind(
    "sequences",
    {"token_ids": NUMBERS, "spans": NUMBERS, "weights": FRACTIONS, "length": pa.int32(), "num_trained": pa.int32()},
    sequence_formats,
    _examples,
    _sequence,
    _sequence_at,
)
