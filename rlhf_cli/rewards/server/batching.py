"""Requests that come at the same time, scored together: a bounded queue in front of something that scores.

HTTP is in app.py.
"""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from rlhf_cli.errors import RunError
from rlhf_cli.rewards.records import Score, ScoreRequest

ScoreJobs = Callable[[Sequence[Sequence[ScoreRequest]]], Sequence[list[Score] | RunError]]
"""For each of several requests the scores of its responses, or why it has none; in a thread, one call at a time."""


class QueueFull(Exception):
    """There is no room for the responses of a request."""


class Abandoned(Exception):
    """Whoever asked is gone."""


@dataclass(eq=False)
class _Job:
    requests: Sequence[ScoreRequest]
    result: "asyncio.Future[list[Score]]"
    is_abandoned: Callable[[], Awaitable[bool]]


class Batcher:
    """At most `max_waiting` responses wait; up to `max_together` of them, of whole requests, are scored in one call."""

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
        """Return the score of each response.

        Raises QueueFull, Abandoned if the client is gone by its turn, or the error of scoring.
        """
        if self.num_waiting + len(requests) > self._max_waiting:
            raise QueueFull
        job = _Job(requests, asyncio.get_running_loop().create_future(), is_abandoned)
        self._jobs.append(job)
        self.num_waiting += len(requests)
        self._news.set()
        return await job.result

    async def run(self) -> None:
        """Score incoming requests until the process ends."""
        while True:
            await self._news.wait()
            self._news.clear()
            while jobs := await self._next_jobs():
                await self._run(jobs)

    async def _next_jobs(self) -> list[_Job]:
        jobs: list[_Job] = []
        count = 0
        while self._jobs and (not jobs or count + len(self._jobs[0].requests) <= self._max_together):
            job = self._jobs.popleft()
            self.num_waiting -= len(job.requests)
            if not await job.is_abandoned():
                jobs.append(job)
                count += len(job.requests)
            elif not job.result.done():
                job.result.set_exception(Abandoned())
        return jobs

    async def _run(self, jobs: list[_Job]) -> None:
        try:
            scored = await asyncio.to_thread(self._score, [job.requests for job in jobs])
        except Exception as error:
            for job in jobs:
                if not job.result.done():
                    job.result.set_exception(error)
            return
        for job, scores in zip(jobs, scored, strict=True):
            self.num_scored += len(job.requests)
            if job.result.done():
                continue
            if isinstance(scores, RunError):
                job.result.set_exception(scores)
            else:
                job.result.set_result(scores)
