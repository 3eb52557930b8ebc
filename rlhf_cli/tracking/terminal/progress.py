"""The terminal's view of a run: plain lines, or a live view (live_view.py) on a terminal.

The banner before and the summary after a run are in tracker.py, the choice of stream in console.py.
"""

import time
from collections import deque
from collections.abc import Callable
from typing import Protocol

from rich.console import Console
from rich.text import Text

from rlhf_cli.tracking.figures import Reading, duration, number, prominent, scaled

PLAIN_METRICS = 7
PLAIN_PHASES = 3
STEPS_OF_PACE = 20


class View(Protocol):
    """Shows a run while it goes on."""

    def phase(self, name: str | None) -> None:
        """Note that a phase began, or that none is running."""

    def step(self, reading: Reading) -> None:
        """Note that a step ended."""

    def message(self, text: str, *, style: str = "") -> None:
        """Show a line that stays."""

    def close(self) -> None:
        """Nothing more will change."""


class Pace:
    """How far a run is and how long the rest will take, at the speed of the last steps."""

    def __init__(self, total_steps: int, *, start_step: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self.began = clock()
        self.total_steps = total_steps
        self.step = start_step
        self._recent = deque([(start_step, self.began)], maxlen=STEPS_OF_PACE + 1)

    def reach(self, step: int) -> None:
        """Note that a step is done."""
        self.step = step
        self._recent.append((step, self._clock()))

    @property
    def elapsed(self) -> float:
        """Seconds since this process began."""
        return self._clock() - self.began

    @property
    def share(self) -> float:
        """Done share of all steps, 0 to 1."""
        return min(1.0, self.step / max(1, self.total_steps))

    @property
    def remaining(self) -> float | None:
        """Seconds the rest will take; None before the first step."""
        (first, then), (last, now) = self._recent[0], self._recent[-1]
        if last == first:
            return None
        whole = (now - then) / (last - first) * (self.total_steps - last)
        return max(0.0, whole - (self._clock() - now)) if whole else 0.0


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
        if reading.step % self._every == 0 or reading.step == self._pace.total_steps:
            self.message(plain_line(reading, self._pace, unit=self._unit))

    def message(self, text: str, *, style: str = "") -> None:
        """Print a line."""
        self._console.print(Text(text, style=style), soft_wrap=True)

    def close(self) -> None:
        """Nothing to take down."""


def plain_line(reading: Reading, pace: Pace, *, unit: str) -> str:
    """Return the step, the metrics one looks at first, the longest phases, speed and time left."""
    width = len(str(pace.total_steps))
    parts = [f"{unit} {reading.step:>{width}}/{pace.total_steps}"]
    parts += [f"{name} {number(reading.metrics[name])}" for name in prominent(reading.metrics)[:PLAIN_METRICS]]
    phases = reading.phases
    total = sum(phases.values())
    if total > 0:
        longest = sorted(phases, key=lambda name: -phases[name])[:PLAIN_PHASES]
        shares = " ".join(f"{name} {phases[name] / total:.0%}" for name in longest)
        parts.append(f"{duration(total)} ({shares})")
    if "perf/tokens_per_second" in reading.metrics:
        parts.append(f"{scaled(reading.metrics['perf/tokens_per_second'])} tokens/s")
    if pace.remaining is not None:
        parts.append(f"{duration(pace.remaining)} left")
    return "  ".join(parts)
