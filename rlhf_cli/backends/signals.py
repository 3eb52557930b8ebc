"""Ctrl-C and SIGTERM as a request to stop after the current step."""

import os
import signal
import time
from types import FrameType

INTERRUPTED = 130
ECHO_SECONDS = 1.0


class StopSignal:
    """True once a stop was asked for. A second Ctrl-C ends the process at once.

    Launchers repeat a Ctrl-C, as SIGTERM (deepspeed) or as SIGINT (torchrun), to the processes that already got it from
    the terminal. So repeated SIGTERMs say nothing new, nor does a SIGINT that follows within `echo_seconds`.
    """

    def __init__(self, *, echo_seconds: float = 0.0) -> None:
        self._echo_seconds = echo_seconds
        self._requested_at: float | None = None
        self._previous = {sig: signal.signal(sig, self._handle) for sig in (signal.SIGINT, signal.SIGTERM)}

    def __call__(self) -> bool:
        return self._requested_at is not None

    def restore(self) -> None:
        """Give the signals back to whoever handled them before."""
        for sig, handler in self._previous.items():
            signal.signal(sig, handler)

    def _handle(self, signum: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if self._requested_at is None:
            self._requested_at = now
        elif signum == signal.SIGINT and now - self._requested_at >= self._echo_seconds:
            os._exit(INTERRUPTED)
