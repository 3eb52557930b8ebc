"""`Any` stays rare, because the type checker ignores it."""

import re
from pathlib import Path

PACKAGE = Path(__file__).parents[2] / "rlhf_cli"
LIMIT = 8
"""Lines with `Any` in 1,000 lines."""


def test_any_is_rare() -> None:
    lines = [line for path in PACKAGE.rglob("*.py") for line in path.read_text(encoding="utf-8").splitlines()]
    rate = 1000 * sum(bool(re.search(r"\bAny\b", line)) for line in lines) / len(lines)
    assert rate <= LIMIT, f"{rate:.1f} lines with `Any` in 1,000: give the type, or `object` for a value passed through"
