"""The last lines of a terminal, drawn again and again in place.

rich's own Live counts the lines it drew; when a terminal is made narrower, it wraps those lines, and Live leaves
their upper halves behind. Here the rows to take back are computed from the width at that moment. The cursor is
never hidden: a process that is killed leaves a usable terminal.
"""

import threading
from collections.abc import Callable
from contextlib import suppress

from rich.console import Console, ConsoleOptions, ConsoleRenderable, RenderHook, RenderResult
from rich.control import Control
from rich.segment import ControlType, Segment
from rich.text import Text

REFRESHES_PER_SECOND = 4


class LiveRegion(RenderHook):
    """Keeps `draw(width)` at the bottom of the terminal; whatever else the console prints goes above it."""

    def __init__(self, console: Console, draw: Callable[[int], list[Text]]) -> None:
        self._console = console
        self._draw = draw
        self._drawn: list[int] = []  # cells of each line on the screen
        self._lock = threading.RLock()
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._keep_fresh, name="live view", daemon=True)

    def start(self) -> None:
        """Draw, and draw again a few times a second until `stop()`."""
        self._console.push_render_hook(self)
        self._thread.start()

    def stop(self) -> None:
        """Draw a last time and leave the lines in place."""
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
        """Called by rich for everything printed on the console: taken back, printed, drawn again."""
        return [self._take_back(), *renderables, self]

    def _take_back(self) -> Control:
        width = max(1, self._console.size.width)
        rows = sum(max(1, -(-cells // width)) for cells in self._drawn)
        self._drawn = []
        return Control(*((ControlType.CURSOR_UP, 1), (ControlType.ERASE_IN_LINE, 2)) * rows)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        size = console.size
        # One column stays free: some terminals wrap as soon as the last one is written.
        width = size.width - 1
        lines = self._draw(width)[: max(1, size.height - 2)]
        for line in lines:
            line.truncate(width)
            self._drawn.append(line.cell_len)
            yield from line.render(console)
            yield Segment.line()

    def _keep_fresh(self) -> None:
        while not self._done.wait(1 / REFRESHES_PER_SECOND):
            with suppress(OSError):  # a terminal that is gone is no reason to stop training
                self.refresh()
