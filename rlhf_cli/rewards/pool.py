"""Killable worker processes that answer items, each within a limit of time.

An item that hangs costs its worker, not the run: the process group is killed and a new worker takes over with the item
after it. Workers are started by executing a new interpreter, never by forking this process, whose threads and locks
would not survive that. What is computed is the workers' business (see worker.py).
"""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from multiprocessing import connection
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

FailureKind = Literal["raised", "bad_result", "timeout", "died", "load"]

# Seconds a worker may take from its start until its task is loaded (a reward file may read a model), unless the limit
# of an item is longer still.
LOAD_LIMIT = 120.0

# Seconds between looks at whether a worker has died. The end of its socket is noticed at once; this is for a worker
# that left its socket to a child.
DEATH_CHECK = 0.2

_RECEIVE_SIZE = 1 << 20
_PACKAGE_ROOT = Path(__file__).parents[2]

# Finds this package where this process found it, then forgets the folder, which could hide modules of a reward file.
_START = """
import sys
root, *numbers = sys.argv[1:]
sys.path.insert(0, root)
import rlhf_cli
del sys.path[0]
from rlhf_cli.rewards import worker
worker.main(*map(int, numbers))
"""


@dataclass(frozen=True, slots=True)
class Failure:
    """Why there is no value: `reason` ends a sentence about what was run, `trace` is the worker's traceback, if any."""

    kind: FailureKind
    reason: str
    trace: str = ""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of one item: a value (JSON) or a failure."""

    value: Any = None
    failure: Failure | None = None


class Worker:
    """One worker process: owns it, its socket and the lifeline that ends it together with this process."""

    def __init__(self, loader: str, argument: Any) -> None:
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
        self.chunk: deque[int] = deque()  # items it was given and has not answered
        self.is_loaded = False
        self.since = time.monotonic()  # when it began what it is doing
        self.send([loader, argument], limit=LOAD_LIMIT)

    @property
    def is_busy(self) -> bool:
        return bool(self.chunk) or not self.is_loaded

    def send(self, message: Any, *, limit: float) -> None:
        """Send one line; a worker that does not take it within the limit is found out when its answer is late."""
        self.since = time.monotonic()
        self.socket.settimeout(limit)
        with contextlib.suppress(OSError):
            self.socket.sendall(json.dumps(message).encode() + b"\n")
        self.socket.setblocking(False)

    def receive(self) -> list[Any] | None:
        """Answers that have arrived; None if the worker is gone and has nothing more to say."""
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
        self.since = time.monotonic()
        return [json.loads(line) for line in lines]

    def is_gone(self) -> bool:
        """Whether the process has ended, whoever holds its socket. It is not reaped, so its number stays taken."""
        return self._exit_status() is not None

    def last_words(self) -> str:
        """How a process that ended by itself did so, as the end of a sentence."""
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
        """(CLD_EXITED, exit code) or (another way, signal number) of an ended process."""
        status = os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        return None if status is None else (status.si_code, status.si_status)

    def kill(self) -> None:
        """End the process and its children at once; no harm if they have ended."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self.socket.close()
        os.close(self._lifeline)


class WorkerPool:
    """Up to `num_workers` workers with the same task; a context manager that leaves no process behind.

    `loader` is `module:function`: called with `argument` in each worker, it returns the function that answers items.
    Items, `argument` and answers are JSON. `limit` are the seconds one item may take; items travel in chunks, but the
    limit holds for each of them.
    """

    def __init__(self, loader: str, argument: Any, *, limit: float, num_workers: int = 1, chunk_size: int = 1) -> None:
        self._loader, self._argument = loader, argument
        self.limit, self.num_workers, self.chunk_size = limit, num_workers, chunk_size
        self.workers: list[Worker] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Kill all workers."""
        while self.workers:
            self.workers.pop().kill()

    def start_worker(self) -> None:
        """Add a worker, which begins to load its task."""
        self.workers.append(Worker(self._loader, self._argument))

    def remove(self, worker: Worker) -> None:
        """Kill a worker; another takes its place when there is work for it."""
        self.workers.remove(worker)
        worker.kill()

    def start(self) -> Failure | None:
        """Start one worker and load the task in it; why that failed, if it did."""
        return _Round(self, []).load_one()

    def map(self, items: Sequence[Any]) -> list[Outcome]:
        """The outcome of each item, in order. No failure of an item is raised."""
        return _Round(self, items).run()


class _Round:
    """One use of a pool: which items wait, which are being worked on, what has come of the others."""

    def __init__(self, pool: WorkerPool, items: Sequence[Any]) -> None:
        self._pool, self._items = pool, items
        self._waiting = deque(range(len(items)))
        self._outcomes: dict[int, Outcome] = {}
        self._load_failure: Failure | None = None

    def load_one(self) -> Failure | None:
        """Start a worker and see that it loads its task; why not, if it does not."""
        with self._unfinished_are_killed():
            self._pool.start_worker()
            while any(worker.is_busy for worker in self._pool.workers):
                self._collect()
        return self._load_failure

    def run(self) -> list[Outcome]:
        """Outcomes of all items in order."""
        with self._unfinished_are_killed():
            for worker in [worker for worker in self._pool.workers if worker.is_gone()]:
                self._pool.remove(worker)  # died while it had nothing to do: no item is to blame
            while self._waiting or any(worker.is_busy for worker in self._pool.workers):
                self._assign()
                self._collect()
        return [self._outcomes[index] for index in range(len(self._items))]

    @contextlib.contextmanager
    def _unfinished_are_killed(self) -> Iterator[None]:
        """A worker that still owes answers when an exception ends the round would answer the next one with them."""
        try:
            yield
        finally:
            for worker in [worker for worker in self._pool.workers if worker.is_busy]:
                self._pool.remove(worker)

    def _assign(self) -> None:
        pool = self._pool
        for worker in pool.workers:
            if self._waiting and not worker.is_busy:
                size = min(pool.chunk_size, len(self._waiting))
                worker.chunk.extend(self._waiting.popleft() for _ in range(size))
                worker.send([self._items[index] for index in worker.chunk], limit=pool.limit)
        starting = sum(not worker.is_loaded for worker in pool.workers)
        while starting * pool.chunk_size < len(self._waiting) and len(pool.workers) < pool.num_workers:
            pool.start_worker()
            starting += 1

    def _collect(self) -> None:
        """Wait until something happens, then take answers and remove workers that died or are overdue."""
        busy = [worker for worker in self._pool.workers if worker.is_busy]
        patience = min((self._deadline(worker) for worker in busy), default=0.0) - time.monotonic()
        ready = connection.wait([worker.socket for worker in busy], timeout=min(max(patience, 0.0), DEATH_CHECK))
        for worker in busy:
            if worker.socket in ready:
                answers = worker.receive()
                if answers is None:
                    self._lose(worker, Failure("died", worker.last_words()))
                for answer in answers or []:
                    self._take(worker, answer)
            elif worker.is_gone():
                self._lose(worker, Failure("died", worker.last_words()))
            elif time.monotonic() > self._deadline(worker):
                self._lose(worker, Failure("timeout", self._lateness(worker)))

    def _deadline(self, worker: Worker) -> float:
        return worker.since + (self._pool.limit if worker.is_loaded else max(self._pool.limit, LOAD_LIMIT))

    def _lateness(self, worker: Worker) -> str:
        if worker.is_loaded:
            return f"did not answer within {self._pool.limit:g} s"
        return f"was not loaded within {max(self._pool.limit, LOAD_LIMIT):g} s"

    def _take(self, worker: Worker, answer: dict[str, Any]) -> None:
        failure = Failure(answer["kind"], answer["reason"], answer["trace"]) if "kind" in answer else None
        if worker.is_loaded:
            self._outcomes[worker.chunk.popleft()] = Outcome(answer.get("value"), failure)
        elif failure is not None:
            self._lose(worker, failure)
        else:
            worker.is_loaded = True

    def _lose(self, worker: Worker, failure: Failure) -> None:
        """Kill a worker. The item it was at takes the blame, those after it wait again; a task that cannot be loaded
        fails all that wait, since the next worker would fare no better."""
        self._pool.remove(worker)
        if worker.is_loaded:
            self._outcomes[worker.chunk.popleft()] = Outcome(failure=failure)
            self._waiting.extendleft(reversed(worker.chunk))
            return
        self._load_failure = Failure("load", failure.reason, failure.trace)
        while self._waiting:
            self._outcomes[self._waiting.popleft()] = Outcome(failure=self._load_failure)
