"""Terminal views of a run: plain lines, or a live view (live_view.py) on a terminal.

tracker.py prints the banner and the summary; console.py selects the stream.
"""

import time
from collections import deque
from collections.abc import Callable
from typing import Protocol

from rich.console import Console
from rich.text import Text

from rlhf_cli.tracking.figures import Reading, duration, number, scaled, shown_names

_PLAIN_METRICS = 7
_PLAIN_PHASES = 3
# The remaining time is extrapolated from this many steps: enough to average out long responses.
_STEPS_OF_PACE = 20


class View(Protocol):
    """Shows a run in progress."""

    def phase(self, name: str | None) -> None:
        """Record that a phase began, or that none is running."""

    def step(self, reading: Reading) -> None:
        """Record a finished step."""

    def message(self, text: str, *, style: str = "") -> None:
        """Show a permanent line."""

    def close(self) -> None:
        """Finish the view."""


class Pace:
    """Progress and estimated remaining time, extrapolated from recent steps."""

    def __init__(self, total_steps: int, *, start_step: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self.began = clock()
        self.total_steps = total_steps
        self.step = start_step
        self._recent = deque([(start_step, self.began)], maxlen=_STEPS_OF_PACE + 1)

    def reach(self, step: int) -> None:
        """Record a finished step."""
        self.step = step
        self._recent.append((step, self._clock()))

    @property
    def elapsed(self) -> float:
        """Seconds since the start of this process."""
        return self._clock() - self.began

    @property
    def share(self) -> float:
        """Completed fraction, 0 to 1."""
        return min(1.0, self.step / max(1, self.total_steps))

    @property
    def remaining(self) -> float | None:
        """Estimated remaining seconds, or None before the first step."""
        (first, then), (last, now) = self._recent[0], self._recent[-1]
        if last == first:
            return None
        whole = (now - then) / (last - first) * (self.total_steps - last)
        return max(0.0, whole - (self._clock() - now)) if whole else 0.0


class PlainView:
    """Prints one line per logged step, without escape sequences."""

    def __init__(self, console: Console, pace: Pace, *, unit: str, every: int) -> None:
        self._console = console
        self._pace = pace
        self._unit = unit
        self._every = every

    def phase(self, name: str | None) -> None:
        """No-op: a printed line cannot be updated."""

    def step(self, reading: Reading) -> None:
        """Print the step if due."""
        if reading.step % self._every == 0 or reading.step == self._pace.total_steps:
            self.message(plain_line(reading, self._pace, unit=self._unit))

    def message(self, text: str, *, style: str = "") -> None:
        """Print a line."""
        self._console.print(Text(text, style=style), soft_wrap=True)

    def close(self) -> None:
        """No-op."""


def plain_line(reading: Reading, pace: Pace, *, unit: str) -> str:
    """Format the step, main metrics, longest phases, speed and remaining time."""
    width = len(str(pace.total_steps))
    parts = [f"{unit} {reading.step:>{width}}/{pace.total_steps}"]
    parts += [f"{name} {number(reading.metrics[name])}" for name in shown_names(reading.metrics)[:_PLAIN_METRICS]]
    phases = reading.phases
    total = sum(phases.values())
    if total > 0:
        longest = sorted(phases, key=lambda name: -phases[name])[:_PLAIN_PHASES]
        shares = " ".join(f"{name} {phases[name] / total:.0%}" for name in longest)
        parts.append(f"{duration(total)} ({shares})")
    if "perf/tokens_per_second" in reading.metrics:
        parts.append(f"{scaled(reading.metrics['perf/tokens_per_second'])} tokens/s")
    if pace.remaining is not None:
        parts.append(f"{duration(pace.remaining)} left")
    return "  ".join(parts)
