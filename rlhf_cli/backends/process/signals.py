"""Graceful stop after the current step on Ctrl-C, SIGTERM and SIGHUP."""

import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType

INTERRUPTED = 130
"""Exit status of a run stopped by a signal."""
ECHO_SECONDS = 1.0
# Sent by Ctrl-C; by Slurm, Kubernetes, `docker stop` and `timeout`; and by a closed terminal.
_STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def stop_signals() -> list[signal.Signals]:
    """Return the signals that request a stop. Excludes ignored ones, such as SIGHUP under `nohup`."""
    return [signum for signum in _STOP_SIGNALS if signal.getsignal(signum) is not signal.SIG_IGN]


@contextmanager
def children_apart() -> Iterator[None]:
    """Protect child processes started inside the block from signals to this process group.

    The children stay alive until this process has saved. Signal handlers of this process are preserved.
    """
    # A closed terminal sends SIGHUP, and `timeout` sends SIGTERM, to the complete process group. Children inherit the
    # signal mask and the process group, so block SIGHUP and change the group while they are started.
    handlers = {signum: signal.getsignal(signum) for signum in _STOP_SIGNALS}
    group = os.getpgrp()
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGHUP})
    # A group leader must stay in its group: otherwise, it could not return to it below.
    if group != os.getpid():
        os.setpgid(0, 0)
    try:
        yield
    finally:
        # Fails if the previous group no longer exists.
        with suppress(PermissionError):
            os.setpgid(0, group)
        # ray.init replaces the SIGTERM handler.
        for signum, handler in handlers.items():
            signal.signal(signum, handler)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


@contextmanager
def stops_forwarded(command: "subprocess.Popen[bytes] | subprocess.Popen[str]") -> Iterator[Callable[[], bool]]:
    """Let a command of this terminal finish its step and save after a stop signal, while the block waits for it.

    Yields a function that returns whether there was a signal.
    """
    received: list[int] = []

    def forward(signum: int, frame: FrameType | None) -> None:
        received.append(signum)
        # The terminal also sends Ctrl-C to the command, which would exit at once if it received a second one.
        # SIGTERM reaches only this process, so pass it on.
        if signum != signal.SIGINT:
            command.send_signal(signum)

    previous = {signum: signal.signal(signum, forward) for signum in stop_signals()}
    try:
        yield lambda: bool(received)
    finally:
        for signum, handler in previous.items():
            signal.signal(signum, handler)


def _keep_quiet() -> None:
    """No-op, the default for `StopSignal.on_request`."""


class StopSignal:
    """Records stop signals. An instance returns true once a stop is requested. A second Ctrl-C exits at once.

    Repeated SIGTERM and SIGHUP are ignored, as well as a SIGINT within `echo_seconds`: after a Ctrl-C, launchers
    forward it as SIGTERM (deepspeed) or SIGINT (torchrun) to processes that have already received it from the terminal.

    The first signal calls `on_request` inside the signal handler, which may interrupt the main thread anywhere.
    """

    def __init__(self, *, echo_seconds: float = 0.0) -> None:
        self._echo_seconds = echo_seconds
        self._requested_at: float | None = None
        self.on_request: Callable[[], None] = _keep_quiet
        self._previous = {signum: signal.signal(signum, self._handle) for signum in stop_signals()}

    def __call__(self) -> bool:
        return self._requested_at is not None

    def restore(self) -> None:
        """Restore the previous signal handlers."""
        for sig, handler in self._previous.items():
            signal.signal(sig, handler)

    def _handle(self, signum: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if self._requested_at is None:
            self._requested_at = now
            # A stream raises RuntimeError for a reentrant call if the signal has interrupted a print.
            with suppress(RuntimeError):
                self.on_request()
        elif signum == signal.SIGINT and now - self._requested_at >= self._echo_seconds:
            os._exit(INTERRUPTED)
