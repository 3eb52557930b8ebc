"""Ctrl-C and SIGTERM as a request to stop after the current step."""

import os
import signal
from types import FrameType

INTERRUPTED = 130


class StopSignal:
    """True once a stop was asked for. A second Ctrl-C ends the process at once.

    Launchers send SIGTERM after a Ctrl-C to the processes that already got it from the terminal, so repeated
    SIGTERMs say nothing new.
    """

    def __init__(self) -> None:
        self._requested = False
        self._previous = {sig: signal.signal(sig, self._handle) for sig in (signal.SIGINT, signal.SIGTERM)}

    def __call__(self) -> bool:
        return self._requested

    def restore(self) -> None:
        """Give the signals back to whoever handled them before."""
        for sig, handler in self._previous.items():
            signal.signal(sig, handler)

    def _handle(self, signum: int, frame: FrameType | None) -> None:
        if signum == signal.SIGINT and self._requested:
            os._exit(INTERRUPTED)
        self._requested = True
