"""Loads the user's reward file inside a worker process.

The reward may be a function, an async function, a callable object, or a class with callable instances. Each call
receives the responses to one prompt. user_forms.py defines the signatures, user_results.py the return values. The
trainer never imports the file, and each worker creates a separate instance.
"""

import inspect
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, cast

from rlhf_cli.rewards.records import BadResult
from rlhf_cli.rewards.workers.user_forms import OWN_FORM, Log, UserBatch, call, signature_of
from rlhf_cli.rewards.workers.user_module import import_file
from rlhf_cli.rewards.workers.user_results import UserResult, checked

_FUNCTIONS = ("reward_func", "compute_score")
"""Default function names: `rlhf`'s and OpenRLHF's, then verl's and EasyR1's."""


def load(argument: dict[str, Any]) -> Callable[[UserBatch], object]:
    """Return the worker's handler, which calls function `name` from the file at `path` with extra arguments `args`.

    The handler returns one result per response, or an awaitable if the function is async. Its `about` attribute holds
    the signature and the large columns that the function needs.

    Raises:
        BadResult: the file has no usable function. The message completes the sentence "reward.py ...".
        Exception: any exception raised while importing the file.
    """
    path, args = argument["path"], argument["args"]
    name, reward = _reward_function(import_file(Path(path), "reward_file"), argument["name"])
    signature = signature_of(reward, args)

    def handle(batch: UserBatch) -> object:
        log, expected = Log(), len(batch["queries"])
        result = call(reward, signature, batch, args=args, log=log)
        waits = [one for one in (result if signature.form.each else [result]) if inspect.isawaitable(one)]
        if waits:
            return _checked_later(waits, expected, log, is_each=signature.form.each)
        return checked(result, expected, logged=log.metrics)

    form = "" if signature.form is OWN_FORM else f"{name} in {path} is called as {signature.form.name} calls it: "
    about = {"form": form and form + signature.form.signature, "needs": signature.needs}
    handle.about = about  # type: ignore[attr-defined]
    return handle


async def _checked_later(waits: list[Awaitable[object]], expected: int, log: Log, *, is_each: bool) -> list[UserResult]:
    # Imported lazily: it takes 40 ms, which a plain function does not need.
    import asyncio

    found = await asyncio.gather(*waits)
    return checked(found if is_each else found[0], expected, logged=log.metrics)


def _reward_function(module: object, name: str | None) -> tuple[str, Callable[..., object]]:
    chosen = next((one for one in ([name] if name else _FUNCTIONS) if hasattr(module, one)), None)
    if chosen is None:
        defined = [name for name, value in vars(module).items() if inspect.isroutine(value) or inspect.isclass(value)]
        has = f"it defines {', '.join(defined)}" if defined else "it defines no function"
        wanted = name or f"{_FUNCTIONS[0]}(queries, prompts, labels)"
        hint = "" if name or not defined else f"; to use another one, pass --reward_func FILE.py:{defined[0]}"
        raise BadResult(f"has no function {wanted}; {has}{hint}")
    reward = getattr(module, chosen)
    if inspect.isclass(reward):
        reward = reward()
    if not callable(reward):
        raise BadResult(f"defines {chosen}, but it is not a function")
    return chosen, cast(Callable[..., object], reward)
