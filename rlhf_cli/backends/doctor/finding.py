"""The record that every check of `rlhf doctor` returns."""

from dataclasses import dataclass
from typing import Literal

Status = Literal["ok", "warning", "error"]


@dataclass(frozen=True, slots=True)
class Finding:
    """One checked part of this machine or installation.

    `warning`: something works slower, or one feature does not work. `error`: a run would fail.
    """

    part: str
    status: Status
    message: str
    cure: str = ""
    """A command, or a sentence if no command helps; empty if nothing is to be done."""


def ok(part: str, message: str) -> Finding:
    """Return a finding that needs no action."""
    return Finding(part, "ok", message)
