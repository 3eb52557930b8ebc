"""Terminal lines that are redrawn in place.

rich's Live counts the lines that it drew. If the terminal becomes narrower, these lines wrap, and Live leaves their
upper halves behind. LiveRegion computes the rows to erase from the current width instead. The cursor is never hidden,
so a killed process leaves a usable terminal.
"""

import threading
from collections.abc import Callable
from contextlib import suppress

from rich.console import Console, ConsoleOptions, ConsoleRenderable, RenderHook, RenderResult
from rich.control import Control
from rich.segment import ControlType, Segment
from rich.text import Text

# Per second. Often enough for a running clock, and cheap over SSH.
_REFRESHES_PER_SECOND = 4


class LiveRegion(RenderHook):
    """Keeps `draw(width)` at the bottom of the terminal. Other console output appears above it."""

    def __init__(self, console: Console, draw: Callable[[int], list[Text]]) -> None:
        self._console = console
        self._draw = draw
        # Width in cells of each line on the screen.
        self._drawn: list[int] = []
        # The refresh thread and the training thread both print: erasing, printing and redrawing must not interleave.
        self._lock = threading.RLock()
        self._done = threading.Event()
        # A daemon, so that a run that dies without `stop` can exit.
        self._thread = threading.Thread(target=self._keep_fresh, name="live view", daemon=True)

    def start(self) -> None:
        """Draw now, then repeatedly until `stop()`."""
        self._console.push_render_hook(self)
        self._thread.start()

    def stop(self) -> None:
        """Draw a last time and leave the lines on the terminal."""
        if self._done.is_set():
            return
        self._done.set()
        self._thread.join()
        self.refresh()
        self._console.pop_render_hook()

    def refresh(self) -> None:
        """Draw now."""
        self.print(Control())

    def print(self, line: Text | Control) -> None:
        """Print above the region."""
        with self._lock:
            self._console.print(line)

    def process_renderables(self, renderables: list[ConsoleRenderable]) -> list[ConsoleRenderable]:
        """Erase the region, print, and redraw. Called by rich for everything printed on the console."""
        return [self._take_back(), *renderables, self]

    def _take_back(self) -> Control:
        # A line that was wider than the terminal is now has wrapped to more than one row.
        width = max(1, self._console.size.width)
        rows = sum(max(1, -(-cells // width)) for cells in self._drawn)
        self._drawn = []
        return Control(*((ControlType.CURSOR_UP, 1), (ControlType.ERASE_IN_LINE, 2)) * rows)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        size = console.size
        # Leave one column free: some terminals wrap as soon as the last column is written.
        width = size.width - 1
        lines = self._draw(width)[: max(1, size.height - 2)]
        for line in lines:
            line.truncate(width)
            self._drawn.append(line.cell_len)
            yield from line.render(console)
            yield Segment.line()

    def _keep_fresh(self) -> None:
        while not self._done.wait(1 / _REFRESHES_PER_SECOND):
            # Losing the terminal must not stop the training.
            with suppress(OSError):
                self.refresh()
