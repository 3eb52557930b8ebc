"""Built-in rewards inside a worker process: loads the selected functions and calls them."""

import contextlib
import json
from collections.abc import Callable
from functools import partial
from typing import Any, SupportsFloat

from rlhf_cli.config.plugins import load_target
from rlhf_cli.config.rewards import RewardCall, RewardRow

# Address space limit per worker in bytes. Algebra on a model-written formula can allocate any amount of memory before
# the timeout; with this limit, only that item fails.
_WORKER_MEMORY = 4 << 30


def resolve(call: RewardCall) -> Callable[..., Any]:
    """Return the reward function with parameters bound."""
    function = call.row.function
    return partial(load_target(function) if isinstance(function, str) else function, **call.parameters)


def load(calls: list[list[Any]]) -> Callable[[list[Any]], Any]:
    """Return the worker's handler for calls `[name, parameters, target]`.

    - Items: `[index of the call, response, label]`, plus the row's verifier under by_row.
    - Results: `[status, detail, answer, value]` from verifiers, a number from text rewards.
    """
    rewards = [RewardCall(*call) for call in calls]
    # A user's reward may import libraries that reserve far more address space than they use.
    if not any(reward.target for reward in rewards):
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
    """Convert any number, including NumPy's, to a float for JSON. Raises TypeError for other types."""
    if isinstance(value, SupportsFloat):
        return float(value)
    raise TypeError(f"returned {value!r}, not a number")


def with_alternatives(row: RewardRow, verifier: Callable[..., Any]) -> Callable[..., Any]:
    """Let a verifier that compares answers accept any entry if the label is a JSON list of strings.

    Skywork-OR1 stores ground truths as such lists.
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
    # Best effort: the module is missing outside POSIX, and a stricter limit may already be set.
    with contextlib.suppress(ImportError, ValueError, OSError):
        import resource

        _, most = resource.getrlimit(resource.RLIMIT_AS)
        resource.setrlimit(resource.RLIMIT_AS, (_WORKER_MEMORY, most))
