"""The built-in rewards of a run, inside a worker process: loads the functions that are asked for and calls them."""

import contextlib
import json
from collections.abc import Callable
from functools import partial
from typing import Any, SupportsFloat

from rlhf_cli.config.plugins import load_target
from rlhf_cli.config.rewards import RewardCall, RewardRow

# Bytes of address space a worker may take. Algebra on a model's formula can request any amount within its limit of
# time; this makes it an error of that one item.
WORKER_MEMORY = 4 << 30


def resolve(call: RewardCall) -> Callable[..., Any]:
    """Return the function of a reward with its parameters."""
    function = call.row.function
    return partial(load_target(function) if isinstance(function, str) else function, **call.parameters)


def load(calls: list[list[Any]]) -> Callable[[list[Any]], Any]:
    """Return the handler of a worker for calls `[name, parameters, target]`.

    It answers `[number of the call, response, label]`, for by_row with the row's verifier as a fourth item. Of a
    verifier the answer is `[status, detail, answer, value]`, of a text reward a number.
    """
    rewards = [RewardCall(*call) for call in calls]
    if not any(reward.target for reward in rewards):  # a library of the user's may reserve any address space
        _limit_memory()
    functions = [with_alternatives(reward.row, resolve(reward)) for reward in rewards]

    def handle(item: list[Any]) -> Any:
        number, response, label, *named = item
        kind = rewards[number].row.kind
        if kind in ("text", "answer"):
            return _number(functions[number](response, *([label] if kind == "answer" else [])))
        verdict = functions[number](response, label, **({"call": named[0]} if named else {}))
        return [verdict.status, verdict.detail, verdict.answer, verdict.value]

    return handle


def _number(value: object) -> float:
    """Return a number, also one of NumPy, as JSON has it. Raise TypeError for anything else."""
    if isinstance(value, SupportsFloat):
        return float(value)
    raise TypeError(f"returned {value!r}, not a number")


def with_alternatives(row: RewardRow, verifier: Callable[..., Any]) -> Callable[..., Any]:
    """Return the verifier, for which a label that is a JSON list of texts names several right answers, if it compares
    answers.

    Skywork-OR1's ground truths are such lists.
    """
    if row.structured_labels != ("list",):
        return verifier

    def any_of(response: str, label: str | None) -> Any:
        verdicts = [verifier(response, one) for one in _alternatives(label)]
        return next((verdict for verdict in verdicts if verdict.status == "correct"), verdicts[0])

    return any_of


def _alternatives(label: str | None) -> list[str | None]:
    if label is None or not label.startswith("["):
        return [label]
    try:
        listed = json.loads(label)
    except (ValueError, RecursionError):
        return [label]
    return listed if isinstance(listed, list) and listed and all(isinstance(one, str) for one in listed) else [label]


def _limit_memory() -> None:
    with contextlib.suppress(ImportError, ValueError, OSError):  # not on every system, or lower already
        import resource

        _, most = resource.getrlimit(resource.RLIMIT_AS)
        resource.setrlimit(resource.RLIMIT_AS, (WORKER_MEMORY, most))
