"""Killable worker processes that answer items, each within a limit of time.

An item that hangs costs its worker, not the run: the process group is killed and a new worker takes over with the item
after it. Items may arrive bit by bit while their owner does something else (`Feed`). worker.py computes the results;
process.py starts and kills workers.
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

# Seconds between looks at whether a worker has died. The end of its socket is noticed at once; this is for a worker
# that left its socket to a child.
DEATH_CHECK = 0.2


@dataclass(frozen=True, slots=True)
class Failure:
    """Why there is no value: `reason` ends a sentence about the task, `trace` is the worker's traceback, if any."""

    kind: FailureKind
    reason: str
    trace: str = ""


@dataclass(frozen=True, slots=True)
class ItemOutcome:
    """The outcome of one item: a value (JSON) or a failure."""

    value: Any = None
    failure: Failure | None = None


class WorkerPool:
    """Up to `num_workers` workers with the same task; a context manager that leaves no process behind.

    `loader` is `module:function`: called with `argument` in each worker, it returns the function that answers items.
    Items, `argument` and answers are JSON. `limit` are the seconds one item may take; items travel in chunks, but the
    limit holds for each of them. An item that failed is tried `retries` times more, unless it took too long.
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
        self.about: Any = None  # the loaded task's description of itself
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
        """Add a worker, which begins to load its task."""
        self.workers.append(WorkerProcess(self._loader, self._argument))

    def remove(self, worker: WorkerProcess) -> None:
        """Kill a worker; another takes its place when there is work for it."""
        self.workers.remove(worker)
        worker.kill()

    def start(self) -> Failure | None:
        """Start one worker and load the task in it; why that failed, if it did."""
        return _Desk(self).load_one()

    def feed(self) -> "Feed":
        """Return the items that arrive bit by bit; one feed at a time."""
        assert self._feed is None or self._feed.is_closed, "the pool's last feed is still open"
        self._feed = Feed(self)
        return self._feed

    def map(self, items: Sequence[object]) -> list[ItemOutcome]:
        """Return the outcome of each item, in order. No failure of an item is raised."""
        with self.feed() as feed:
            feed.add(items)
            return feed.finish()


class Feed:
    """Items for the workers of a pool, added while others are worked on; a context manager.

    A thread hands items out and collects outcomes, so workers are never idle because the owner is busy elsewhere. The
    thread alone touches the pool's workers while a feed is open. Ended before all is done, it kills the workers that
    still owe answers, which the next feed would otherwise take for its own.
    """

    def __init__(self, pool: WorkerPool) -> None:
        self._desk = _Desk(pool)
        self._changed = threading.Condition()  # guards everything below
        self._num_items = 0
        self._arrived: list[tuple[int, str]] = []  # not yet seen by the thread
        self._outcomes: dict[int, ItemOutcome] = {}
        self._unseen: list[int] = []  # of the outcomes
        self._defect: BaseException | None = None
        self.is_closed = False
        self._bell, self._button = socket.socketpair()
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
        """Have items worked on; the numbers they got, counted from 0. Returns at once."""
        lines = [json.dumps(item) for item in items]
        with self._changed:
            numbers = range(self._num_items, self._num_items + len(lines))
            self._num_items = numbers.stop
            self._arrived += zip(numbers, lines, strict=True)
        self._ring()
        return numbers

    def ready(self) -> list[tuple[int, ItemOutcome]]:
        """Return the outcomes that have come since the last call, each with the number of its item. Never waits."""
        with self._changed:
            self._raise_defect()
            unseen, self._unseen = self._unseen, []
            return [(number, self._outcomes[number]) for number in unseen]

    def wait(self) -> None:
        """Wait for an outcome that `ready` has not given yet; returns at once if there is none to come."""
        with self._changed:
            self._changed.wait_for(
                lambda: self._defect is not None or self._unseen or len(self._outcomes) == self._num_items
            )
            self._raise_defect()

    @property
    def is_open(self) -> bool:
        """Whether there are outcomes that `ready` has not given yet."""
        with self._changed:
            return bool(self._unseen) or len(self._outcomes) < self._num_items

    def finish(self) -> list[ItemOutcome]:
        """Wait for all items; their outcomes by number. No failure of an item is raised."""
        with self._changed:
            self._changed.wait_for(lambda: self._defect is not None or len(self._outcomes) == self._num_items)
            self._raise_defect()
            return [self._outcomes[number] for number in range(self._num_items)]

    def close(self) -> None:
        """End the thread, and the workers that are at an item."""
        with self._changed:
            self.is_closed = True
        self._ring()
        self._thread.join()
        self._bell.close()
        self._button.close()

    def _ring(self) -> None:
        with contextlib.suppress(BlockingIOError, OSError):  # it is ringing already, or closed
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
        except BaseException as defect:  # of this program: passed to the owner, who waits in another thread
            with self._changed:
                self._defect = defect
                self._changed.notify_all()
        finally:
            self._desk.abandon()

    def _report(self, outcomes: Sequence[tuple[int, ItemOutcome]]) -> None:
        if outcomes:
            with self._changed:
                self._outcomes.update(outcomes)
                self._unseen += [number for number, _ in outcomes]
                self._changed.notify_all()


class _Desk:
    """Which items wait, which worker is at which, and what becomes of them; for one thread."""

    def __init__(self, pool: WorkerPool) -> None:
        self._pool = pool
        self._lines: dict[int, str] = {}  # items without an outcome
        self._waiting: deque[int] = deque()
        self._failed_tries: Counter[int] = Counter()
        self._outcomes: list[tuple[int, ItemOutcome]] = []  # to be reported
        self._load_failure: Failure | None = None

    def put(self, items: Sequence[tuple[int, str]]) -> None:
        """Take more items: number and JSON of each."""
        self._lines.update(items)
        self._waiting.extend(number for number, _ in items)

    def work(self, bell: socket.socket) -> list[tuple[int, ItemOutcome]]:
        """Hand out what waits, wait until something happens or the bell rings, and return new outcomes."""
        self._assign()
        self._collect(bell)
        outcomes, self._outcomes = self._outcomes, []
        return outcomes

    def load_one(self) -> Failure | None:
        """Start a worker and see that it loads its task; why not, if it does not."""
        try:
            self._pool.start_worker()
            while any(worker.is_busy for worker in self._pool.workers):
                self._collect(None)
        except BaseException:
            self._pool.close()
            raise
        return self._load_failure

    def abandon(self) -> None:
        """Kill the workers that owe answers; workers that are still loading may go on."""
        for worker in [worker for worker in self._pool.workers if worker.chunk]:
            self._pool.remove(worker)

    def _assign(self) -> None:
        pool = self._pool
        for worker in list(pool.workers):
            if self._waiting and not worker.is_busy:
                if worker.is_gone():  # died while it had nothing to do: no item is to blame
                    pool.remove(worker)
                    continue
                share = math.ceil(len(self._waiting) / pool.num_workers)
                numbers = [self._waiting.popleft() for _ in range(min(pool.chunk_size, share))]
                worker.chunk = dict(enumerate(numbers))
                worker.send(f"[{','.join(self._lines[number] for number in numbers)}]", limit=pool.limit)
        starting = sum(not worker.is_loaded for worker in pool.workers)
        while starting * pool.chunk_size < len(self._waiting) and len(pool.workers) < pool.num_workers:
            pool.start_worker()
            starting += 1

    def _collect(self, bell: socket.socket | None) -> None:
        """Wait until something happens, then take answers and remove workers that died or are overdue."""
        busy = [worker for worker in self._pool.workers if worker.is_busy]
        heard: list[Any] = [worker.socket for worker in busy] + ([bell] if bell else [])
        ready = connection.wait(heard, timeout=self._patience(busy))
        if bell in ready:
            assert bell is not None
            bell.recv(4096)
        for worker in busy:
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
        """Return the seconds until the workers must be looked at; None if only the bell can announce something."""
        if not busy:
            return None
        left = min(self._deadline(worker) for worker in busy) - time.monotonic()
        return min(max(left, 0.0), DEATH_CHECK)

    def _deadline(self, worker: WorkerProcess) -> float:
        return worker.since + (self._pool.limit if worker.is_loaded else max(self._pool.limit, LOAD_LIMIT))

    def _lateness(self, worker: WorkerProcess) -> str:
        if worker.is_loaded:
            return f"did not answer within {self._pool.limit:g} s"
        return f"was not loaded within {max(self._pool.limit, LOAD_LIMIT):g} s"

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
        failed = outcome.failure is not None and outcome.failure.kind != "timeout"
        if failed and self._failed_tries[number] < self._pool.retries:
            self._failed_tries[number] += 1
            self._waiting.append(number)
            return
        del self._lines[number]
        self._outcomes.append((number, outcome))

    def _lose(self, worker: WorkerProcess, failure: Failure) -> None:
        """Kill a worker that crashed, is overdue or could not load its task."""
        self._pool.remove(worker)
        if worker.is_loaded:
            self._blame(worker, failure)
        elif any(other.is_loaded for other in self._pool.workers):
            self._go_on_without(failure)
        else:
            self._fail_all(failure)

    def _blame(self, worker: WorkerProcess, failure: Failure) -> None:
        """Fail the item that the worker was at, or all if it works on them together; later items wait again."""
        left = list(worker.chunk.values())
        num_blamed = len(left) if worker.works_together else 1
        self._waiting.extendleft(reversed(left[num_blamed:]))
        for number in left[:num_blamed]:
            self._conclude(number, ItemOutcome(failure=failure))

    def _go_on_without(self, failure: Failure) -> None:
        """Start no further worker: there may be no room for one more, if each holds a model of its own."""
        others = sum(other.is_loaded for other in self._pool.workers)
        logger.warning("a further reward worker %s: %d go on without it", failure.reason, others)
        self._pool.num_workers = len(self._pool.workers)

    def _fail_all(self, failure: Failure) -> None:
        """Fail all waiting items: the next worker could not load the task either."""
        self._load_failure = Failure("load", failure.reason, failure.trace)
        for number in self._waiting:
            del self._lines[number]
            self._outcomes.append((number, ItemOutcome(failure=self._load_failure)))
        self._waiting.clear()
