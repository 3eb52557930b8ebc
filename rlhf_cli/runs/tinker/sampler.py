"""Samples for several clients with one rollout engine.

The engine holds one set of weights at a time, and serves one batch with one set of sampling parameters. Requests that
agree in both share a batch; others wait, in the order of their arrival.
"""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from rlhf_cli.backends.rollout.engine import RolloutEngine
from rlhf_cli.data.rollouts import Generation, GenerationRequest, SamplingParams
from rlhf_cli.runs.tinker.checkpoints import SavedWeights

Push = Callable[[RolloutEngine, SavedWeights | None, int], Awaitable[None]]
"""Gives the engine saved weights, None for the base model, with a version number."""


@dataclass(eq=False)
class _Job:
    weights: SavedWeights | None
    sampling: SamplingParams
    requests: Sequence[GenerationRequest]
    result: "asyncio.Future[list[Generation]]"
    responses: dict[int, Generation] = field(default_factory=dict)

    @property
    def key(self) -> tuple[SavedWeights | None, SamplingParams]:
        return self.weights, self.sampling

    def add(self, index: int, response: Generation) -> None:
        self.responses[index] = response
        if len(self.responses) == len(self.requests) and not self.result.done():
            self.result.set_result([self.responses[number] for number in range(len(self.requests))])

    def fail(self, error: Exception) -> None:
        if not self.result.done():
            self.result.set_exception(error)


class Sampler:
    """Queue in front of an engine. Use it in one event loop, in which `run` is a task."""

    def __init__(self, engine: RolloutEngine, push: Push) -> None:
        self._engine, self._push = engine, push
        self._waiting: deque[_Job] = deque()
        self._news = asyncio.Event()
        # Version 0 is the base model, which the engine has loaded.
        self._weights: SavedWeights | None = None
        # False if a push has failed.
        self._is_known = True
        self._version = 0

    async def sample(
        self, weights: SavedWeights | None, requests: Sequence[GenerationRequest], sampling: SamplingParams
    ) -> list[Generation]:
        """Return a response for each request, from saved weights, None for the base model."""
        job = _Job(weights, sampling, requests, asyncio.get_running_loop().create_future())
        self._waiting.append(job)
        self._news.set()
        return await job.result

    async def run(self) -> None:
        """Serve requests until the task is canceled."""
        while True:
            while not self._waiting:
                self._news.clear()
                await self._news.wait()
            # One turn of the loop, so that requests which arrive together start together.
            await asyncio.sleep(0)
            jobs = self._take(self._waiting[0].key)
            try:
                await self._serve(jobs)
            except Exception as error:
                for job in jobs:
                    job.fail(error)

    def _take(self, key: tuple[SavedWeights | None, SamplingParams]) -> list[_Job]:
        """Remove and return the waiting jobs with this key. While another key waits first, nothing joins a batch."""
        taken: list[_Job] = []
        while self._waiting and self._waiting[0].key == key:
            taken.append(self._waiting.popleft())
        return taken

    async def _serve(self, jobs: list[_Job]) -> None:
        """Run a batch. Jobs that join it are appended to `jobs`."""
        key = weights, sampling = jobs[0].key
        if weights != self._weights or not self._is_known:
            self._version += 1
            self._is_known = False
            await self._push(self._engine, weights, self._version)
            self._weights, self._is_known = weights, True
        places = [(job, index) for job in jobs for index in range(len(job.requests))]
        await self._engine.begin([job.requests[index] for job, index in places], sampling)
        collecting: asyncio.Task[bool] | None = None
        try:
            while True:
                if joined := self._take(key):
                    jobs += joined
                    places += (more := [(job, index) for job in joined for index in range(len(job.requests))])
                    await self._engine.add([job.requests[index] for job, index in more])
                collecting = collecting or asyncio.create_task(self._collect(places))
                self._news.clear()
                news = asyncio.create_task(self._news.wait())
                await asyncio.wait({collecting, news}, return_when=asyncio.FIRST_COMPLETED)
                news.cancel()
                if collecting.done():
                    is_last, collecting = collecting.result(), None
                    if is_last and not (self._waiting and self._waiting[0].key == key):
                        return
        finally:
            if collecting is not None:
                collecting.cancel()
                with suppress(asyncio.CancelledError):
                    await collecting

    async def _collect(self, places: list[tuple[_Job, int]]) -> bool:
        """Deliver the responses that have arrived. Returns whether the batch is complete."""
        arrivals = await self._engine.collect()
        for number, response in arrivals.responses:
            job, index = places[number]
            job.add(index, response)
        return arrivals.is_last
