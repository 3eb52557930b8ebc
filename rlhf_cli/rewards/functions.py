"""The built-in rewards of a run, inside a worker process: loads the functions that are asked for and calls them."""

import contextlib
import importlib
from collections.abc import Callable
from functools import partial
from typing import Any

from rlhf_cli.config.rewards import RewardCall

# Bytes of address space a worker may take. Algebra on what a model wrote can ask for any amount within its limit of
# time; this makes it an error of that one item.
WORKER_MEMORY = 4 << 30


def resolve(call: RewardCall) -> Callable[..., Any]:
    """The function of a reward with its parameters."""
    module, _, name = call.row.function.partition(":")
    return partial(getattr(importlib.import_module(module), name), **call.parameters)


def load(calls: list[list[Any]]) -> Callable[[list[Any]], Any]:
    """The handler of a worker for calls `[name, parameters]`.

    It answers `[number of the call, response, label]` with `[status, detail, answer, value]` of a verifier and with the
    number of a text reward.
    """
    _limit_memory()
    rewards = [RewardCall(*call) for call in calls]
    functions = [resolve(reward) for reward in rewards]

    def handle(item: list[Any]) -> Any:
        number, response, label = item
        if rewards[number].row.kind == "text":
            return functions[number](response)
        verdict = functions[number](response, label)
        return [verdict.status, verdict.detail, verdict.answer, verdict.value]

    return handle


def _limit_memory() -> None:
    with contextlib.suppress(ImportError, ValueError, OSError):  # not on every system, or lower already
        import resource

        _, most = resource.getrlimit(resource.RLIMIT_AS)
        resource.setrlimit(resource.RLIMIT_AS, (WORKER_MEMORY, most))
