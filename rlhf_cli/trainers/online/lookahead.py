"""Sampling ahead of training: the batch of a later iteration is sampled in a thread while one trains.

Batch k, the data of iteration k, is sampled by the weights after iteration max(0, k - 1 - lag). The push at the end of
an iteration waits for the batch in flight, so that the number of a batch alone decides about its weights, and nothing
is in flight between iterations: evaluations and checkpoints find engines at rest. A lag of 0 samples each batch in the
main thread, right before its iteration.
"""

import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Self

from rlhf_cli.errors import ProcessDied
from rlhf_cli.tracking.phases import PhaseTimer
from rlhf_cli.trainers.online.actor_turns import ActorTurns
from rlhf_cli.trainers.online.prompt_source import RolloutSource
from rlhf_cli.trainers.online.rollout import Rollout
from rlhf_cli.trainers.online.state import LoopState, SourceState

_END_SECONDS = 30.0
"""How long the end of a run waits for its thread. A thread that waits longer, as for an engine of a node that was lost,
ends when the roles end.
"""

Sampling = tuple[Rollout | None, SourceState]
"""A batch, None if the last prompts gave none, and the state of the source after it."""


@dataclass(frozen=True)
class Taken:
    """The batch of an iteration, the finished batches after it, and the state of the source after the last of them."""

    rollout: Rollout
    ahead: tuple[Rollout, ...]
    source: SourceState


@dataclass(frozen=True)
class _Flight:
    """The sampling of a batch in the thread, which returns the seconds that it took too."""

    sampling: Future[tuple[Sampling, float]]
    began: float


class Lookahead:
    """The batches of a run in their order, sampled `lag` iterations ahead; a context manager that ends its thread."""

    def __init__(self, source: RolloutSource, turns: ActorTurns, *, lag: int, total_iterations: int) -> None:
        self._source = replace(source, check_wanted=turns.check_wanted)
        self._turns = turns
        self._lag = lag
        self._total_iterations = total_iterations
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="sampling")
        self._flight: _Flight | None = None
        self._failure: BaseException | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *failure: object) -> None:
        self._thread.shutdown(wait=self._end())

    def is_used_up(self, state: LoopState) -> bool:
        """Return whether nothing is left to train on; known beforehand under dynamic sampling alone."""
        return not state.ahead and self._source.is_used_up(state.source)

    def take(self, state: LoopState, timer: PhaseTimer) -> Taken | None:
        """Return the next batch, and begin to sample the batch `lag` behind it; None if no prompt gave a group.

        Batches that are not there yet are sampled first: at the start of a run, and after a failure.

        Raises:
            BaseException: the error that ended the last sampling in the thread.
        """
        if self._failure is not None:
            raise self._failure
        ahead, source = list(state.ahead), state.source
        while len(ahead) < max(1, self._lag) and self._has_more(source):
            rollout, source = self._source.sample(source, timer)
            ahead += [] if rollout is None else [rollout]
        if not ahead:
            return None
        if self._lag and self._has_more(source):
            self._turns.take()
            self._flight = _Flight(self._thread.submit(self._sample, source), time.perf_counter())
        return Taken(ahead[0], tuple(ahead[1:]), source)

    @contextmanager
    def ended_on_failure(self) -> Iterator[None]:
        """End the sampling if the block fails, so that a checkpoint finds engines that nobody uses."""
        try:
            yield
        except BaseException:
            self._end()
            raise

    def wait(self, taken: Taken, timer: PhaseTimer, *, version: int) -> tuple[Taken, dict[str, float]]:
        """Wait for the batch in flight; return `taken` with this batch added, and metrics of the time.

        An error of the sampling is kept for the next `take`: the iteration in training is completed and can be saved.

        Args:
            version: the version of the weights that the actor has now.
        """
        flight = self._flight
        if flight is None:
            return taken, {}
        self._turns.give(version)
        begin = time.perf_counter()
        with timer("generate"):
            self._failure = flight.sampling.exception()
        self._flight = None
        if self._failure is not None:
            self._give_up_requests()
            return taken, {}
        (rollout, source), seconds = flight.sampling.result()
        end = time.perf_counter()
        metrics = {
            "perf/sampling_seconds": seconds,
            "perf/sampling_wait_seconds": end - begin,
            "perf/engines_idle_seconds": max(0.0, end - flight.began - seconds),
        }
        return Taken(taken.rollout, (*taken.ahead, *([] if rollout is None else [rollout])), source), metrics

    def _has_more(self, source: SourceState) -> bool:
        return source.iteration < self._total_iterations and not self._source.is_used_up(source)

    def _sample(self, source: SourceState) -> tuple[Sampling, float]:
        begin = time.perf_counter()
        found = self._source.sample(source, PhaseTimer())
        return found, time.perf_counter() - begin

    def _end(self) -> bool:
        """End the sampling; return whether it has ended."""
        flight, self._flight = self._flight, None
        if flight is not None:
            self._turns.end()
            with suppress(TimeoutError):
                flight.sampling.exception(_END_SECONDS)
        return flight is None or flight.sampling.done()

    def _give_up_requests(self) -> None:
        """Leave engines at rest after an error, as the push that follows needs them."""
        engines = self._source.engines
        if isinstance(self._failure, ProcessDied) or not engines.is_generating:
            return
        engines.cut(0)
        while engines.is_generating:
            engines.collect()
