"""Parsing and validation of reward function results. Runs only in workers.

A reward function may return:

- a list of numbers,
- a list of dicts with `overall`, `reward` or `score`,
- a dict of lists with one of these keys,
- OpenRLHF's dict with `rewards`, `scores` and `extra_logs`.

None marks a failed reward.
"""

import math
from typing import TypedDict

from rlhf_cli.rewards.records import BadResult

_VALUE_KEYS = ("overall", "reward", "score")
"""Reward keys in a dict, in order of precedence. A `score` next to another key is the filter value."""


class UserResult(TypedDict):
    """Reward for one response.

    - `value`: None if the reward failed; then `problem` is the reason.
    - `malformed`: the result has an invalid type, which indicates a bug in the function.
    - `filter`: value for dynamic filtering; None uses `value`.
    - `metrics`: extra metrics by name.
    """

    value: float | None
    problem: str
    malformed: bool
    filter: float | None
    metrics: dict[str, float]


def checked(result: object, expected: int, *, logged: dict[str, object] | None = None) -> list[UserResult]:
    """Parse the results for `expected` responses. Raises BadResult unless there is one result per response.

    `logged` holds metrics from callbacks: a list with one value per response, or one number for all.
    """
    filters: list[object] = [None] * expected
    logs = dict(logged or {})
    if isinstance(result, dict) and "rewards" not in result:
        result = _rows(result, expected)
    if isinstance(result, dict):
        if result.get("scores") is not None:
            filters = _listed(result["scores"], expected, "scores")
        logs |= result.get("extra_logs") or {}
        result = result["rewards"]
    results = [_of_one(value) for value in _listed(result, expected, "values")]
    for one, filtered in zip(results, filters, strict=True):
        number = _number(filtered)
        one["filter"] = one["filter"] if number is None else number
    for name, values in logs.items():
        for one, value in zip(results, _spread(values, expected), strict=True):
            _note(one["metrics"], name, value)
    return results


def _plain(value: object) -> object:
    """Convert NumPy arrays and tensors to numbers and lists."""
    # By attribute: importing numpy or torch here would slow down the worker start.
    return value.tolist() if hasattr(value, "tolist") else value


def _listed(values: object, expected: int, what: str) -> list[object]:
    values = _plain(values)
    if not isinstance(values, list | tuple):
        raise BadResult(f"returned {type(values).__name__}, not a list of numbers")
    if len(values) != expected:
        raise BadResult(f"returned {len(values)} {what} for {expected} responses")
    return list(values)


def _rows(columns: dict[object, object], expected: int) -> list[dict[object, object]]:
    """Convert a dict of lists to one dict per response. Raises BadResult if it contains no rewards."""
    key = next((key for key in _VALUE_KEYS if key in columns), None)
    if key is None:
        raise BadResult(f"returned a dict with keys {', '.join(map(str, columns)) or 'none'}, without rewards")
    _listed(columns[key], expected, f"values of {key}")
    spread = [_spread(values, expected) for values in columns.values()]
    return [dict(zip(columns, row, strict=True)) for row in zip(*spread, strict=True)]


def _spread(values: object, expected: int) -> list[object]:
    """Expand a metric to one value per response. A number applies to all; a list with a different length gives None."""
    values = _plain(values)
    if not isinstance(values, list | tuple):
        return [values] * expected
    return list(values) if len(values) == expected else [None] * expected


def _of_one(value: object) -> UserResult:
    if not isinstance(value, dict):
        return _result(value)
    key = next((key for key in _VALUE_KEYS if key in value), None)
    if key is None:
        names = ", ".join(map(str, value)) or "none"
        return _failed(f"returned a dict with keys {names}, without {', '.join(_VALUE_KEYS)}", malformed=True)
    result = _result(value[key])
    result["filter"] = _number(value.get("score")) if key != "score" else None
    for name, other in value.items():
        if name != key:
            _note(result["metrics"], str(name), other)
    return result


def _result(value: object) -> UserResult:
    value = _plain(value)
    if value is None:
        return _failed("returned None", malformed=False)
    # float() would accept strings such as "1" or "nan".
    if isinstance(value, str) or not hasattr(value, "__float__"):
        return _failed(f"returned {type(value).__name__} {str(value)[:40]!r}, not a number", malformed=True)
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError) as error:
        return _failed(f"returned an invalid number: {error}", malformed=True)
    if not math.isfinite(number):
        return _failed(f"returned {number}", malformed=False)
    return UserResult(value=number, problem="", malformed=False, filter=None, metrics={})


def _failed(problem: str, *, malformed: bool) -> UserResult:
    return UserResult(value=None, problem=problem, malformed=malformed, filter=None, metrics={})


def _number(value: object) -> float | None:
    """Return the value as a finite number, or None."""
    return _result(value)["value"]


def _note(metrics: dict[str, float], name: str, value: object) -> None:
    number = _number(value)
    if number is not None:
        metrics[str(name)] = number
