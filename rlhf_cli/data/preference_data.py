"""Datasets of tokenized preference pairs and labeled responses.

A pair's common prompt is stored once. Packing is separate (`packing`).
"""

import collections.abc
from dataclasses import dataclass, replace

import numpy as np
import pyarrow as pa
from transformers import PreTrainedTokenizerBase

from rlhf_cli.config.data import (
    DEFAULT_TEMPLATE,
    LabelledDataConfig,
    OfflineDataConfig,
    PreferenceDataConfig,
    TemplateConfig,
)
from rlhf_cli.data.cache import kept_path
from rlhf_cli.data.data_sets import not_empty, rows_of, with_tried_template
from rlhf_cli.data.encoding import Encoded, Encoder
from rlhf_cli.data.formats.choosing import labelled_formats, pair_formats
from rlhf_cli.data.formats.conversations import Conversation, Document, Labelled, Message, Preference
from rlhf_cli.data.packing.prefix_packing import Continuation
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
from rlhf_cli.data.reading.columns import refuse
from rlhf_cli.data.reading.sources import Row, read_sources
from rlhf_cli.data.store import StoredItems, StoredTable
from rlhf_cli.data.tokenizing.tokenizer import Tokens
from rlhf_cli.models.vision.pictures import PlacedPicture

NUMBERS = pa.list_(pa.int32())
PAIR_SCHEMA = pa.schema(
    {
        "prompt_ids": NUMBERS,
        "chosen_ids": NUMBERS,
        "chosen_spans": NUMBERS,
        "rejected_ids": NUMBERS,
        "rejected_spans": NUMBERS,
        "margin": pa.float64(),
        "prompt_length": pa.int32(),
        "chosen_length": pa.int32(),
        "rejected_length": pa.int32(),
        "num_trained": pa.int32(),
        **ORIGIN,
    }
)
LABELLED_SCHEMA = pa.schema(
    {
        "prompt_ids": NUMBERS,
        "response_ids": NUMBERS,
        "response_spans": NUMBERS,
        "desirable": pa.bool_(),
        "prompt_length": pa.int32(),
        "response_length": pa.int32(),
        "num_trained": pa.int32(),
        **ORIGIN,
    }
)


@dataclass(frozen=True, slots=True)
class Pair:
    """A prompt, int32 [P] with P > 0, with two continuations; `chosen` is better, by `margin` if known.

    The prompt is the common prefix up to the first trained token. Unless truncated at max_len, a continuation ends with
    its last end-of-turn token. `pictures` are in the prompt.
    """

    prompt_ids: np.ndarray
    chosen: Continuation
    rejected: Continuation
    margin: float | None
    pictures: tuple[PlacedPicture, ...] = ()


@dataclass(frozen=True, slots=True)
class LabelledItem:
    """A prompt, int32 [P] with P > 0, with a response that starts with a trained token, and its label.

    `pictures` are in the prompt.
    """

    prompt_ids: np.ndarray
    response: Continuation
    desirable: bool
    pictures: tuple[PlacedPicture, ...] = ()


def _pair_at(table: StoredTable, row: int) -> Pair:
    chosen, rejected = _stored_continuation(table, "chosen", row), _stored_continuation(table, "rejected", row)
    prompt_ids, margin = table.numbers("prompt_ids", row), table.value("margin", row)
    return Pair(prompt_ids, chosen, rejected, margin, pictures_at(table, row))


def _response_at(table: StoredTable, row: int) -> LabelledItem:
    response = _stored_continuation(table, "response", row)
    prompt_ids, desirable = table.numbers("prompt_ids", row), table.value("desirable", row)
    return LabelledItem(prompt_ids, response, desirable, pictures_at(table, row))


def _stored_continuation(table: StoredTable, name: str, row: int) -> Continuation:
    token_ids = table.numbers(f"{name}_ids", row)
    return Continuation(token_ids, mask_of(table.numbers(f"{name}_spans", row), token_ids.size))


@dataclass(frozen=True)
class PairData:
    """Tokenized pairs, in row order.

    Lengths are int32 [N]: prompt tokens, tokens of each continuation without prompt, and trained tokens of both.
    `patches` as in `SequenceData`. `where` returns the file and line of a pair's row; `fingerprint` hashes all data.
    """

    pairs: collections.abc.Sequence[Pair]
    prompt_lengths: np.ndarray
    chosen_lengths: np.ndarray
    rejected_lengths: np.ndarray
    num_trained: np.ndarray
    report: DataReport
    where: collections.abc.Callable[[int], str]
    fingerprint: collections.abc.Callable[[], str]
    patches: np.ndarray | None = None


@dataclass(frozen=True)
class LabelledData:
    """Tokenized labeled responses, in row order. A pair's chosen side precedes the rejected one.

    Lengths are int32 [N]: prompt tokens, response tokens and trained tokens; `desirable` is bool [N]. `patches` as in
    `SequenceData`. `where` returns the file and line of a response's row; `fingerprint` hashes all data.
    """

    items: collections.abc.Sequence[LabelledItem]
    prompt_lengths: np.ndarray
    response_lengths: np.ndarray
    num_trained: np.ndarray
    desirable: np.ndarray
    report: DataReport
    where: collections.abc.Callable[[int], str]
    fingerprint: collections.abc.Callable[[], str]
    patches: np.ndarray | None = None


def load_pairs(
    config: PreferenceDataConfig,
    tokenizer: PreTrainedTokenizerBase,
    *,
    dataset: str,
    split: str,
    seed: int,
    template: TemplateConfig = DEFAULT_TEMPLATE,
    progress: Progress = no_progress,
    reader: PictureReader | None = None,
) -> PairData:
    """Load and tokenize a dataset's preference pairs in row order, with a report.

    Assistant text and end-of-turn tokens after the common messages are trained. Template tokens after the last turn are
    removed. `dataset_probs` apply only if `dataset` is the training dataset. `progress` is called with the number of
    processed and total rows.

    Raises:
        UsageError: a row is invalid (the message contains file and line), or no pair remains.
    """
    rows = rows_of(config, dataset, split, seed)
    # Detect formats before rendering, so that a wrong column fails at once.
    formats = pair_formats(config, rows.sources)
    forms = [formats[source.name].columns for source in rows.sources]
    report = DataReport("pairs", read_sources(rows, forms), rows=len(rows))

    def read(row: Row) -> tuple[Preference, list[Conversation | Document]]:
        pair = formats[row.source.name].read(row)
        return pair, [Conversation(pair.prompt + side, pair.tools) for side in (pair.chosen, pair.rejected)]

    def make(encoded: Encoded[Preference], report: DataReport) -> list[dict[str, object]]:
        return _pair(encoded, config, report)

    check_image_key(rows, reader)
    encoder = with_tried_template(Encoder(template, tokenizer, reader), template, report)
    schema = schema_with_pictures(PAIR_SCHEMA, has_pictures=reader is not None)
    preparation = Preparation(schema, read, make, encoder, config.invalid_rows == "drop", progress)
    kept_at = kept_path(config, tokenizer, rows, kind="pairs", formats=forms, template=template, reader=reader)
    table = not_empty(preparation.table(rows, report, kept_at=kept_at), report)
    return PairData(
        StoredItems(table, _pair_at),
        prompt_lengths=table.column("prompt_length"),
        chosen_lengths=table.column("chosen_length"),
        rejected_lengths=table.column("rejected_length"),
        num_trained=table.column("num_trained"),
        report=report,
        where=Origins(rows, table),
        fingerprint=lambda: contents_digest(table),
        patches=patches_of(table),
    )


def load_labelled(
    config: LabelledDataConfig,
    tokenizer: PreTrainedTokenizerBase,
    *,
    dataset: str,
    split: str,
    seed: int,
    template: TemplateConfig = DEFAULT_TEMPLATE,
    progress: Progress = no_progress,
    reader: PictureReader | None = None,
) -> LabelledData:
    """Load and tokenize a dataset's labeled responses in row order. A pair gives two responses.

    Training targets, `dataset_probs`, `progress` and errors as for `load_pairs`.
    """
    rows = rows_of(config, dataset, split, seed)
    formats = labelled_formats(config, rows.sources)
    forms = [f"{formats[source.name].name}: {formats[source.name].columns}" for source in rows.sources]
    report = DataReport("responses", read_sources(rows, forms), rows=len(rows))

    def read(row: Row) -> tuple[list[Labelled], list[Conversation | Document]]:
        listed = formats[row.source.name].read(row)
        return listed, [Conversation(labelled.prompt + labelled.response, labelled.tools) for labelled in listed]

    def make(encoded: Encoded[list[Labelled]], report: DataReport) -> list[dict[str, object]]:
        return _responses(encoded, config, report)

    check_image_key(rows, reader)
    encoder = with_tried_template(Encoder(template, tokenizer, reader), template, report)
    schema = schema_with_pictures(LABELLED_SCHEMA, has_pictures=reader is not None)
    preparation = Preparation(schema, read, make, encoder, config.invalid_rows == "drop", progress)
    kept_at = kept_path(config, tokenizer, rows, kind="responses", formats=forms, template=template, reader=reader)
    table = not_empty(preparation.table(rows, report, kept_at=kept_at), report)
    return LabelledData(
        StoredItems(table, _response_at),
        prompt_lengths=table.column("prompt_length"),
        response_lengths=table.column("response_length"),
        num_trained=table.column("num_trained"),
        desirable=table.column("desirable"),
        report=report,
        where=Origins(rows, table),
        fingerprint=lambda: contents_digest(table),
        patches=patches_of(table),
    )


def _pair(encoded: Encoded[Preference], config: OfflineDataConfig, report: DataReport) -> list[dict[str, object]]:
    whole = [_answer(tokens, encoded.read.prompt) for tokens in encoded.tokens]
    if whole[0].ids == whole[1].ids:
        raise encoded.row.error("chosen and rejected are equal tokens")
    # Both sides are truncated alike, or the row is dropped as a whole.
    kept = fitting(encoded.row, whole, config, report)
    if kept is None:
        return []
    chosen, rejected = (_ended(tokens) for tokens in kept)
    # Sides may differ only after the limit.
    if chosen.ids == rejected.ids:
        reason = f"chosen and rejected are equal within the first {config.max_len:,} tokens"
        report.note("dropped_equal", f"{encoded.row.where}: {reason}")
        return []
    # Compute after truncation, because the common prefix may be cut too.
    num_prompt = _num_shared(chosen, rejected)
    if num_prompt == 0:
        raise encoded.row.error("the prompt is empty")
    refuse(encoded.row, _fault_of_pictures(chosen, rejected, num_prompt))
    num_trained = chosen.num_trained + rejected.num_trained
    lengths = [len(side.ids) - num_prompt for side in (chosen, rejected)]
    count_cut(encoded.row, whole, kept, report)
    report.tokens += num_prompt + sum(lengths)
    report.trained_tokens += num_trained
    report.count_turns(chosen, rejected)
    _count(report, "with a margin", encoded.read.margin is not None)
    item = {"prompt_ids": chosen.ids[:num_prompt], "prompt_length": num_prompt, "num_trained": num_trained}
    item |= _continuation("chosen", chosen, num_prompt) | _continuation("rejected", rejected, num_prompt)
    item |= stored_pictures(chosen.pictures)
    return [item | {"margin": encoded.read.margin}]


def _responses(
    encoded: Encoded[list[Labelled]], config: OfflineDataConfig, report: DataReport
) -> list[dict[str, object]]:
    items = []
    for labelled, tokens in zip(encoded.read, encoded.tokens, strict=True):
        whole = [_answer(tokens, labelled.prompt)]
        kept = fitting(encoded.row, whole, config, report)
        if kept is None:
            continue
        count_cut(encoded.row, whole, kept, report)
        response = _ended(kept[0])
        # The prompt ends where training starts.
        num_prompt = response.spans[0][0]
        report.tokens += len(response.ids)
        report.trained_tokens += response.num_trained
        report.count_turns(response)
        _count(report, "desirable", labelled.desirable)
        item = {"prompt_ids": response.ids[:num_prompt], "prompt_length": num_prompt}
        item |= _continuation("response", response, num_prompt) | stored_pictures(response.pictures)
        items.append(item | {"num_trained": response.num_trained, "desirable": labelled.desirable})
    return items


def _answer(tokens: Tokens, prompt: tuple[Message, ...]) -> Tokens:
    """Keep only spans after the prompt's messages, and truncate after the last one."""
    # Earlier assistant turns are part of the prompt.
    num_before = sum(message.role == "assistant" for message in prompt)
    return _ended(replace(tokens, spans=tokens.spans[num_before:]))


def _ended(tokens: Tokens) -> Tokens:
    """Truncate after the last trained token, where a reward model reads its score."""
    return tokens.cut(tokens.spans[-1][1])


def _num_shared(chosen: Tokens, rejected: Tokens) -> int:
    """Return the length of the common untrained prefix."""
    # The first trained tokens must stay in the branches, even if they are equal.
    limit = min(chosen.spans[0][0], rejected.spans[0][0])
    pairs = enumerate(zip(chosen.ids[:limit], rejected.ids[:limit], strict=True))
    return next((place for place, (a, b) in pairs if a != b), limit)


def _fault_of_pictures(chosen: Tokens, rejected: Tokens, num_prompt: int) -> str | None:
    """Return an error if an image is not in the common prompt, else None."""
    digests = [[standing.picture.digest for standing in side.pictures] for side in (chosen, rejected)]
    if digests[0] != digests[1]:
        return "chosen and rejected have different images: both must share the prompt's images"
    behind = any(standing.stop > num_prompt for side in (chosen, rejected) for standing in side.pictures)
    return (
        "chosen or rejected has an image after the prompt: images are only supported in the prompt" if behind else None
    )


def _continuation(name: str, tokens: Tokens, num_prompt: int) -> dict[str, object]:
    spans = [(start - num_prompt, stop - num_prompt) for start, stop in tokens.spans]
    ids = tokens.ids[num_prompt:]
    return {f"{name}_ids": ids, f"{name}_spans": flat(spans), f"{name}_length": len(ids)}


def _count(report: DataReport, what: str, is_so: bool) -> None:
    report.details[what] = report.details.get(what, 0) + is_so
