"""Preference pairs and labeled responses, as kinds of offline data.

Assistant text and end-of-turn tokens after the common messages are trained. Template tokens after the last turn are
removed. A pair's common prompt is stored once. As labeled responses, a pair gives two: the chosen side first.
"""

from dataclasses import dataclass, replace

import numpy as np
import pyarrow as pa

from rlhf_cli.config.data import OfflineDataConfig
from rlhf_cli.data.encoding import Encoded
from rlhf_cli.data.formats.choosing import labelled_formats, pair_formats
from rlhf_cli.data.formats.conversations import Conversation, Labelled, Message, Preference
from rlhf_cli.data.loading import Kind
from rlhf_cli.data.packing.prefix_packing import Continuation
from rlhf_cli.data.pictures.storing import pictures_at, stored_pictures
from rlhf_cli.data.preparing import NUMBERS, DataReport, count_cut, fitting, flat, mask_of
from rlhf_cli.data.reading.columns import refuse
from rlhf_cli.data.store import StoredTable
from rlhf_cli.data.tokenizing.tokenizer import Tokens
from rlhf_cli.models.vision.pictures import PlacedPicture


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


PAIRS = Kind(
    "pairs",
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
    },
    pair_formats,
    lambda row, pair, config: [Conversation(pair.prompt + side, pair.tools) for side in (pair.chosen, pair.rejected)],
    _pair,
    _pair_at,
)
RESPONSES = Kind(
    "responses",
    {
        "prompt_ids": NUMBERS,
        "response_ids": NUMBERS,
        "response_spans": NUMBERS,
        "desirable": pa.bool_(),
        "prompt_length": pa.int32(),
        "response_length": pa.int32(),
        "num_trained": pa.int32(),
    },
    labelled_formats,
    lambda row, listed, config: [Conversation(one.prompt + one.response, one.tools) for one in listed],
    _responses,
    _response_at,
)
