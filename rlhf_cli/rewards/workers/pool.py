"""Pool of killable worker processes with a timeout per item.

If an item hangs, the pool kills its worker's process group, and a new worker continues with the next item. Items can be
added incrementally while the caller does other work (`Feed`). worker.py computes results; process.py starts and kills
workers.
"""

import contextlib
import json
import logging
import math
import socket
import threading
import time
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from multiprocessing import connection
from types import TracebackType
from typing import Any, Self

from rlhf_cli.rewards.records import FailureKind
from rlhf_cli.rewards.workers.process import LOAD_LIMIT, WorkerProcess

logger = logging.getLogger(__name__)

# Polling interval in seconds for dead workers whose socket stays open in a child process. Otherwise, a closed socket
# reports the exit immediately.
DEATH_CHECK = 0.2


@dataclass(frozen=True, slots=True)
class Failure:
    """Why an item has no value. `reason` completes a sentence about the task; `trace` is the traceback, if any."""

    kind: FailureKind
    reason: str
    trace: str = ""


@dataclass(frozen=True, slots=True)
class ItemOutcome:
    """The result for one item: a JSON value or a failure."""

    value: Any = None
    failure: Failure | None = None


class WorkerPool:
    """Worker processes that run the same task; a context manager that leaves no process behind.

    - `loader`: `module:function`. Each worker calls it with `argument`, and it returns the item handler. Items,
      `argument` and results are JSON.
    - `limit`: seconds per item, also within a chunk.
    - `num_workers`: maximum number of processes.
    - `chunk_size`: maximum items sent to a worker at once.
    - `retries`: extra tries for a failed item. Timeouts are not retried.
    """

    def __init__(
        self,
        loader: str,
        argument: object,
        *,
        limit: float,
        num_workers: int = 1,
        chunk_size: int = 1,
        retries: int = 0,
    ) -> None:
        self._loader, self._argument = loader, argument
        self.limit, self.num_workers, self.chunk_size, self.retries = limit, num_workers, chunk_size, retries
        self.workers: list[WorkerProcess] = []
        # The handler's `about` attribute, set once a worker has loaded.
        self.about: Any = None
        self._feed: Feed | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Kill all workers."""
        if self._feed is not None:
            self._feed.close()
        while self.workers:
            self.workers.pop().kill()

    def start_worker(self) -> None:
        """Add a worker process, which starts to load the task."""
        self.workers.append(WorkerProcess(self._loader, self._argument))

    def remove(self, worker: WorkerProcess) -> None:
        """Kill a worker. A replacement starts when there is work for it."""
        self.workers.remove(worker)
        worker.kill()

    def start(self) -> Failure | None:
        """Start one worker and wait until it has loaded the task. Returns the failure, if any."""
        return _Desk(self).load_one()

    def feed(self) -> "Feed":
        """Open a feed for incrementally added items. Only one may be open at a time."""
        assert self._feed is None or self._feed.is_closed, "the pool's last feed is still open"
        self._feed = Feed(self)
        return self._feed

    def map(self, items: Sequence[object]) -> list[ItemOutcome]:
        """Process items and return outcomes in order. Item failures are returned, not raised."""
        with self.feed() as feed:
            feed.add(items)
            return feed.finish()


class Feed:
    """Incremental input to a worker pool; a context manager.

    A background thread assigns items and collects outcomes, so workers stay busy while the caller does other work. Only
    this thread uses the pool's workers while the feed is open. On exit, workers with unfinished items are killed.
    """

    def __init__(self, pool: WorkerPool) -> None:
        self._desk = _Desk(pool)
        # Guards all fields down to `is_closed`, which the caller and the thread share.
        self._changed = threading.Condition()
        self._num_items = 0
        # Items that the thread has not picked up yet.
        self._arrived: list[tuple[int, str]] = []
        self._outcomes: dict[int, ItemOutcome] = {}
        # Numbers of outcomes that `ready` has not returned yet.
        self._unseen: list[int] = []
        self._defect: BaseException | None = None
        self.is_closed = False
        # The thread waits on worker sockets, which a condition variable cannot interrupt. A byte on this socket can.
        self._bell, self._button = socket.socketpair()
        # A full socket means that the bell is already ringing: `_ring` must not block.
        self._button.setblocking(False)
        self._thread = threading.Thread(target=self._serve, name="reward workers", daemon=True)
        self._thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def add(self, items: Iterable[object]) -> range:
        """Submit items and return the assigned numbers, counted from 0. Never blocks."""
        # Serialize outside the lock, which the thread needs for reporting.
        lines = [json.dumps(item) for item in items]
        with self._changed:
            numbers = range(self._num_items, self._num_items + len(lines))
            self._num_items = numbers.stop
            self._arrived += zip(numbers, lines, strict=True)
        self._ring()
        return numbers

    def ready(self) -> list[tuple[int, ItemOutcome]]:
        """Return new outcomes as (item number, outcome) pairs. Never blocks."""
        with self._changed:
            self._raise_defect()
            unseen, self._unseen = self._unseen, []
            return [(number, self._outcomes[number]) for number in unseen]

    def wait(self) -> None:
        """Block until `ready` has something to return. Returns immediately if nothing is pending."""
        with self._changed:
            self._changed.wait_for(
                lambda: self._defect is not None or self._unseen or len(self._outcomes) == self._num_items
            )
            self._raise_defect()

    @property
    def is_open(self) -> bool:
        """Whether outcomes are pending or not yet returned by `ready`."""
        with self._changed:
            return bool(self._unseen) or len(self._outcomes) < self._num_items

    def finish(self) -> list[ItemOutcome]:
        """Block until all items are complete and return outcomes in order. Item failures are returned, not raised."""
        with self._changed:
            self._changed.wait_for(lambda: self._defect is not None or len(self._outcomes) == self._num_items)
            self._raise_defect()
            return [self._outcomes[number] for number in range(self._num_items)]

    def close(self) -> None:
        """Stop the thread and kill workers with unfinished items."""
        with self._changed:
            self.is_closed = True
        self._ring()
        self._thread.join()
        self._bell.close()
        self._button.close()

    def _ring(self) -> None:
        # Errors mean that the bell is ringing already, or that the feed is closed.
        with contextlib.suppress(BlockingIOError, OSError):
            self._button.send(b"\0")

    def _raise_defect(self) -> None:
        if self._defect is not None:
            raise self._defect

    def _serve(self) -> None:
        try:
            while not self.is_closed:
                with self._changed:
                    arrived, self._arrived = self._arrived, []
                self._desk.put(arrived)
                self._report(self._desk.work(self._bell))
        # A bug in this module: hand it to the caller's thread, which would otherwise wait forever.
        except BaseException as defect:
            with self._changed:
                self._defect = defect
                self._changed.notify_all()
        finally:
            # The next feed would take late answers from these workers for its own.
            self._desk.abandon()

    def _report(self, outcomes: Sequence[tuple[int, ItemOutcome]]) -> None:
        if outcomes:
            with self._changed:
                self._outcomes.update(outcomes)
                self._unseen += [number for number, _ in outcomes]
                self._changed.notify_all()


class _Desk:
    """Scheduler: queues items, assigns them to workers and handles failures. Not thread-safe."""

    def __init__(self, pool: WorkerPool) -> None:
        self._pool = pool
        # Unfinished items as JSON, kept for retries.
        self._lines: dict[int, str] = {}
        self._waiting: deque[int] = deque()
        self._failed_tries: Counter[int] = Counter()
        # Outcomes that `work` has not returned yet.
        self._outcomes: list[tuple[int, ItemOutcome]] = []
        self._load_failure: Failure | None = None

    def put(self, items: Sequence[tuple[int, str]]) -> None:
        """Queue items as (number, JSON) pairs."""
        self._lines.update(items)
        self._waiting.extend(number for number, _ in items)

    def work(self, bell: socket.socket) -> list[tuple[int, ItemOutcome]]:
        """Assign queued items, wait for a worker or the bell, and return new outcomes."""
        self._assign()
        self._collect(bell)
        outcomes, self._outcomes = self._outcomes, []
        return outcomes

    def load_one(self) -> Failure | None:
        """Start a worker and wait until it has loaded the task. Returns the failure, if any."""
        try:
            self._pool.start_worker()
            while any(worker.is_busy for worker in self._pool.workers):
                self._collect(None)
        except BaseException:
            self._pool.close()
            raise
        return self._load_failure

    def abandon(self) -> None:
        """Kill workers with unfinished items. Workers that are still loading continue."""
        for worker in [worker for worker in self._pool.workers if worker.chunk]:
            self._pool.remove(worker)

    def _assign(self) -> None:
        pool = self._pool
        for worker in list(pool.workers):
            if self._waiting and not worker.is_busy:
                # It died while idle: no item is to blame.
                if worker.is_gone():
                    pool.remove(worker)
                    continue
                # Spread the last items over all workers instead of filling one chunk.
                share = math.ceil(len(self._waiting) / pool.num_workers)
                numbers = [self._waiting.popleft() for _ in range(min(pool.chunk_size, share))]
                worker.chunk = dict(enumerate(numbers))
                worker.send(f"[{','.join(self._lines[number] for number in numbers)}]", limit=pool.limit)
        # Start only as many workers as the queue can feed: a worker may load a model.
        starting = sum(not worker.is_loaded for worker in pool.workers)
        while starting * pool.chunk_size < len(self._waiting) and len(pool.workers) < pool.num_workers:
            pool.start_worker()
            starting += 1

    def _collect(self, bell: socket.socket | None) -> None:
        """Wait for an event, then read answers and remove workers that died or timed out."""
        busy = [worker for worker in self._pool.workers if worker.is_busy]
        heard: list[Any] = [worker.socket for worker in busy] + ([bell] if bell else [])
        ready = connection.wait(heard, timeout=self._patience(busy))
        if bell in ready:
            assert bell is not None
            bell.recv(4096)
        for worker in busy:
            # Read before checking for death: a worker may answer and then exit.
            if worker.socket in ready:
                answers = worker.receive()
                if answers is None:
                    self._lose(worker, Failure("crashed", worker.last_words()))
                for answer in answers or []:
                    self._take(worker, answer)
            elif worker.is_gone():
                self._lose(worker, Failure("crashed", worker.last_words()))
            elif time.monotonic() > self._deadline(worker):
                self._lose(worker, Failure("timeout", self._lateness(worker)))

    def _patience(self, busy: Sequence[WorkerProcess]) -> float | None:
        """Return the seconds until the next check, or None if only the bell can bring work."""
        if not busy:
            return None
        left = min(self._deadline(worker) for worker in busy) - time.monotonic()
        return min(max(left, 0.0), DEATH_CHECK)

    def _deadline(self, worker: WorkerProcess) -> float:
        return worker.since + (self._pool.limit if worker.is_loaded else max(self._pool.limit, LOAD_LIMIT))

    def _lateness(self, worker: WorkerProcess) -> str:
        if worker.is_loaded:
            return f"did not answer within {self._pool.limit:g} s"
        return f"did not load within {max(self._pool.limit, LOAD_LIMIT):g} s"

    def _take(self, worker: WorkerProcess, answer: dict[str, Any]) -> None:
        if "together" in answer:
            worker.works_together = True
            return
        failure = Failure(answer["kind"], answer["reason"], answer["trace"]) if "kind" in answer else None
        if worker.is_loaded:
            self._conclude(worker.chunk.pop(answer["place"]), ItemOutcome(answer.get("value"), failure))
        elif failure is not None:
            self._lose(worker, failure)
        else:
            worker.is_loaded = True
            self._pool.about = answer["value"]

    def _conclude(self, number: int, outcome: ItemOutcome) -> None:
        # A retry after a timeout would most likely cost another worker.
        failed = outcome.failure is not None and outcome.failure.kind != "timeout"
        if failed and self._failed_tries[number] < self._pool.retries:
            self._failed_tries[number] += 1
            self._waiting.append(number)
            return
        del self._lines[number]
        self._outcomes.append((number, outcome))

    def _lose(self, worker: WorkerProcess, failure: Failure) -> None:
        """Kill a worker that crashed, timed out or could not load the task."""
        self._pool.remove(worker)
        if worker.is_loaded:
            self._blame(worker, failure)
        elif any(other.is_loaded for other in self._pool.workers):
            self._go_on_without(failure)
        else:
            self._fail_all(failure)

    def _blame(self, worker: WorkerProcess, failure: Failure) -> None:
        """Fail the worker's current item and requeue the rest. Fails all items if it handles them concurrently."""
        # A worker handles the chunk in order, so the first unanswered item is the current one.
        left = list(worker.chunk.values())
        num_blamed = len(left) if worker.works_together else 1
        self._waiting.extendleft(reversed(left[num_blamed:]))
        for number in left[:num_blamed]:
            self._conclude(number, ItemOutcome(failure=failure))

    def _go_on_without(self, failure: Failure) -> None:
        """Continue with the loaded workers and start no more."""
        # Most likely the GPU or host memory is full, because each worker loads a model.
        others = sum(other.is_loaded for other in self._pool.workers)
        logger.warning("another reward worker %s: continuing with %d", failure.reason, others)
        self._pool.num_workers = len(self._pool.workers)

    def _fail_all(self, failure: Failure) -> None:
        """Fail all queued items: no worker can load the task."""
        self._load_failure = Failure("load", failure.reason, failure.trace)
        for number in self._waiting:
            del self._lines[number]
            self._outcomes.append((number, ItemOutcome(failure=self._load_failure)))
        self._waiting.clear()
