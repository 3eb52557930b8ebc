"""Pool of killable worker processes with a timeout per item.

If an item hangs, the pool kills its worker's process group, and a new worker continues with the next item. Items can be
added incrementally while the caller does other work (`Feed`). worker.py computes results; process.py starts and kills
workers.
"""

import asyncio
import json
import logging
import math
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

from rlhf_cli.event_loop import LoopThread
from rlhf_cli.rewards.records import FailureKind
from rlhf_cli.rewards.workers.process import LOAD_LIMIT, WorkerProcess

logger = logging.getLogger(__name__)

# Polling interval in seconds for dead workers whose socket stays open in a child process. Otherwise, a closed socket
# reports the exit immediately.
_DEATH_CHECK = 0.2


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

    An event loop in a background thread assigns items and collects outcomes. Only this thread uses the workers.

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
        self.thread = LoopThread("reward workers", on_defect=self._break_down)
        # Set after each event in the loop: the condition that `until` waits for may hold now.
        self.news = asyncio.Event()
        self._defect: BaseException | None = None

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
        self.thread.end(self._kill_all)

    async def _kill_all(self) -> None:
        while self.workers:
            self.workers.pop().kill()

    def start_worker(self) -> None:
        """Add a worker process, which starts to load the task."""
        self.workers.append(WorkerProcess(self._loader, self._argument))

    def start(self) -> Failure | None:
        """Start one worker and wait until it has loaded the task. Returns the failure, if any."""
        return self.thread.run(_Desk(self).load_one())

    def feed(self) -> "Feed":
        """Open a feed for incrementally added items. Only one may be open at a time."""
        assert self._feed is None or self._feed.is_closed, "the pool's last feed is still open"
        self._feed = Feed(self)
        return self._feed

    def map(self, items: Sequence[object]) -> list[ItemOutcome]:
        """Process items and return outcomes in order. Item failures are returned, not raised."""
        with self.feed() as feed:
            feed.add(items)
            return asyncio.run(feed.finish())

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait in the loop until a condition holds. Raises like `check`."""
        while not condition():
            self.check()
            # Nothing else runs in the loop between the condition and the wait, so no news is lost.
            self.news.clear()
            await self.news.wait()

    def check(self) -> None:
        """Raise the exception of a callback in the loop, which is a bug: outcomes may never come."""
        if self._defect is not None:
            raise self._defect

    def _break_down(self, defect: BaseException) -> None:
        self._defect = defect
        self.news.set()


class Feed:
    """Incremental input to a worker pool; a context manager.

    Workers stay busy while the caller does other work. On exit, workers with unfinished items are killed.
    """

    def __init__(self, pool: WorkerPool) -> None:
        self._pool, self._desk = pool, _Desk(pool)
        self._num_items = 0
        # Outcomes that `ready` has returned.
        self._num_seen = 0
        self.is_closed = False

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def add(self, items: Iterable[object]) -> range:
        """Submit items and return the assigned numbers, counted from 0. Never blocks."""
        lines = [json.dumps(item) for item in items]
        numbers = range(self._num_items, self._num_items + len(lines))
        self._num_items = numbers.stop
        self._pool.thread.call_soon(self._desk.put, list(zip(numbers, lines, strict=True)))
        return numbers

    def ready(self) -> list[tuple[int, ItemOutcome]]:
        """Return new outcomes as (item number, outcome) pairs. Never blocks."""
        self._pool.check()
        # The loop may add more meanwhile: `append` and `popleft` are atomic, so no lock is needed.
        new = [self._desk.outcomes.popleft() for _ in range(len(self._desk.outcomes))]
        self._num_seen += len(new)
        return new

    @property
    def is_open(self) -> bool:
        """Whether outcomes are pending or not yet returned by `ready`."""
        return self._num_seen < self._num_items

    async def wait(self) -> None:
        """Wait until `ready` has something to return. Returns immediately if nothing is pending."""
        if self.is_open:
            await self._pool.thread.ask(self._pool.until(lambda: bool(self._desk.outcomes)))

    async def finish(self) -> list[ItemOutcome]:
        """Wait for all items and return the outcomes that `ready` has not returned, in the order of their items.

        Item failures are returned, not raised.
        """
        num_left = self._num_items - self._num_seen
        await self._pool.thread.ask(self._pool.until(lambda: len(self._desk.outcomes) == num_left))
        return [outcome for _, outcome in sorted(self.ready(), key=lambda numbered: numbered[0])]

    def close(self) -> None:
        """Kill workers with unfinished items."""
        if not self.is_closed:
            self.is_closed = True
            self._pool.thread.run(self._desk.abandon())


class _Desk:
    """Scheduler: queues items, assigns them to workers and handles failures. Works in the pool's loop."""

    def __init__(self, pool: WorkerPool) -> None:
        self._pool, self._loop = pool, pool.thread.loop
        # Unfinished items as JSON, kept for retries.
        self._lines: dict[int, str] = {}
        self._waiting: deque[int] = deque()
        self._failed_tries: Counter[int] = Counter()
        # Timers of busy workers, whose sockets the loop watches. Idle ones are not watched: `_assign` checks them.
        self._checks: dict[WorkerProcess, asyncio.TimerHandle] = {}
        # Not yet returned by `Feed.ready`.
        self.outcomes: deque[tuple[int, ItemOutcome]] = deque()
        self._load_failure: Failure | None = None

    def put(self, items: Sequence[tuple[int, str]]) -> None:
        """Queue items as (number, JSON) pairs."""
        self._lines.update(items)
        self._waiting.extend(number for number, _ in items)
        self._proceed()

    async def load_one(self) -> Failure | None:
        """Start a worker and wait until it has loaded the task. Returns the failure, if any."""
        self._pool.start_worker()
        self._proceed()
        await self._pool.until(lambda: not self._checks)
        return self._load_failure

    async def abandon(self) -> None:
        """Kill workers with unfinished items. Workers that are still loading continue."""
        for worker in [*self._checks]:
            # The next feed would take late answers for its own.
            if worker.chunk:
                self._remove(worker)
            else:
                self._ignore(worker)

    def _proceed(self) -> None:
        """Assign queued items and listen to busy workers. Called after each event."""
        self._assign()
        for worker in self._pool.workers:
            if not worker.is_busy:
                self._ignore(worker)
            elif worker not in self._checks:
                self._loop.add_reader(worker.socket, self._hear, worker)
                seconds = min(self._deadline(worker) - time.monotonic(), _DEATH_CHECK)
                self._checks[worker] = self._loop.call_later(seconds, self._check, worker)
        self._pool.news.set()

    def _ignore(self, worker: WorkerProcess) -> None:
        if worker in self._checks:
            self._checks.pop(worker).cancel()
            self._loop.remove_reader(worker.socket)

    def _remove(self, worker: WorkerProcess) -> None:
        """Kill a worker. A replacement starts when there is work for it."""
        # Before the socket is closed: the next process may get the same file descriptor.
        self._ignore(worker)
        self._pool.workers.remove(worker)
        worker.kill()

    def _assign(self) -> None:
        pool = self._pool
        for worker in list(pool.workers):
            if self._waiting and not worker.is_busy:
                # It died while idle: no item is to blame.
                if worker.is_gone():
                    self._remove(worker)
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

    def _hear(self, worker: WorkerProcess) -> None:
        self._read(worker)
        self._proceed()

    def _read(self, worker: WorkerProcess) -> None:
        """Read answers, and remove a worker that has closed the socket."""
        answers = worker.receive()
        if answers is None:
            self._lose(worker, Failure("crashed", worker.last_words()))
        for answer in answers or []:
            self._take(worker, answer)

    def _check(self, worker: WorkerProcess) -> None:
        """Remove a worker that has exited or timed out."""
        self._ignore(worker)
        # Read in between: a worker may answer and then exit, or its answer has not been read because the loop was busy.
        is_gone = worker.is_gone()
        self._read(worker)
        if worker in self._pool.workers and worker.is_busy:
            if is_gone:
                self._lose(worker, Failure("crashed", worker.last_words()))
            elif time.monotonic() >= self._deadline(worker):
                self._lose(worker, Failure("timeout", self._lateness(worker)))
        self._proceed()

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
        self.outcomes.append((number, outcome))

    def _lose(self, worker: WorkerProcess, failure: Failure) -> None:
        """Kill a worker that crashed, timed out or could not load the task."""
        self._remove(worker)
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
            self.outcomes.append((number, ItemOutcome(failure=self._load_failure)))
        self._waiting.clear()
