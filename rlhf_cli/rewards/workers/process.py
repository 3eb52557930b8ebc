"""One worker process as its owner sees it: given lines, heard, found dead, killed.

Limits of time and what becomes of items are the pool's business; the other side is worker.py.
"""

import contextlib
import json
import time
from typing import Any

from rlhf_cli.rewards.workers.child import ChildProcess

# Seconds a worker may take from its start until its task is loaded (a reward file may read a model), unless the limit
# of an item is longer still.
LOAD_LIMIT = 120.0

_RECEIVE_SIZE = 1 << 20


class WorkerProcess:
    """One worker process, which has loaded or is loading its task."""

    def __init__(self, loader: str, argument: object) -> None:
        task = json.dumps([loader, argument])
        self._child = ChildProcess("rlhf_cli.rewards.workers.worker")
        self.socket = self._child.socket
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
        """Return whether the process has ended, whoever holds its socket."""
        return self._child.is_gone()

    def last_words(self) -> str:
        """Return how a process ended by itself, as the end of a sentence."""
        return self._child.last_words()

    def kill(self) -> None:
        """End the process and its children at once; no harm if they have ended."""
        self._child.kill()
