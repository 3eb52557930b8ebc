"""The progress bar of data preparation."""

import io

import pytest
from rich.console import Console

from rlhf_cli.tracking.terminal.rows_bar import MOMENT, rows_bar


def shown(*, terminal=True, wanted=True, seconds=MOMENT + 1):
    """Return the console output at 1,000 of 4,000 rows and at the end."""
    stream = io.StringIO()
    console = Console(file=stream, force_terminal=terminal, width=100)
    times = iter([0.0, seconds, seconds])
    with rows_bar(shown=wanted, console=console, clock=lambda: next(times)) as update:
        update(1000, 4000)
        during = stream.getvalue()
        update(4000, 4000)
    return during, stream.getvalue()


def test_bar_says_how_many_rows_are_done_and_disappears():
    during, after = shown()
    assert "1000/4000" in during
    assert after.endswith("\x1b[2K")  # the line is erased


@pytest.mark.parametrize("reason", [{"terminal": False}, {"wanted": False}, {"seconds": MOMENT / 2}])
def test_nothing_is_shown_without_a_terminal_on_other_ranks_or_for_a_moment(reason):
    assert "4000" not in "".join(shown(**reason))
