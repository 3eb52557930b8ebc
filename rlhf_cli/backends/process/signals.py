"""Ctrl-C, SIGTERM and SIGHUP as a request to stop after the current step."""

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType

INTERRUPTED = 130
"""Exit status of a run that was stopped by any of the signals."""
ECHO_SECONDS = 1.0
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""Ctrl-C; Slurm, Kubernetes, `docker stop` and `timeout`; a closed terminal."""


def stop_signals() -> list[signal.Signals]:
    """Return the signals that ask for a stop: without SIGHUP under `nohup`, which ignores it on purpose."""
    return [signum for signum in STOP_SIGNALS if signal.getsignal(signum) is not signal.SIG_IGN]


@contextmanager
def children_apart() -> Iterator[None]:
    """Start child processes in the block that live on until this process has saved, and keep this process's handlers.

    A closed terminal sends SIGHUP to its whole process group, and `timeout` sends SIGTERM to its group. Children that
    are started in the block, and their children, have SIGHUP blocked and are in a group of their own, if this process
    may leave its group: the leader of a group may not. Handlers are put back because ray.init takes SIGTERM for itself.
    """
    handlers = {signum: signal.getsignal(signum) for signum in STOP_SIGNALS}
    group = os.getpgrp()
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGHUP})
    if group != os.getpid():
        os.setpgid(0, 0)
    try:
        yield
    finally:
        with suppress(PermissionError):  # the former group is gone
            os.setpgid(0, group)
        for signum, handler in handlers.items():
            signal.signal(signum, handler)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def keep_quiet() -> None:
    """Do nothing."""


class StopSignal:
    """True once a stop was asked for. A second Ctrl-C ends the process at once.

    Launchers repeat a Ctrl-C, as SIGTERM (deepspeed) or as SIGINT (torchrun), to the processes that already got it from
    the terminal. So a repeated SIGTERM or SIGHUP changes nothing, nor does a SIGINT that follows within `echo_seconds`.

    The first signal calls `on_request`, in the middle of whatever the main thread does.
    """

    def __init__(self, *, echo_seconds: float = 0.0) -> None:
        self._echo_seconds = echo_seconds
        self._requested_at: float | None = None
        self.on_request: Callable[[], None] = keep_quiet
        self._previous = {signum: signal.signal(signum, self._handle) for signum in stop_signals()}

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
            with suppress(RuntimeError):  # a print that the signal has interrupted may refuse to be entered again
                self.on_request()
        elif signum == signal.SIGINT and now - self._requested_at >= self._echo_seconds:
            os._exit(INTERRUPTED)
