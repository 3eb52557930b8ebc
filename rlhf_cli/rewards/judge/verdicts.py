"""Forms of verdicts, and their readers: a verdict is the last JSON object in a judge's completion."""

import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from rlhf_cli.rewards.records import BadResult
from rlhf_cli.rewards.remote.call import in_one_line

_READ = 50_000
"""Last characters of a completion that may contain the verdict, which bounds the time to search for it."""
_START = re.compile(r'\{\s*"')
_DECODER = json.JSONDecoder(strict=False)
"""Accepts control characters in texts, which models write and grammars of JSON schemas permit."""

_REASON = '"reason": "your reasons in one or two sentences"'
_MAX_REASON = 1000
"""Characters after which a schema ends a reason: a weak model might repeat itself until its token limit."""

Judgement = dict[str, object]
"""A verdict as JSON values, with a `reason`."""


@dataclass(frozen=True)
class Form:
    """Form of a verdict.

    - `words`: completes "End with one JSON object and nothing after it: ".
    - `schema`: JSON Schema, which permits every valid verdict; an order may still repeat a response.
    - `read`: returns the verdict in a completion. Raises BadResult without a valid one.
    """

    words: str
    schema: Mapping[str, object]
    read: Callable[[str], Any]


def pointwise_form(ends: tuple[float, float]) -> Form:
    """Return the form of a score within `ends`."""
    low, high = ends
    words = f'{{{_REASON}, "score": S}}, where S is a number from {low:g} (worst) to {high:g} (best).'
    score = {"type": "number", "minimum": low, "maximum": high}
    return Form(words, _object(reason=_TEXT, score=score), partial(score_of, ends=ends))


def rubric_form(count: int) -> Form:
    """Return the form of verdicts on `count` criteria."""
    words = (
        '{"items": [{"item": 1, "reason": "your reason in one sentence", "met": true or false}, ...]}, with each '
        f"of the {count} criteria once."
    )
    each = [_object(item={"const": number}, reason=_TEXT, met={"type": "boolean"}) for number in range(1, count + 1)]
    items = {"type": "array", "prefixItems": each, "items": False, "minItems": count, "maxItems": count}
    return Form(words, _object(items=items), partial(items_of_verdict, count=count))


def pairwise_form() -> Form:
    """Return the form of a comparison of two responses."""
    words = f'{{{_REASON}, "better": B}}, where B is 1 or 2, the number of the better response, or "tie".'
    return Form(words, _object(reason=_TEXT, better={"enum": [1, 2, "tie"]}), winner_of)


def listwise_form(count: int) -> Form:
    """Return the form of an order of `count` responses."""
    words = f'{{{_REASON}, "order": [...]}} with the numbers of all {count} responses, the best first.'
    number = {"enum": [*range(1, count + 1)]}
    order = {"type": "array", "items": number, "minItems": count, "maxItems": count}
    return Form(words, _object(reason=_TEXT, order=order), partial(order_of, count=count))


_TEXT = {"type": "string", "maxLength": _MAX_REASON}


def _object(**properties: Mapping[str, object]) -> dict[str, object]:
    # In this order, so that reasons come before what they are for.
    required = list(properties)
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


def last_object(completion: str) -> Judgement:
    """Return the last JSON object that is not part of a larger one. Raises BadResult without one."""
    text, found, end = completion[-_READ:], None, 0
    for start in _START.finditer(text):
        if start.start() < end:
            continue
        try:
            found, end = _DECODER.raw_decode(text, start.start())
        except ValueError:
            continue
        # Each of a thousand nested objects would be read again, which takes seconds.
        except RecursionError:
            break
    if found is None:
        raise BadResult(f"gave no verdict in JSON: {in_one_line(completion[-_READ:])}")
    return dict(found)


def score_of(completion: str, ends: tuple[float, float]) -> Judgement:
    """Return `score`, scaled to 0 to 1, and `reason`."""
    verdict = last_object(completion)
    value, (low, high) = _value(verdict, "score"), ends
    if not _is_number(value):
        raise BadResult(f"gave the score {_quoted(value)}, not a number")
    if not low <= value <= high:  # type: ignore[operator]
        raise BadResult(f"gave the score {value:g}, outside {low:g} to {high:g}")
    return {"score": (value - low) / (high - low), "reason": _reason(verdict)}  # type: ignore[operator]


def items_of_verdict(completion: str, count: int) -> list[Judgement]:
    """Return `met` and `reason` for each of `count` criteria, which the verdict numbers from 1."""
    items = _value(last_object(completion), "items")
    if not isinstance(items, list) or not all(isinstance(item, dict) for item in items):
        raise BadResult(f"gave the items {_quoted(items)}, not a list of objects")
    numbers = [_value(item, "item") for item in items]
    if not _are_numbered(numbers, count):
        raise BadResult(f"gave verdicts on the items {_quoted(numbers)}, not on each of 1 to {count} once")
    judgements: dict[object, Judgement] = {}
    for number, item in zip(numbers, items, strict=True):
        if not isinstance(_value(item, "met"), bool):
            raise BadResult(f"gave the verdict {_quoted(item['met'])} on item {number}, not true or false")
        judgements[number] = {"met": item["met"], "reason": _reason(item)}
    return [judgements[number] for number in range(1, count + 1)]


def winner_of(completion: str) -> Judgement:
    """Return `won`, 1 if the first response is better, 0 if the second is, 0.5 for a tie, and `reason`."""
    verdict = last_object(completion)
    better = _value(verdict, "better")
    # `True == 1` in Python, but it names no response.
    if isinstance(better, bool) or better not in (1, 2, "tie"):
        raise BadResult(f'gave {_quoted(better)} as the better response, not 1, 2 or "tie"')
    return {"won": {1: 1.0, 2: 0.0, "tie": 0.5}[better], "reason": _reason(verdict)}  # type: ignore[index]


def order_of(completion: str, count: int) -> Judgement:
    """Return `order`, the positions of `count` responses from best to worst, from 0, and `reason`."""
    verdict = last_object(completion)
    order = _value(verdict, "order")
    if not isinstance(order, list) or not _are_numbered(order, count):
        raise BadResult(f"gave the order {_quoted(order)}, not each of 1 to {count} once")
    return {"order": [number - 1 for number in order], "reason": _reason(verdict)}


def _value(verdict: Mapping[str, object], name: str) -> object:
    if name not in verdict:
        raise BadResult(f"gave a verdict without {name!r}: {_quoted(verdict)}")
    return verdict[name]


def _are_numbered(values: Sequence[object], count: int) -> bool:
    """Return whether the values are the integers 1 to `count`, in any order."""
    # `True == 1` in Python.
    numbers = [value for value in values if isinstance(value, int) and not isinstance(value, bool)]
    return len(numbers) == len(values) and sorted(numbers) == list(range(1, count + 1))


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _reason(verdict: Mapping[str, object]) -> str:
    reason = verdict.get("reason", "")
    if not isinstance(reason, str):
        raise BadResult(f"gave the reason {_quoted(reason)}, not a text")
    return reason


def _quoted(value: object) -> str:
    return in_one_line(json.dumps(value))
