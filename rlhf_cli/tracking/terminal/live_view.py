"""Live view of a run: progress, metrics with sparklines, phase times, speed and memory.

live_region.py keeps it in place on the terminal.
"""

import math
import time
from collections.abc import Callable, Mapping
from itertools import pairwise

from rich.console import Console
from rich.text import Text

from rlhf_cli.tracking.figures import Reading, duration, number, prominent, scaled, title
from rlhf_cli.tracking.terminal.live_region import LiveRegion
from rlhf_cli.tracking.terminal.progress import Pace

_SPARKS = "▁▂▃▄▅▆▇█"
_BROKEN_SPARK = "!"
_MAX_POINTS = 256
_MAX_METRIC_ROWS = 5
_TITLE_CELLS, _VALUE_CELLS = 18, 9
_MIN_COLUMN_CELLS = 36
_MAX_COLUMNS = 3
_GAP = 3
_PHASE_STYLES = {
    "generate": "blue",
    "reward": "yellow",
    "forward": "cyan",
    "advantage": "white",
    "train": "magenta",
    "transfer": "green",
    "data": "yellow",
    "eval": "bright_blue",
    "other": "bright_black",
}
_FURTHER_STYLES = ("red", "bright_blue", "bright_green", "bright_magenta")


class History:
    """A metric's history, averaged to at most `_MAX_POINTS` points with the same number of steps each."""

    def __init__(self) -> None:
        self._points: list[float] = []
        self._steps_per_point = 1
        # Values of the last point, which is not complete yet.
        self._open: list[float] = []

    def add(self, value: float) -> None:
        """Append a step's value."""
        self._open.append(value)
        if len(self._open) == self._steps_per_point:
            self._points.append(mean(self._open))
            self._open = []
        # Full: halve the resolution, so that memory stays constant over any number of steps.
        if len(self._points) == _MAX_POINTS:
            self._points = [mean(self._points[i : i + 2]) for i in range(0, _MAX_POINTS, 2)]
            self._steps_per_point *= 2

    def sparkline(self, cells: int) -> str:
        """Draw the whole history in at most `cells` characters."""
        points = self._points + ([mean(self._open)] if self._open else [])
        bins = min(cells, len(points))
        edges = [len(points) * i // bins for i in range(bins + 1)] if bins else [0]
        means = [mean(points[start:end]) for start, end in pairwise(edges)]
        finite = [value for value in means if math.isfinite(value)]
        low, high = (min(finite), max(finite)) if finite else (0.0, 0.0)
        scale = (len(_SPARKS) - 1) / (high - low) if high > low else 0.0
        return "".join(_SPARKS[round((v - low) * scale)] if math.isfinite(v) else _BROKEN_SPARK for v in means)


class LiveView:
    """Shows the run at the bottom of the terminal, refreshed several times per second."""

    def __init__(
        self,
        console: Console,
        pace: Pace,
        *,
        unit: str,
        history: Mapping[int, Mapping[str, float]],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._pace = pace
        self._unit = unit
        self._clock = clock
        self._courses: dict[str, History] = {}
        self._latest: dict[str, float] = {}
        self._phases: dict[str, float] = {}
        self._running: tuple[str, float] | None = None
        for step, metrics in history.items():
            self._take(Reading(step, metrics))
        self._region = LiveRegion(console, self.lines)
        self._region.start()

    def phase(self, name: str | None) -> None:
        """Show the current phase."""
        self._running = None if name is None else (name, self._clock())

    def step(self, reading: Reading) -> None:
        """Update the metrics; they appear with the next refresh."""
        self._take(reading)

    def message(self, text: str, *, style: str = "") -> None:
        """Print a line above the view."""
        self._region.print(Text(text, style=style))

    def close(self) -> None:
        """Draw the final state and leave it on the terminal."""
        self._running = None
        self._region.stop()

    def lines(self, width: int) -> list[Text]:
        """Render the view as lines of at most `width` cells."""
        blocks = [[self._progress(width)], self._metrics(width), self._phase_lines(width), [self._status()]]
        lines = [Text()]
        for block in blocks:
            if block and any(line.plain for line in block):
                lines += [*block, Text()]
        return lines[:-1]

    def _take(self, reading: Reading) -> None:
        for name, value in reading.metrics.items():
            self._courses.setdefault(name, History()).add(value)
        # Replaced, not updated: the refresh thread may be reading the old dictionary.
        self._latest = {**self._latest, **reading.metrics}
        self._phases = reading.phases

    def _progress(self, width: int) -> Text:
        pace = self._pace
        head = f" {self._unit} {pace.step}/{pace.total_steps} "
        left = "" if pace.remaining is None else f"  {duration(pace.remaining)} left"
        tail = f" {pace.share:4.0%}  {duration(pace.elapsed)}{left if pace.share < 1 else ''}"
        cells = max(0, width - len(head) - len(tail))
        done = round(cells * pace.share)
        return Text.assemble(
            (head, "bold"), ("━" * done, "green"), ("━" * (cells - done), "bright_black"), (tail, "default")
        )

    def _metrics(self, width: int) -> list[Text]:
        """Arrange the metrics in columns, filled from top to bottom."""
        columns = min(_MAX_COLUMNS, max(1, (width - 1) // _MIN_COLUMN_CELLS))
        cells = (width - 1 - _GAP * (columns - 1)) // columns
        names = prominent(name for name in self._latest if not name.startswith("eval/"))[: _MAX_METRIC_ROWS * columns]
        rows = -(-len(names) // columns)
        lines = []
        for row in range(rows):
            line = Text(" ")
            for position, name in enumerate(names[row::rows]):
                line.append(" " * _GAP if position else "")
                line.append(self._metric(name, cells))
            lines.append(line)
        return lines

    def _metric(self, name: str, cells: int) -> Text:
        value = self._latest[name]
        label = Text(title(name), style="default")
        label.truncate(_TITLE_CELLS, overflow="ellipsis", pad=True)
        style = "bold" if math.isfinite(value) else "bold red"
        sparks = self._courses[name].sparkline(max(0, cells - _TITLE_CELLS - _VALUE_CELLS - 1))
        line = Text.assemble(label, (f"{number(value):>{_VALUE_CELLS}}", style), " ", (sparks, "cyan"))
        line.truncate(cells, pad=True)
        return line

    def _phase_lines(self, width: int) -> list[Text]:
        """Draw a bar with the phase shares of the last step, and its legend."""
        total = sum(self._phases.values())
        if total <= 0:
            return []
        bar, legend, used = Text(" "), [Text()], 0
        cells, reached = width - 2, 0.0
        for name, seconds in sorted(self._phases.items(), key=lambda phase: -phase[1]):
            reached += seconds
            end = round(cells * reached / total)
            bar.append("━" * (end - used), style=_phase_style(name))
            used = end
            share = f"{100 * seconds / total:.0f}%"
            entry = Text.assemble(" ", ("■", _phase_style(name)), f" {name} {duration(seconds)} ", (share, "bold"), " ")
            if legend[-1].cell_len + entry.cell_len > width:
                legend.append(Text())
            legend[-1].append(entry)
        return [bar, *legend]

    def _status(self) -> Text:
        parts = []
        if self._running:
            name, since = self._running
            parts.append(f"now {name} {duration(self._clock() - since)}")
        elif not self._latest:
            parts.append(f"starting {duration(self._pace.elapsed)}")
        if "perf/tokens_per_second" in self._latest:
            parts.append(f"{scaled(self._latest['perf/tokens_per_second'])} tokens/s")
        for name, value in self._latest.items():
            if name.startswith("memory/") and name.endswith("_gib"):
                parts.append(f"{name[7:-4].replace('_', ' ')} {value:.1f} GiB")
        return Text(" " + " · ".join(parts) if parts else "", style="default")


def mean(values: list[float]) -> float:
    """Compute the arithmetic mean."""
    return sum(values) / len(values)


def _phase_style(name: str) -> str:
    """Return a phase's color, which is the same in every run."""
    return _PHASE_STYLES.get(name) or _FURTHER_STYLES[sum(name.encode()) % len(_FURTHER_STYLES)]
