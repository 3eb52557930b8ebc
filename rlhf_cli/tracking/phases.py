"""Wall-clock time per phase of a training step.

Measures only this process and never synchronizes a device. If GPU work is still queued at the end of a phase, the
caller must synchronize first.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class PhaseTimer:
    """Measures seconds in named phases: `with timer("generate"): ...`, then `timer.take()` once per step.

    An inner phase pauses the outer one, so that the phases in a step never add up to more than the step. Repeated
    phases add up. `on_change` receives the running phase, or None between phases.
    """

    def __init__(
        self,
        *,
        clock: Callable[[], float] = time.perf_counter,
        on_change: Callable[[str | None], None] = lambda name: None,
    ) -> None:
        self._clock = clock
        self._on_change = on_change
        self._running: list[str] = []
        self._since = clock()
        self.seconds: dict[str, float] = {}

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        self._book()
        self._running.append(name)
        self._on_change(name)
        try:
            yield
        finally:
            self._book()
            self._running.pop()
            self._on_change(self._running[-1] if self._running else None)

    def take(self) -> dict[str, float]:
        """Return seconds by phase since the last call, in the order of first use, and reset."""
        self._book()
        seconds, self.seconds = self.seconds, {}
        return seconds

    def _book(self) -> None:
        """Add the elapsed time to the innermost running phase."""
        now = self._clock()
        if self._running:
            name = self._running[-1]
            self.seconds[name] = self.seconds.get(name, 0.0) + now - self._since
        self._since = now
