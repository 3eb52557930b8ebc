"""Timing of asynchronous sampling: working and waiting time."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Lock


class SamplingClock:
    """Times a sampling thread, and another thread that sometimes waits for it."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._lock = Lock()
        self._sampled = self._waited = 0.0  # seconds
        self._sampling_since: float | None = None
        self._looked: float | None = None  # last call of `metrics`, or the start
        self._sampled_by_then = 0.0  # seconds

    @contextmanager
    def sampling(self) -> Iterator[None]:
        """Count the block as sampling time."""
        with self._lock:
            # The training thread may read these values at any time.
            self._sampling_since = begin = self._clock()
            if self._looked is None:
                self._looked = begin
        try:
            yield
        finally:
            with self._lock:
                self._sampling_since = None
                self._sampled += self._clock() - begin

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Count the block as waiting time."""
        begin = self._clock()
        try:
            yield
        finally:
            self._waited += self._clock() - begin

    def metrics(self) -> dict[str, float]:
        """Return seconds since the last call: sampling, waiting for sampling, and idle engines."""
        # The lock covers values written by the sampling thread; only the training thread uses `_waited`.
        with self._lock:
            now, since = self._clock(), self._sampling_since
            sampled = self._sampled + (0.0 if since is None else now - since)
            new, seconds = sampled - self._sampled_by_then, 0.0 if self._looked is None else now - self._looked
            waited, self._waited = self._waited, 0.0
            self._looked, self._sampled_by_then = now, sampled
        return {
            "perf/sampling_seconds": new,
            "perf/sampling_wait_seconds": waited,
            "perf/engines_idle_seconds": max(0.0, seconds - new),
        }
