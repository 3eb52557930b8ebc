"""Result type for all checks in `rlhf doctor`."""

from dataclasses import dataclass
from typing import Literal

_Status = Literal["ok", "warning", "error"]


@dataclass(frozen=True, slots=True)
class Finding:
    """Result of a check.

    A `warning` means that a feature is slower or unavailable, an `error` that runs would fail.
    """

    part: str
    status: _Status
    message: str
    cure: str = ""
    """How to fix the problem: a command or a sentence; empty if there is none."""


def ok(part: str, message: str) -> Finding:
    """Create a finding without a problem."""
    return Finding(part, "ok", message)
