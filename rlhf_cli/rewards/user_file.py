"""A user's Python file with `reward_func(queries, prompts, labels)`, inside a worker process.

`reward_func` is a function, an async function, an object that can be called, or a class whose instances can be; it is
called with the responses to one prompt and returns one finite number for each. Runs in the worker only: nothing of the
file is imported into the trainer. Several workers may run the same file, each with an instance of its own.
"""

import importlib.machinery
import importlib.util
import inspect
import math
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, TypedDict, cast

from rlhf_cli.rewards.records import BadResult

FUNCTION = "reward_func"


class Batch(TypedDict):
    """The three lists a reward function gets."""

    queries: list[str]
    prompts: list[str]
    labels: list[str | None]


def load(path: str) -> Callable[[Batch], Any]:
    """The handler of a worker: `[value, ""]` for each response, or `[None, what is wrong with its value]`.

    Where the function is async, what the handler returns has to be awaited for that.

    Raises:
        BadResult: the file has no usable function; the message ends the sentence "reward.py ...".
        Exception: whatever the file raises while it is imported.
    """
    reward = _reward_function(_import(Path(path)))

    def handle(batch: Batch) -> Any:
        result, expected = reward(batch["queries"], batch["prompts"], batch["labels"]), len(batch["queries"])
        return _checked_later(result, expected) if inspect.isawaitable(result) else checked(result, expected)

    return handle


async def _checked_later(result: Awaitable[Any], expected: int) -> list[list[Any]]:
    return checked(await result, expected)


def checked(result: Any, expected: int) -> list[list[Any]]:
    """The values of a result one by one. Raises BadResult where it is no list of the expected length."""
    values = result.tolist() if hasattr(result, "tolist") else result  # numpy arrays and tensors
    if not isinstance(values, list | tuple):
        raise BadResult(f"returned {type(result).__name__}, not a list of numbers")
    if len(values) != expected:
        raise BadResult(f"returned {len(values)} values for {expected} responses")
    return [_checked_value(value) for value in values]


def _checked_value(value: Any) -> list[Any]:
    if isinstance(value, str) or not hasattr(value, "__float__"):
        return [None, f"returned {type(value).__name__} {str(value)[:40]!r}, not a number"]
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError) as error:
        return [None, f"returned a value that is no number: {error}"]
    return [number, ""] if math.isfinite(number) else [None, f"returned {number}"]


def _import(path: Path) -> Any:
    """The file as a module; it may import what lies beside it, as if it were run."""
    sys.path.insert(0, str(path.parent))
    loader = importlib.machinery.SourceFileLoader("reward_file", str(path))
    spec = importlib.util.spec_from_loader("reward_file", loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["reward_file"] = module  # dataclasses and pickle in the file look their module up
    try:
        loader.exec_module(module)
    except SyntaxError as error:
        if error.filename != str(path):
            raise
        raise BadResult(f"is not valid Python: line {error.lineno}: {error.msg}") from error
    return module


def _reward_function(module: Any) -> Callable[..., Any]:
    if not hasattr(module, FUNCTION):
        defined = [name for name, value in vars(module).items() if inspect.isroutine(value) or inspect.isclass(value)]
        has = f"it has {', '.join(defined)}" if defined else "it defines no function"
        raise BadResult(f"has no function {FUNCTION}(queries, prompts, labels); {has}")
    reward = getattr(module, FUNCTION)
    if inspect.isclass(reward):
        reward = reward()
    if not callable(reward):
        raise BadResult(f"has {FUNCTION}, but it is not a function")
    try:
        inspect.signature(reward).bind([], [], [])
    except TypeError as error:
        raise BadResult(f"has {FUNCTION}, but it cannot be called with (queries, prompts, labels): {error}") from error
    except ValueError:  # a built-in without a signature
        pass
    return cast(Callable[..., Any], reward)
