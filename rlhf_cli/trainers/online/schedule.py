"""Sampling schedule: which batch is sampled when, and by which weights.

Batch k, the data of iteration k, starts when iteration k - 1 - staleness is trained and pushed. By default, the push at
the end of an iteration waits for batches in flight, so a batch's number determines its weights, and no batch is in
flight between iterations. With partial rollouts, pushes do not wait: a push during a batch changes the weights for its
remaining tokens, a batch joins those in flight, and engines are idle only for evaluations. With staleness 0, each batch
is sampled in the main thread right before its iteration.
"""

import asyncio
import math
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future
from concurrent.futures import wait as wait_for
from contextlib import contextmanager
from dataclasses import replace
from typing import Self

import numpy as np
import torch

from rlhf_cli.algorithms.importance_correction import mismatch
from rlhf_cli.errors import ProcessDied
from rlhf_cli.event_loop import LoopThread
from rlhf_cli.tracking.phases import PhaseTimer
from rlhf_cli.trainers.online.interfaces import SamplingEngines, TurnEngines
from rlhf_cli.trainers.online.joined_engines import JoinedEngines
from rlhf_cli.trainers.online.lent_actor import LentActor
from rlhf_cli.trainers.online.prompt_source import RolloutSource
from rlhf_cli.trainers.online.rollout import SampledGroups
from rlhf_cli.trainers.online.samples import Rollout
from rlhf_cli.trainers.online.state import LoopState, SourceState

_END_SECONDS = 30.0
"""How long the end of a run waits for the sampling thread. A thread that is stuck longer, such as on a lost node's
engine, ends with the process.
"""

_Sampling = tuple[SampledGroups | None, SourceState]
"""A batch, None if the last prompts gave none, and the source state after it."""


class Schedule:
    """A run's batches in order, sampled `staleness` iterations ahead. Use as a context manager, which ends sampling.

    The main thread owns the models and trains. With staleness, the event loop "sampling" owns the engines: each batch
    is a coroutine, which awaits the source state of the one before. With `partial_rollout`, pushes do not wait for the
    batches in flight, and a batch sends its requests before it awaits the one before. Dynamic sampling, greedy
    baselines and episodes do not join: they depend on the batch before, on other sampling parameters and on the state
    of the turns.
    """

    def __init__(self, source: RolloutSource, actor: LentActor, *, total_iterations: int) -> None:
        engines, settings = source.engines, source.settings
        self._staleness = settings.staleness
        self._partial_rollout = settings.partial_rollout
        may_join = self._partial_rollout and settings.dynamic is None and not settings.estimator.greedy
        self._joined = JoinedEngines(engines) if may_join and isinstance(engines, TurnEngines) else None
        self._engines = engines
        self._source = source if self._joined is None else replace(source, engines=self._joined)
        self._actor = actor
        self._total_iterations = total_iterations
        self._thread = LoopThread("sampling") if self._staleness else None
        self._flights = deque[Future[_Sampling]]()  # in flight, or finished and not yet taken
        self._rests = False  # whether no further batch may begin
        self._failure: BaseException | None = None
        # The loop appends while the main thread reads: each operation is atomic, but an iteration would not be.
        self._spans = deque[tuple[float, float]]()  # begin and end of each batch's sampling
        self._since: float | None = None  # last time that metrics were computed, or the first `take`
        self._waited = 0.0  # seconds since then

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *failure: object) -> None:
        # A thread that has not ended in time is a daemon: it ends with the process.
        if self._end() and self._thread is not None:
            self._thread.end(lambda: asyncio.sleep(0))

    def is_used_up(self, state: LoopState) -> bool:
        """Return whether no data remains. Known in advance only with dynamic sampling."""
        return not (state.ahead or self._flights) and self._source.is_used_up(state.source)

    def take(self, state: LoopState, timer: PhaseTimer) -> tuple[SampledGroups, LoopState] | None:
        """Return the next batch and the state without it, and start sampling the batches that may start; None if no
        prompt gave a group.

        Raises:
            BaseException: the error that stopped the sampling.
        """
        if self._thread is None:
            return self._sampled_now(state, timer)
        if self._failure is not None:
            raise self._failure
        self._since = self._since or time.perf_counter()
        ahead, source = tuple(state.ahead), state.source
        self._begin(self._thread, source, num_trained=state.iteration)
        while not ahead and self._flights:
            with timer("generate"):
                self._wait(self._flights[0])
            ahead, source = self._with_next(ahead, source)
            if self._failure is not None:
                raise self._failure
        if not ahead:
            return None
        return ahead[0], replace(state, ahead=ahead[1:], source=source)

    @contextmanager
    def ended_on_failure(self) -> Iterator[None]:
        """Stop sampling if the block fails, so that a checkpoint finds idle engines."""
        try:
            yield
        except BaseException:
            self._end()
            raise

    def wait(self, state: LoopState, timer: PhaseTimer, *, version: int) -> tuple[LoopState, dict[str, float]]:
        """Return the state with newly finished batches, and timing metrics.

        Waits for all batches in flight, except with partial rollouts. A sampling error is raised by the next `take`, so
        that the current iteration is completed and can be saved.

        Args:
            version: version of the actor's current weights.
        """
        if self._thread is None:
            return state, {}
        # Set the version before any wait: an engine restarted meanwhile gets the new weights.
        self._actor.version = version
        if not self._partial_rollout:
            with timer("generate"):
                for flight in self._flights:
                    self._wait(flight)
        ahead, source = tuple(state.ahead), state.source
        while self._flights and self._flights[0].done():
            ahead, source = self._with_next(ahead, source)
        return replace(state, ahead=ahead, source=source), self._timing()

    @contextmanager
    def engines(self, timer: PhaseTimer) -> Iterator[None]:
        """Keep the sampling loop from the engines while weights are pushed."""
        if self._thread is None or not self._partial_rollout:
            yield  # no batch is in flight
            return
        held, release = Future[None](), threading.Event()

        def hold() -> None:
            held.set_result(None)
            release.wait()

        # The loop runs callbacks in order, so at most one look at the engines comes before this one.
        self._thread.call_soon(hold)
        try:
            with timer("transfer"):
                self._actor.wait(held)
            yield
        finally:
            # Also if the wait was interrupted: a `hold` that comes later returns at once.
            release.set()

    def rest(self) -> None:
        """Wait for the batches in flight, and start no other until the next `take`, so that the engines are idle.

        A sampling error is raised by the next `take`.
        """
        # A flag that each batch reads when it begins: a cancel could come too late, after requests were sent.
        self._rests = True
        for flight in self._flights:
            self._wait(flight)
        self._rests = False
        self._flights = deque(flight for flight in self._flights if not flight.cancelled())
        failures = [flight.exception() for flight in self._flights]
        self._failure = self._failure or next(filter(None, failures), None)
        if any(failures):
            self._give_up_flights()

    def leave(self) -> None:
        """Stop sampling, even during a batch, and release the GPUs."""
        if self._end():
            self._engines.sleep()

    def _sampled_now(self, state: LoopState, timer: PhaseTimer) -> tuple[SampledGroups, LoopState] | None:
        if not self._has_more(state.source):
            return None
        found: list[_Sampling] = []

        async def sample() -> None:
            # Not as a result: `asyncio.run` formats the task's result, all tokens, when it resets the signal handler.
            found.append(await self._source.sample(state.source, timer))

        asyncio.run(sample())
        ((batch, source),) = found
        return None if batch is None else (batch, replace(state, ahead=(), source=source))

    def _has_more(self, source: SourceState) -> bool:
        return source.iteration < self._total_iterations and not self._source.is_used_up(source)

    def _begin(self, thread: LoopThread, source: SourceState, *, num_trained: int) -> None:
        """Start the batches allowed after `num_trained` iterations. Each continues from the previous batch's source
        state.
        """
        first = source.iteration + len(self._flights)
        for number in range(first, min(num_trained + 1 + self._staleness, self._total_iterations)):
            before, source = self._flights[-1] if self._flights else None, replace(source, iteration=number)
            self._flights.append(asyncio.run_coroutine_threadsafe(self._sample(before, source), thread.loop))

    async def _sample(self, before: Future[_Sampling] | None, source: SourceState) -> _Sampling:
        """Sample a batch. `source` is the state before it, without what a batch in flight before it will change."""
        if before is not None:
            joined = None if self._rests else self._joined
            if joined is not None:
                joined.join(self._source.requests(source), self._source.settings.sampling)
            # A failed batch raises its error again here, so that later batches fail instead of using a wrong state.
            # Without the shield, a cancel of this batch would mark the one before as done while it still runs.
            _, source = await asyncio.shield(asyncio.wrap_future(before))
            if self._rests and joined is None:
                raise asyncio.CancelledError
        begin = time.perf_counter()
        self._spans.append((begin, math.inf))
        try:
            return await self._source.sample(source, PhaseTimer()) if self._has_more(source) else (None, source)
        finally:
            self._spans[-1] = begin, time.perf_counter()

    def _wait(self, flight: Future[_Sampling]) -> None:
        """Wait until a batch has ended, and lend the actor meanwhile."""
        begin = time.perf_counter()
        self._actor.wait(flight)
        self._waited += time.perf_counter() - begin

    def _timing(self) -> dict[str, float]:
        """Return seconds since the last call: sampling, waiting for sampling, and idle engines."""
        now = time.perf_counter()
        since, self._since = self._since or now, now
        sampled = sampling_seconds([*self._spans], since, now)
        while self._spans and self._spans[0][1] <= now:
            self._spans.popleft()
        waited, self._waited = self._waited, 0.0
        return {
            "perf/sampling_seconds": sampled,
            "perf/sampling_wait_seconds": waited,
            "perf/engines_idle_seconds": max(0.0, now - since - sampled),
        }

    def _with_next(
        self, ahead: tuple[SampledGroups, ...], source: SourceState
    ) -> tuple[tuple[SampledGroups, ...], SourceState]:
        """Add the next finished batch. Returns the batches, and the source state after the last one."""
        flight = self._flights.popleft()
        self._failure = flight.exception()
        if self._failure is not None:
            self._give_up_flights()
            return ahead, source
        batch, source = flight.result()
        return ahead if batch is None else (*ahead, batch), source

    def _end(self) -> bool:
        """Stop sampling. Returns whether it has stopped."""
        if self._thread is None:
            return True
        # Cancel first: a batch whose loan is refused must not be followed by the next one.
        self._thread.call_soon(_cancel_all)
        self._actor.end()
        # Continue after the timeout: a stuck engine must not block saving.
        return not wait_for(self._flights, _END_SECONDS).not_done

    def _give_up_flights(self) -> None:
        """Leave the engines idle after an error, because the next push requires them."""
        for flight in self._flights:
            self._actor.wait(flight)  # each fails with the previous one's error
        self._flights.clear()
        if isinstance(self._failure, ProcessDied) or not self._engines.is_generating:
            return
        assert self._thread is not None
        # In the loop, which owns the engines; a restarted one borrows the actor.
        stopping = asyncio.run_coroutine_threadsafe(_stopped(self._engines), self._thread.loop)
        self._actor.wait(stopping)
        stopping.result()


async def _stopped(engines: SamplingEngines) -> None:
    """Drop the batch in flight."""
    engines.cut(0)
    while engines.is_generating:
        await engines.collect()


def _cancel_all() -> None:
    for task in asyncio.all_tasks():
        task.cancel()


def sampling_seconds(spans: Iterable[tuple[float, float]], since: float, now: float) -> float:
    """Return how long batches were sampled between two times. `spans` are their begins and ends."""
    return sum(max(0.0, min(end, now) - max(begin, since)) for begin, end in spans)


def staleness_metrics(rollout: Rollout, *, iteration: int) -> dict[str, float]:
    """Return staleness: number of pushes between the weights that sampled each token and the weights before this
    update.

    With pushes during responses, also return the share of such responses, and the engine-trainer mismatch
    (`rollout_k3`) over tokens sampled by the current weights, which excludes policy changes.
    """
    runs = [run for generation in rollout.responses for run in generation.runs]
    versions, counts = np.array(runs, dtype=np.int64).reshape(-1, 2).T
    # `iteration - 1` pushes precede this update, and the first weights have version 0.
    staleness_N = iteration - 1 - np.repeat(versions, counts)
    metrics = {"staleness/mean": float(staleness_N.mean()), "staleness/max": float(staleness_N.max())}
    mixed = [bool(generation.version_runs) for generation in rollout.responses]
    if not any(mixed):
        return metrics
    metrics["staleness/mixed"] = float(np.mean(mixed))
    is_current_N = staleness_N == 0
    if rollout.old_logprobs is not None and is_current_N.any():
        old_N, rollout_N = map(np.concatenate, (rollout.old_logprobs, rollout.rollout_logprobs))
        apart = mismatch(torch.from_numpy(old_N[is_current_N]), torch.from_numpy(rollout_N[is_current_N]))
        metrics["rollout_k3_current"] = float(apart["k3"].mean())
    return metrics
