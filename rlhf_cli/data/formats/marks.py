"""Loss markers from other tools, which exclude a turn, part of its text, or a row from the loss, or weight it: one
table for all commands.

A marker is applied or rejected, never ignored; otherwise, text marked "do not train" would be trained.
"""

import math
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

from rlhf_cli.data.formats.conversations import Message, Role, Span
from rlhf_cli.data.reading.json_cells import parsed, records
from rlhf_cli.data.reading.sources import Row

MARKS = {
    "weight": True,
    "loss_weight": True,
    "sample_weight": True,
    "train": True,
    "training": True,
    "trainable": True,
    "loss": True,
    "loss_mask": True,
    "loss_scale": True,
    "masked": False,
    "mask": False,
}
"""Known markers; True if 1 (or true) means trained, False if it means excluded. OpenAI uses `weight`, Axolotl `train`
and `training`, ms-swift `loss` and `loss_scale`, verl and LLaMA-Factory `loss_mask`, torchtune `masked`.
"""
_WEIGHTS = {"weight", "loss_weight", "sample_weight", "loss_scale"}
"""Markers whose value may also be a weight: a number of at least 0 that multiplies the loss of the turn."""
_DETAIL = "train_detail"
"""Axolotl's character ranges with and without loss; both offsets are inclusive."""
_MASK_HISTORY = "mask_history"
"""LLaMA-Factory's setting to train only on the last turn."""
_EITHER_WAY = "mask"
"""Ambiguous: 1 means trained in some tools and excluded in others. true and false are unambiguous."""
_SUSPICIOUS = re.compile(r"train|loss|mask|weight|learn|supervis|ignore|exclude|skip")
"""Patterns in unknown message keys that are likely loss markers."""
_SUSPICIOUS_COLUMN = re.compile(r"loss|mask|weight|train_on|(?:no|not|from|skip)_train")
"""The same for columns, which more often have other purposes."""

_SEVERAL = re.compile(r"[\[(]?\s*(?:[01]|true|false)(?:[\s,;]+(?:[01]|true|false))+[\s,;]*[\])]?", re.IGNORECASE)
"""Several markers in one string."""


def _weight_of(row: Row, where: str, entry: Mapping[str, Any]) -> float | None:
    """Return the product of a message's markers: None without markers, 0 if one excludes it.

    Raises:
        RowFault: a marker has an unsupported value.
    """
    # A null cell is no marker: tables fill missing columns with nulls.
    found = [_weight(row, where, key, entry[key]) for key in MARKS if entry.get(key) is not None]
    return math.prod(found) if found else None


def _weight(row: Row, where: str, key: str, value: object) -> float:
    number = _number(value)
    if key == _EITHER_WAY and not isinstance(value, bool):
        raise row.error(
            f"{where} has {key} {value!r:.40}, which some tools exclude and others train: rename it to "
            "loss_mask (1 trains) or masked (1 excludes)"
        )
    if key in _WEIGHTS and number is not None and number >= 0:
        return number
    if number not in (0, 1):
        expected = "a number from 0" if key in _WEIGHTS else "1 or 0, true or false; other weights belong in `weight`"
        raise row.error(
            f"{where} has {key} {value!r:.40}, expected {expected}: drop {key}, or rename it if it is not a loss marker"
        )
    return float(bool(number) == MARKS[key])


def _number(value: object) -> float | None:
    """Return a marker as a number, also from CSV text; None for other values."""
    if isinstance(value, str):
        value = {"true": 1, "false": 0}.get(value.strip().lower(), value)
    try:
        number = float(value) if isinstance(value, bool | int | float | str) else math.nan
    except ValueError:
        return None
    return number if math.isfinite(number) else None


def marks_of_message(
    row: Row, number: int, role: Role, entry: Mapping[str, Any], *, text_key: str, length: int, has_more: bool
) -> tuple[float, tuple[Span, ...]]:
    """Return the loss weight of message `number`, and the excluded ranges of its content with `length` characters.

    The content under `text_key` is text or parts with optional markers. A message that `has_more` (calls or reasoning)
    is trained on these even if all its content is excluded.

    Raises:
        RowFault: a marker enables loss on a non-assistant message, or cannot be applied.
    """
    where = f"message {number}"
    found = _weight_of(row, where, entry)
    detail = records(entry.get(_DETAIL))
    # Reject instead of ignoring: the user expects loss on this message.
    if role != "assistant":
        if found or _asks_for_loss(detail):
            key = _DETAIL if not found else next(key for key in MARKS if entry.get(key) is not None)
            raise row.error(f"{where} from {role} has {key} {entry[key]!r:.40}, but only assistant turns are trained")
        return 1.0, ()
    is_out = _by_detail(row, where, detail, length) if detail else [False] * length
    parts = entry.get(text_key)
    if isinstance(parts, list):
        # A character is excluded if any marker excludes it.
        is_out = [old or new for old, new in zip(is_out, _by_part(row, where, parts), strict=True)]
    if all(is_out) and is_out and not has_more:
        return 0.0, ()
    return 1.0 if found is None else found, runs_of(is_out)


def _by_part(row: Row, where: str, parts: list[Any]) -> list[bool]:
    """Return for each character of multi-part content whether its part is excluded."""
    is_out: list[bool] = []
    for part in parts:
        weight = _weight_of(row, where, part)
        if weight not in (None, 0, 1):
            raise row.error(
                f"{where} has a part with the loss weight {weight:g}: parts are trained or excluded (1 or 0)"
            )
        is_out += [weight == 0] * len(part["text"])
    return is_out


def _asks_for_loss(detail: object) -> bool:
    return isinstance(detail, list) and any(isinstance(part, dict) and part.get("train") for part in detail)


def _by_detail(row: Row, where: str, detail: object, length: int) -> list[bool]:
    """Return for each character whether Axolotl's ranges exclude it. Characters outside all ranges are trained."""
    is_out = [False] * length
    for part in detail if isinstance(detail, list) else [detail]:
        begin, end, kept = (
            _number(part.get(key)) if isinstance(part, dict) else None
            for key in ("begin_offset", "end_offset", "train")
        )
        if begin is None or end is None or kept not in (0, 1) or begin % 1 or end % 1:
            raise row.error(
                f"{where} has {_DETAIL} {part!r:.80}, expected "
                '{"begin_offset": ..., "end_offset": ..., "train": true or false}'
            )
        if not 0 <= begin <= end < length:
            raise row.error(
                f"{where} has {_DETAIL} from character {begin:g} to {end:g}, but its text has the characters 0 to "
                f"{length - 1}"
            )
        # The end offset is inclusive.
        first, behind = int(begin), int(end) + 1
        is_out[first:behind] = [not kept] * (behind - first)
    return is_out


def runs_of(truths: Sequence[bool]) -> tuple[Span, ...]:
    """Return the ranges of consecutive True values."""
    # Pad with False, so that each run has two edges.
    bounded = [False, *truths, False]
    edges = [place for place, (before, after) in enumerate(pairwise(bounded)) if before != after]
    return tuple(zip(edges[::2], edges[1::2], strict=True))


def unread_marks(row: Row, number: int, entry: Mapping[str, Any], known: Collection[str]) -> tuple[str, ...]:
    """Return unknown message keys that may be markers, judged by values: true, false, 1 or 0.

    Raises:
        RowFault: a key also has a name like a marker.
    """
    unknown = {key: value for key, value in entry.items() if key not in MARKS and key not in known and key != _DETAIL}
    for key, value in unknown.items():
        # Names alone are not enough: a column may be called "training_date".
        if _SUSPICIOUS.search(key.lower()) and _is_like_a_mark(value):
            raise row.error(
                f"message {number} has {key!r} {value!r:.40}, which looks like a mark that leaves text out of the loss "
                f"and is not known: use {', '.join(MARKS)} or {_DETAIL}, or rename or drop the key"
            )
    # Report other keys with such values, without rejecting the row.
    return tuple(key for key, value in unknown.items() if isinstance(value, bool | int | float) and value in (0, 1))


def _is_like_a_mark(value: object) -> bool:
    if isinstance(value, list):
        return bool(value) and all(_is_like_a_mark(entry) for entry in value)
    return isinstance(value, bool | int | float) and 0 <= value <= 1


def marked_by_row(row: Row, messages: tuple[Message, ...], used: Collection[str] = ()) -> tuple[Message, ...]:
    """Apply markers in the row's columns: one for the row, or a list with one per turn.

    A list has one entry per message, with or without the system message, or per assistant turn. Columns in `used` are
    not markers.
    """
    _refuse_unknown_columns(row, used)
    weights = [1.0] * len(messages)
    answers = [place for place, message in enumerate(messages) if message.role == "assistant"]
    for key, value in _marks_of_row(row, used).items():
        if isinstance(value, list):
            factors = _by_message(row, key, value, messages)
        else:
            factors = [_weight(row, "the row", key, value)] * len(messages)
        # Several columns must all enable loss.
        weights = [weight * factor for weight, factor in zip(weights, factors, strict=True)]
    # Applied last, because it overrides the other markers.
    history = _number(row.get(_MASK_HISTORY)) if _MASK_HISTORY not in used else None
    if history:
        weights = [weight if place == answers[-1] else 0.0 for place, weight in enumerate(weights)]
    return tuple(
        replace(message, loss_weight=message.loss_weight * weight) if message.role == "assistant" else message
        for message, weight in zip(messages, weights, strict=True)
    )


def _refuse_unknown_columns(row: Row, used: Collection[str]) -> None:
    """Raise RowFault for an unknown column with the name and values of a loss marker."""
    for key, value in row.items():
        is_known = key in MARKS or key == _MASK_HISTORY or key in used
        if not is_known and _SUSPICIOUS_COLUMN.search(key.lower()) and _is_like_a_mark(value):
            raise row.error(
                f"column {key!r} is {value!r:.40}, which looks like a mark that leaves text out of the loss and is not "
                f"known: use {', '.join(MARKS)}, or rename or drop the column"
            )


def _by_message(row: Row, key: str, value: list[object], messages: tuple[Message, ...]) -> list[float]:
    """Return a weight per message; those of non-assistant messages are ignored."""
    every = list(range(len(messages)))
    spoken = [place for place in every if messages[place].role != "system"]
    answers = [place for place in every if messages[place].role == "assistant"]
    # The longest list first: with one assistant message, several forms may have equal length.
    places = next((listed for listed in (every, spoken, answers) if len(listed) == len(value)), None)
    if places is None:
        raise row.error(
            f"column {key!r} has {len(value)} markers, but the row has {len(messages)} messages, {len(answers)} "
            "of them from the assistant: use one per message or per assistant turn"
        )
    weights = [1.0] * len(messages)
    for place, mark in zip(places, value, strict=True):
        if messages[place].role == "assistant" and mark is not None:
            weights[place] = _weight(row, f"message {place + 1}", key, mark)
    return weights


def _marks_of_row(row: Row, used: Collection[str]) -> dict[str, object]:
    """Return marker columns: numbers, booleans and lists of these, also as text. Other text is ignored.

    Raises:
        RowFault: a text contains several numbers but is not a JSON list.
    """
    found = {}
    for key in MARKS:
        value = row.get(key) if key in row and key not in used else None
        # Lists in CSV files are text.
        if isinstance(value, str) and value.strip().startswith("["):
            value = parsed(value)
        if isinstance(value, str) and _SEVERAL.fullmatch(value.strip()):
            raise row.error(f"column {key!r} is {value!r:.40}, which is not a list: write it as [0, 1]")
        if isinstance(value, list) or _number(value) is not None:
            found[key] = value
    return found


def fault_of_row_marks(row: Row, used: Collection[str] = ()) -> str | None:
    """Return why a row is unusable for commands that cannot weight turns, or None if all its weights are 1."""
    for key, value in _marks_of_row(row, used).items():
        marks = value if isinstance(value, list) else [value]
        if any(_weight(row, "the row", key, mark) != 1 for mark in marks if mark is not None):
            return f"column {key!r} is {value!r:.40}: {_ONLY_SFT}"
    return None


_ONLY_SFT = (
    "this marker excludes text from the loss or weights it, which only sft, distill and gkd support (other weights "
    "than 0 and 1 only sft), in conversations; drop the row, or the marker to train on all text"
)


def fault_of_marks(trained: tuple[Message, ...]) -> str | None:
    """Return the error if a marker excludes part of these turns from the loss, or None."""
    marked = any(m.role == "assistant" and (m.left_out or m.loss_weight != 1) for m in trained)
    return f"an assistant turn is marked: {_ONLY_SFT}" if marked else None
