"""Dynamic batching with a bounded queue: concurrent requests are scored together. HTTP is in app.py."""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from rlhf_cli.errors import RunError
from rlhf_cli.rewards.records import Score, ScoreRequest

ScoreJobs = Callable[[Sequence[Sequence[ScoreRequest]]], Sequence[list[Score] | RunError]]
"""Scores several requests: a list of scores, or an error, for each. Runs in a thread, one call at a time."""


class QueueFull(Exception):
    """The queue has no room for the request."""


class Abandoned(Exception):
    """The client has disconnected."""


@dataclass(eq=False)
class _Job:
    requests: Sequence[ScoreRequest]
    result: "asyncio.Future[list[Score]]"
    is_abandoned: Callable[[], Awaitable[bool]]


class Batcher:
    """Queues up to `max_waiting` responses and scores up to `max_together` in one call. Requests are never split."""

    def __init__(self, score: ScoreJobs, *, max_waiting: int, max_together: int) -> None:
        self._score = score
        self._max_waiting, self._max_together = max_waiting, max_together
        self._jobs: deque[_Job] = deque()
        self._news = asyncio.Event()
        self.num_waiting = 0
        self.num_scored = 0

    async def ask(
        self, requests: Sequence[ScoreRequest], *, is_abandoned: Callable[[], Awaitable[bool]]
    ) -> list[Score]:
        """Queue a request and return one score per response.

        Raises QueueFull, Abandoned if the client has disconnected before scoring starts, or the scoring error.
        """
        if self.num_waiting + len(requests) > self._max_waiting:
            raise QueueFull
        job = _Job(requests, asyncio.get_running_loop().create_future(), is_abandoned)
        self._jobs.append(job)
        self.num_waiting += len(requests)
        self._news.set()
        return await job.result

    async def run(self) -> None:
        """Score queued requests until cancelled."""
        while True:
            await self._news.wait()
            # Clear before reading the queue: a request that arrives later sets the event again.
            self._news.clear()
            while jobs := await self._next_jobs():
                await self._run(jobs)

    async def _next_jobs(self) -> list[_Job]:
        jobs: list[_Job] = []
        count = 0
        # The first request is always taken, even if it alone exceeds the limit.
        while self._jobs and (not jobs or count + len(self._jobs[0].requests) <= self._max_together):
            job = self._jobs.popleft()
            self.num_waiting -= len(job.requests)
            # Scoring is the expensive part, so check for the client at the last moment.
            if not await job.is_abandoned():
                jobs.append(job)
                count += len(job.requests)
            elif not job.result.done():
                job.result.set_exception(Abandoned())
        return jobs

    async def _run(self, jobs: list[_Job]) -> None:
        try:
            # In a thread, so that the event loop continues to accept requests during the forward pass.
            scored = await asyncio.to_thread(self._score, [job.requests for job in jobs])
        except Exception as error:
            for job in jobs:
                if not job.result.done():
                    job.result.set_exception(error)
            return
        for job, scores in zip(jobs, scored, strict=True):
            self.num_scored += len(job.requests)
            # Cancelled: the client disconnected while its request was scored.
            if job.result.done():
                continue
            if isinstance(scores, RunError):
                job.result.set_exception(scores)
            else:
                job.result.set_result(scores)
