"""Results of a user's reward function, one a response. Runs in the worker only.

A function returns a list of numbers; a list of dicts with `overall`, `reward` or `score`; or OpenRLHF's dict of
`rewards`, `scores` and `extra_logs`; a dict of lists with these keys. None stands for a reward that failed.
"""

import math
from typing import TypedDict

from rlhf_cli.rewards.records import BadResult

VALUE_KEYS = ("overall", "reward", "score")
"""Keys of the number that counts in a dict about one response; the first that is there. A `score` beside it filters."""


class UserResult(TypedDict):
    """The reward of one response: a value, or the problem with the returned object, which may be of the wrong type.

    `filter` is the number for dynamic filtering, None if it is the value.
    """

    value: float | None
    problem: str
    malformed: bool
    filter: float | None
    metrics: dict[str, float]


def checked(result: object, expected: int, *, logged: dict[str, object] | None = None) -> list[UserResult]:
    """Return the results of `expected` responses. Raises BadResult if there is no list of that length.

    `logged` are metrics that were reported besides, lists by response or one number for all.
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
    found = [_of_one(value) for value in _listed(result, expected, "values")]
    for one, filtered in zip(found, filters, strict=True):
        number = _number(filtered)
        one["filter"] = one["filter"] if number is None else number
    for name, values in logs.items():
        for one, value in zip(found, _spread(values, expected), strict=True):
            _note(one["metrics"], name, value)
    return found


def _plain(value: object) -> object:
    """Return the numbers and lists in place of numpy's arrays and tensors."""
    return value.tolist() if hasattr(value, "tolist") else value


def _listed(values: object, expected: int, what: str) -> list[object]:
    values = _plain(values)
    if not isinstance(values, list | tuple):
        raise BadResult(f"returned {type(values).__name__}, not a list of numbers")
    if len(values) != expected:
        raise BadResult(f"returned {len(values)} {what} for {expected} responses")
    return list(values)


def _rows(columns: dict[object, object], expected: int) -> list[dict[object, object]]:
    """Return one dict a response from a dict of lists. Raises BadResult if no list of rewards is among them."""
    key = next((key for key in VALUE_KEYS if key in columns), None)
    if key is None:
        raise BadResult(f"returned a dict of {', '.join(map(str, columns)) or 'nothing'}, not of rewards")
    _listed(columns[key], expected, f"values of {key}")
    spread = [_spread(values, expected) for values in columns.values()]
    return [dict(zip(columns, row, strict=True)) for row in zip(*spread, strict=True)]


def _spread(values: object, expected: int) -> list[object]:
    """Return a metric by response: one number counts for all; another length gives None."""
    values = _plain(values)
    if not isinstance(values, list | tuple):
        return [values] * expected
    return list(values) if len(values) == expected else [None] * expected


def _of_one(value: object) -> UserResult:
    if not isinstance(value, dict):
        return _result(value)
    key = next((key for key in VALUE_KEYS if key in value), None)
    if key is None:
        names = ", ".join(map(str, value)) or "nothing"
        return _failed(f"returned a dict of {names} without {', '.join(VALUE_KEYS)}", malformed=True)
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
    if isinstance(value, str) or not hasattr(value, "__float__"):
        return _failed(f"returned {type(value).__name__} {str(value)[:40]!r}, not a number", malformed=True)
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError) as error:
        return _failed(f"returned a value that is no number: {error}", malformed=True)
    if not math.isfinite(number):
        return _failed(f"returned {number}", malformed=False)
    return UserResult(value=number, problem="", malformed=False, filter=None, metrics={})


def _failed(problem: str, *, malformed: bool) -> UserResult:
    return UserResult(value=None, problem=problem, malformed=malformed, filter=None, metrics={})


def _number(value: object) -> float | None:
    """Return the finite number that something is, None if it is none."""
    return _result(value)["value"]


def _note(metrics: dict[str, float], name: str, value: object) -> None:
    number = _number(value)
    if number is not None:
        metrics[str(name)] = number
