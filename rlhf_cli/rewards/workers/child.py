"""A process that runs a module of this package: started, found dead, killed.

It is started by executing a new interpreter, never by forking this process, whose threads and locks would not survive
that. Its module has `main(channel_fd, lifeline_fd, parent)`.
"""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

_PACKAGE_ROOT = Path(__file__).parents[3]

# Finds this package where this process found it, then forgets the folder, which could hide modules of a user's file.
_START = """
import importlib, sys
root, module, *numbers = sys.argv[1:]
sys.path.insert(0, root)
import rlhf_cli
del sys.path[0]
importlib.import_module(module).main(*map(int, numbers))
"""


class ChildProcess:
    """One process: owns it, its socket and the lifeline that ends it together with this process."""

    def __init__(self, module: str, environment: Mapping[str, str] | None = None) -> None:
        """Start it; `environment` are variables besides the variables of this process."""
        self.socket, theirs = socket.socketpair()
        lifeline, self._lifeline = os.pipe()
        numbers = map(str, (theirs.fileno(), lifeline, os.getpid()))
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-c", _START, str(_PACKAGE_ROOT), module, *numbers],
                stdin=subprocess.DEVNULL,
                stdout=2,  # prints of the user's code go where this process's errors go, never between its results
                pass_fds=(theirs.fileno(), lifeline),
                start_new_session=True,  # a process group of its own, so that its children are killed with it
                env={**os.environ, "PYTHONUNBUFFERED": "1", **(environment or {})},
            )
        except BaseException:
            self.socket.close()
            os.close(self._lifeline)
            raise
        finally:
            theirs.close()
            os.close(lifeline)

    def is_gone(self) -> bool:
        """Return whether the process has ended, whoever holds its socket. It is not reaped, so its number stays
        taken.
        """
        return self._exit_status() is not None

    def last_words(self) -> str:
        """Return how a process ended by itself, as the end of a sentence."""
        for _ in range(100):
            status = self._exit_status()
            if status is not None:
                return describe_end(*status)
            time.sleep(0.01)  # the socket closes a moment before the process is gone
        return "closed its connection"

    def _exit_status(self) -> tuple[int, int] | None:
        """Return (CLD_EXITED, exit code) or (another way, signal number) of an ended process."""
        status = os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        return None if status is None else (status.si_code, status.si_status)

    def finish(self, seconds: float) -> None:
        """Send it the end of the stream and wait for its own end, at most so many seconds."""
        with contextlib.suppress(OSError, subprocess.TimeoutExpired):  # the stream has ended
            self.socket.shutdown(socket.SHUT_WR)
            self._process.wait(seconds)

    def kill(self) -> None:
        """End the process and its children at once; no harm if they have ended."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self.socket.close()
        os.close(self._lifeline)


def describe_end(way: int, code: int) -> str:
    """Return how a process ended, given the code and the status of `os.waitid`, as the end of a sentence."""
    if way == os.CLD_EXITED:
        return f"ended its process with exit code {code}"
    memory = " (out of memory?)" if code == signal.SIGKILL else ""
    return f"was killed by {signal.Signals(code).name}{memory}"
