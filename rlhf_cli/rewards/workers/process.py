"""Parent-side handle to a worker process. pool.py handles timeouts and retries; worker.py is the child side."""

import contextlib
import json
import time
from typing import Any

from rlhf_cli.config.procedural import FIXED_HASHES
from rlhf_cli.rewards.workers.child import ChildProcess

# Minimum timeout in seconds for loading the task, since a reward file may load a model. A longer item limit replaces
# it.
LOAD_LIMIT = 120.0

# Bytes per read. Longer answers arrive in several reads.
_RECEIVE_SIZE = 1 << 20


class WorkerProcess:
    """A worker process that has loaded, or is loading, the task."""

    def __init__(self, loader: str, argument: object) -> None:
        task = json.dumps([loader, argument])
        # Fixed hashes, so that rewards that iterate over sets are reproducible.
        self._child = ChildProcess("rlhf_cli.rewards.workers.worker", FIXED_HASHES)
        self.socket = self._child.socket
        self._received = b""
        # Unanswered items: number by position in the list sent last.
        self.chunk: dict[int, int] = {}
        # Whether it handles all of them concurrently, instead of one by one.
        self.works_together = False
        self.is_loaded = False
        # Start time for the current item, or for the list if handled concurrently.
        self.since = time.monotonic()
        self.send(task, limit=LOAD_LIMIT)

    @property
    def is_busy(self) -> bool:
        return bool(self.chunk) or not self.is_loaded

    def send(self, line: str, *, limit: float) -> None:
        """Send one line of JSON."""
        self.since, self.works_together = time.monotonic(), False
        # A stuck worker may not read a line larger than the socket buffer. Errors are ignored here, since the pool then
        # sees a missing answer or a dead process.
        self.socket.settimeout(limit)
        with contextlib.suppress(OSError):
            self.socket.sendall(line.encode() + b"\n")
        self.socket.setblocking(False)

    def receive(self) -> list[Any] | None:
        """Return new answers, or None if the worker is gone and all answers have been read."""
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
        # Each answer restarts the timeout, which is per item.
        if not self.works_together:
            self.since = time.monotonic()
        return [json.loads(line) for line in lines]

    def is_gone(self) -> bool:
        """Return whether the process has exited, even if a child still holds the socket open."""
        return self._child.is_gone()

    def last_words(self) -> str:
        """Describe how the process exited. Completes a sentence."""
        return self._child.last_words()

    def kill(self) -> None:
        """Kill the process group and release all resources. No error if the process has exited."""
        self._child.kill()
