"""Child processes that run a module from this package: start, exit detection, kill.

The module defines `main(channel_fd, lifeline_fd, parent)`. The child is a new interpreter, never a fork: threads and
locks in this process would not survive a fork.
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

# Imports the package from the parent's location, then removes that folder from sys.path: it could shadow modules that
# the user's file imports.
_START = """
import importlib, sys
root, module, *numbers = sys.argv[1:]
sys.path.insert(0, root)
import rlhf_cli
del sys.path[0]
importlib.import_module(module).main(*map(int, numbers))
"""


class ChildProcess:
    """A child process, with a socket to it and a lifeline that kills it if this process dies."""

    def __init__(self, module: str, environment: Mapping[str, str] | None = None) -> None:
        """Start the process. `environment` adds variables to the inherited ones."""
        self.socket, theirs = socket.socketpair()
        lifeline, self._lifeline = os.pipe()
        numbers = map(str, (theirs.fileno(), lifeline, os.getpid()))
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-c", _START, str(_PACKAGE_ROOT), module, *numbers],
                stdin=subprocess.DEVNULL,
                # User code prints to stderr: stdout may carry the command's results.
                stdout=2,
                pass_fds=(theirs.fileno(), lifeline),
                # A separate process group, so that `kill` also kills children.
                start_new_session=True,
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
        """Return whether the process has exited, even if a child still holds the socket open."""
        return self._exit_status() is not None

    def last_words(self) -> str:
        """Describe how the process exited. Completes a sentence."""
        # The socket closes shortly before the process exits: wait up to 1 s for the exit status.
        for _ in range(100):
            status = self._exit_status()
            if status is not None:
                return describe_end(*status)
            time.sleep(0.01)
        return "closed the connection"

    def _exit_status(self) -> tuple[int, int] | None:
        """Return (`CLD_EXITED`, exit code) or (other `si_code`, signal number); None while the process runs."""
        # WNOWAIT keeps the zombie, so the pid cannot be reused before `kill` signals the process group.
        status = os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        return None if status is None else (status.si_code, status.si_status)

    def finish(self, seconds: float) -> None:
        """Close the stream and wait up to `seconds` for the process to exit."""
        # OSError: the stream is already closed.
        with contextlib.suppress(OSError, subprocess.TimeoutExpired):
            self.socket.shutdown(socket.SHUT_WR)
            self._process.wait(seconds)

    def kill(self) -> None:
        """Kill the process group and release all resources. No error if the process has exited."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self.socket.close()
        os.close(self._lifeline)


def describe_end(way: int, code: int) -> str:
    """Describe an exit, given `si_code` and `si_status` from `os.waitid`. Completes a sentence."""
    if way == os.CLD_EXITED:
        return f"exited with code {code}"
    # The kernel's out-of-memory killer sends SIGKILL.
    memory = " (out of memory?)" if code == signal.SIGKILL else ""
    return f"was killed by {signal.Signals(code).name}{memory}"
