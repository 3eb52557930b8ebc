"""Progress bar while rows are prepared, before the run's view starts.

Shown only on a terminal, and only if the work takes longer than a moment.
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
    """Yield a function to call with the number of processed rows and the total. The bar is removed at the end.

    Set `shown` on one rank only. The bar is printed to stderr unless a console is passed.
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
        # Later calls to start() do nothing.
        if clock() - began > MOMENT:
            bar.start()

    try:
        yield update
    finally:
        bar.stop()
