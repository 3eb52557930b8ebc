"""The `by_row` reward: each row selects its verifier, so one run can train on math and code."""

import functools
from collections.abc import Callable
from typing import Any

from rlhf_cli.config.rewards import read_call
from rlhf_cli.rewards.verifiers.builtin import Verdict
from rlhf_cli.rewards.workers.functions import resolve, with_alternatives


def by_row(
    response: str, label: str | None, *, call: str | None = None, code_unsandboxed: bool, reward_timeout: float
) -> Verdict:
    """Run the verifier given by `call`, such as `code(timeout=5)`. Verifiers receive the settings that they declare."""
    if call is None:
        return Verdict("failed", "the row has no verifier")
    settings = (("code_unsandboxed", code_unsandboxed), ("reward_timeout", reward_timeout))
    return _verifier(call, settings)(response, label)


@functools.cache
def _verifier(text: str, settings: tuple[tuple[str, Any], ...]) -> Callable[..., Verdict]:
    call = read_call(text)
    known = {name: value for name, value in settings if name in call.row.settings}
    return with_alternatives(call.row, functools.partial(resolve(call), **known))
