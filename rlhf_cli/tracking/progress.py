"""What the terminal shows of a run: plain lines, or a live view where there is a terminal.

The banner before and the summary after a run are in tracker.py, the choice of stream in terminal.py.
"""

import time
from collections.abc import Callable
from typing import Protocol

from rich.console import Console

from rlhf_cli.tracking.figures import Reading, duration, number, prominent, scaled

PLAIN_METRICS = 8


class View(Protocol):
    """Shows a run while it goes on."""

    def phase(self, name: str | None) -> None:
        """A phase began, or none is running."""

    def step(self, reading: Reading) -> None:
        """A step ended."""

    def message(self, text: str) -> None:
        """A line that stays."""

    def close(self) -> None:
        """Nothing more will change."""


class Pace:
    """Steps done by this process and how long the rest will take."""

    def __init__(self, total_steps: int, *, start_step: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._began = clock()
        self._start_step = start_step
        self.total_steps = total_steps
        self.step = start_step

    @property
    def elapsed(self) -> float:
        """Seconds since this process began."""
        return self._clock() - self._began

    @property
    def remaining(self) -> float | None:
        """Seconds the rest will take at the mean speed so far; None before the first step."""
        done = self.step - self._start_step
        return self.elapsed / done * (self.total_steps - self.step) if done else None


class PlainView:
    """One line a logged step, without escape sequences."""

    def __init__(self, console: Console, pace: Pace, *, unit: str, every: int) -> None:
        self._console = console
        self._pace = pace
        self._unit = unit
        self._every = every

    def phase(self, name: str | None) -> None:
        """Not shown: a line cannot be taken back."""

    def step(self, reading: Reading) -> None:
        """Print the step if it is due."""
        self._pace.step = reading.step
        if reading.step % self._every == 0 or reading.step == self._pace.total_steps:
            self.message(plain_line(reading, self._pace, unit=self._unit))

    def message(self, text: str) -> None:
        """Print a line."""
        self._console.print(text, markup=False)

    def close(self) -> None:
        """Nothing to take down."""


def plain_line(reading: Reading, pace: Pace, *, unit: str) -> str:
    """The step, the metrics one looks at first, speed and time left in one line."""
    width = len(str(pace.total_steps))
    parts = [f"{unit} {reading.step:>{width}}/{pace.total_steps}"]
    parts += [f"{name} {number(reading.metrics[name])}" for name in prominent(reading.metrics)[:PLAIN_METRICS]]
    if "perf/tokens_per_second" in reading.metrics:
        parts.append(f"{scaled(reading.metrics['perf/tokens_per_second'])} tokens/s")
    if reading.phases:
        parts.append(" ".join(f"{name} {duration(seconds)}" for name, seconds in reading.phases.items()))
    if pace.remaining is not None:
        parts.append(f"{duration(pace.remaining)} left")
    return "  ".join(parts)
