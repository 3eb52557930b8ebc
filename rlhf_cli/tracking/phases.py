"""How long each phase of a step takes.

Wall-clock time of this process only: no device synchronisation happens here. A phase whose work is still queued on
a GPU when it ends must be synchronised by its caller.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class PhaseTimer:
    """Seconds spent in named phases: `with timer("generate"): ...`, then `timer.take()` once a step.

    A phase inside another one counts for itself alone, so that the phases of a step never add up to more than the
    step. The same name adds up. `on_change` receives the name of the running phase, None between phases.
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
        """Return the seconds by phase since the last call, in the order in which phases first ran; counting starts
        anew.
        """
        self._book()
        seconds, self.seconds = self.seconds, {}
        return seconds

    def _book(self) -> None:
        """Add the time since the last change to the innermost running phase."""
        now = self._clock()
        if self._running:
            name = self._running[-1]
            self.seconds[name] = self.seconds.get(name, 0.0) + now - self._since
        self._since = now
