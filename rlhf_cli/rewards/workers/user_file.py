"""A user's Python file with a reward function, inside a worker process.

The function may be async, an object that can be called, or a class whose instances can be. It is called with the
responses to one prompt; user_forms.py has the signatures, user_results.py the return values. Runs in the worker only:
nothing of the file is imported into the trainer. Several workers may run the same file, each with its own instance.
"""

import inspect
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, cast

from rlhf_cli.rewards.records import BadResult
from rlhf_cli.rewards.workers.user_forms import OWN_FORM, Log, UserBatch, call, signature_of
from rlhf_cli.rewards.workers.user_module import import_file
from rlhf_cli.rewards.workers.user_results import UserResult, checked

FUNCTIONS = ("reward_func", "compute_score")
"""Names of the function in a file if none is given: this program's and OpenRLHF's, then verl's and EasyR1's."""


def load(argument: dict[str, Any]) -> Callable[[UserBatch], object]:
    """Return the handler of a worker: a result for each response, from a function called `name` of the file at `path`.

    `args` are parameters of the function. If the function is async, the handler's result has to be awaited. The
    handler's `about` names the function's form, and the large columns that have to be sent.

    Raises:
        BadResult: the file has no usable function; the message ends the sentence "reward.py ...".
        Exception: whatever the file raises while it is imported.
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

    form = "" if signature.form is OWN_FORM else f"{name} of {path} is called as {signature.form.name} calls it: "
    about = {"form": form and form + signature.form.signature, "needs": signature.needs}
    handle.about = about  # type: ignore[attr-defined]
    return handle


async def _checked_later(waits: list[Awaitable[object]], expected: int, log: Log, *, is_each: bool) -> list[UserResult]:
    import asyncio  # 40 ms that a plain function does not need

    found = await asyncio.gather(*waits)
    return checked(found if is_each else found[0], expected, logged=log.metrics)


def _reward_function(module: object, name: str | None) -> tuple[str, Callable[..., object]]:
    found = next((one for one in ([name] if name else FUNCTIONS) if hasattr(module, one)), None)
    if found is None:
        defined = [name for name, value in vars(module).items() if inspect.isroutine(value) or inspect.isclass(value)]
        has = f"it has {', '.join(defined)}" if defined else "it defines no function"
        wanted = name or f"{FUNCTIONS[0]}(queries, prompts, labels)"
        hint = "" if name or not defined else f"; another one is named as --reward_func FILE.py:{defined[0]}"
        raise BadResult(f"has no function {wanted}; {has}{hint}")
    reward = getattr(module, found)
    if inspect.isclass(reward):
        reward = reward()
    if not callable(reward):
        raise BadResult(f"has {found}, but it is not a function")
    return found, cast(Callable[..., object], reward)
