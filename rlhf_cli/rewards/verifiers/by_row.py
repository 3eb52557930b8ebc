"""The reward `by_row`: the verifier that a row names, so that math and code are learned in one run."""

import functools
from collections.abc import Callable
from typing import Any

from rlhf_cli.config.rewards import read_call
from rlhf_cli.rewards.verifiers.builtin import Verdict


def by_row(
    response: str, label: str | None, *, call: str | None = None, code_unsandboxed: bool, reward_timeout: float
) -> Verdict:
    """Return the verdict of the verifier that `call` names: `code(timeout=5)`. Verifiers may take the settings."""
    if call is None:
        return Verdict("failed", "the row names no verifier")
    settings = (("code_unsandboxed", code_unsandboxed), ("reward_timeout", reward_timeout))
    return _verifier(call, settings)(response, label)


@functools.cache
def _verifier(text: str, settings: tuple[tuple[str, Any], ...]) -> Callable[..., Verdict]:
    from rlhf_cli.rewards.workers.functions import resolve, with_alternatives

    call = read_call(text)
    known = {name: value for name, value in settings if name in call.row.settings}
    return with_alternatives(call.row, functools.partial(resolve(call), **known))
