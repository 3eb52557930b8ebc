"""One worker process as its owner sees it: started, given lines, heard, found dead, killed.

Workers are started by executing a new interpreter, never by forking this process, whose threads and locks would not
survive that. Limits of time and what becomes of items are the pool's business; the other side is worker.py.
"""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

# Seconds a worker may take from its start until its task is loaded (a reward file may read a model), unless the limit
# of an item is longer still.
LOAD_LIMIT = 120.0

_RECEIVE_SIZE = 1 << 20
_PACKAGE_ROOT = Path(__file__).parents[3]

# Finds this package where this process found it, then forgets the folder, which could hide modules of a reward file.
_START = """
import sys
root, *numbers = sys.argv[1:]
sys.path.insert(0, root)
import rlhf_cli
del sys.path[0]
from rlhf_cli.rewards.workers import worker
worker.main(*map(int, numbers))
"""


class WorkerProcess:
    """One worker process: owns it, its socket and the lifeline that ends it together with this process."""

    def __init__(self, loader: str, argument: object) -> None:
        task = json.dumps([loader, argument])
        self.socket, theirs = socket.socketpair()
        lifeline, self._lifeline = os.pipe()
        numbers = map(str, (theirs.fileno(), lifeline, os.getpid()))
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-c", _START, str(_PACKAGE_ROOT), *numbers],
                stdin=subprocess.DEVNULL,
                stdout=2,  # prints of a reward go where this process's errors go, never between its results
                pass_fds=(theirs.fileno(), lifeline),
                start_new_session=True,  # a process group of its own, so that its children are killed with it
                env={**os.environ, "PYTHONUNBUFFERED": "1"},
            )
        except BaseException:
            self.socket.close()
            os.close(self._lifeline)
            raise
        finally:
            theirs.close()
            os.close(lifeline)
        self._received = b""
        self.chunk: dict[int, int] = {}  # items it was given and has not answered, by their place in the list
        self.works_together = False  # whether at all of them; else at the first
        self.is_loaded = False
        self.since = time.monotonic()  # when its current item began
        self.send(task, limit=LOAD_LIMIT)

    @property
    def is_busy(self) -> bool:
        return bool(self.chunk) or not self.is_loaded

    def send(self, line: str, *, limit: float) -> None:
        """Send one line of JSON; a worker that does not take it within the limit is found out when it answers late."""
        self.since, self.works_together = time.monotonic(), False
        self.socket.settimeout(limit)
        with contextlib.suppress(OSError):
            self.socket.sendall(line.encode() + b"\n")
        self.socket.setblocking(False)

    def receive(self) -> list[Any] | None:
        """Return the answers that have arrived; None if the worker is gone and all its messages are read."""
        try:
            data = self.socket.recv(_RECEIVE_SIZE)
        except BlockingIOError:
            return []
        except OSError:
            data = b""
        if not data:
            return None
        self._received += data
        if b"\n" not in data:
            return []
        *lines, self._received = self._received.split(b"\n")
        if not self.works_together:
            self.since = time.monotonic()
        return [json.loads(line) for line in lines]

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
                break
            time.sleep(0.01)  # the socket closes a moment before the process is gone
        if status is None:
            return "closed its connection"
        how, code = status
        if how == os.CLD_EXITED:
            return f"ended its process with exit code {code}"
        memory = " (out of memory?)" if code == signal.SIGKILL else ""
        return f"was killed by {signal.Signals(code).name}{memory}"

    def _exit_status(self) -> tuple[int, int] | None:
        """Return (CLD_EXITED, exit code) or (another way, signal number) of an ended process."""
        status = os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        return None if status is None else (status.si_code, status.si_status)

    def kill(self) -> None:
        """End the process and its children at once; no harm if they have ended."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self.socket.close()
        os.close(self._lifeline)
