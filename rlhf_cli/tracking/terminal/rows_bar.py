"""A bar on the terminal while rows are prepared, before a run has a view of its own.

Without a terminal nothing is shown, and nothing for work that takes a moment.
"""

import io
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import cast

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from rlhf_cli.tracking.terminal.console import open_console

MOMENT = 1.0
"""Seconds before a bar appears."""


@contextmanager
def rows_bar(
    *, shown: bool, console: Console | None = None, clock: Callable[[], float] = time.monotonic
) -> Iterator[Callable[[int, int], None]]:
    """Yield a function of the rows done and their total; the bar disappears at the end.

    Only one rank should have it `shown`. Without a console it is on standard error.
    """
    console = console or open_console(cast(io.TextIOBase, sys.stderr))
    if not (shown and console.is_terminal):
        yield lambda done, total: None
        return
    columns = (TextColumn("Reading data"), BarColumn(), MofNCompleteColumn(), TextColumn("rows"), TimeRemainingColumn())
    bar = Progress(*columns, console=console, transient=True)
    task = bar.add_task("rows", total=None)
    began = clock()

    def update(done: int, total: int) -> None:
        bar.update(task, completed=done, total=total)
        if clock() - began > MOMENT:
            bar.start()  # does nothing the second time

    try:
        yield update
    finally:
        bar.stop()
