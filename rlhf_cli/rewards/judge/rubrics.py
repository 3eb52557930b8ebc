"""Rubrics of rows: weighted criteria, and the reward from which of them a response meets."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from math import isfinite

from rlhf_cli.rewards.records import BadResult

_TEXT_KEYS, _WEIGHT_KEYS = ("criterion", "description"), ("weight", "points")
"""Keys of an item: ours first, then others in data sets with rubrics."""


@dataclass(frozen=True)
class Item:
    """A criterion and its weight. A negative weight is for what a response must not do."""

    criterion: str
    weight: float


def items_of(value: object) -> list[Item]:
    """Read a rubric: a list of objects with `criterion` and `weight` (1 by default) or of texts, also as JSON text.

    Raises BadResult, with the end of a sentence about the rubric, if it is not valid or no weight is positive.
    """
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            raise BadResult("is not a list of criteria in JSON") from None
    if not isinstance(value, list) or not value:
        raise BadResult("is not a list of criteria")
    items = [_item(number, one) for number, one in enumerate(value, 1)]
    if all(item.weight <= 0 for item in items):
        raise BadResult("has no criterion with a positive weight")
    return items


def _item(number: int, value: object) -> Item:
    entry = value if isinstance(value, dict) else {"criterion": value}
    text = next((entry[key] for key in _TEXT_KEYS if key in entry), None)
    weight = next((entry[key] for key in _WEIGHT_KEYS if key in entry), 1.0)
    if not isinstance(text, str) or not text.strip():
        raise BadResult(f"has no text in 'criterion' of item {number}")
    if isinstance(weight, bool) or not isinstance(weight, int | float) or not isfinite(weight):
        raise BadResult(f"has no number in 'weight' of item {number}")
    return Item(text, float(weight))


def shown(items: Sequence[Item]) -> str:
    """Return the numbered criteria, without weights, which are not the judge's concern."""
    return "\n".join(f"{number}. {item.criterion}" for number, item in enumerate(items, 1))


def reward_of(items: Sequence[Item], met: Sequence[bool]) -> float:
    """Return the sum of the weights of met criteria, relative to the sum of positive weights: at most 1."""
    earned = sum(item.weight for item, is_met in zip(items, met, strict=True) if is_met)
    return earned / sum(item.weight for item in items if item.weight > 0)
