"""Asynchronous sampling: a thread samples batches for later iterations during training.

Batch k, the data of iteration k, starts when iteration k - 1 - lag is trained and pushed. By default, the push at the
end of an iteration waits for batches in flight, so a batch's number determines its weights, and no batch is in flight
between iterations. With partial rollouts, pushes do not wait: a push during a batch changes the weights for its
remaining tokens, and engines are idle only for evaluations. With lag 0, each batch is sampled in the main thread right
before its iteration.
"""

from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Self

from rlhf_cli.errors import ProcessDied
from rlhf_cli.tracking.phases import PhaseTimer
from rlhf_cli.trainers.online.actor_turns import END_SECONDS, ActorTurns
from rlhf_cli.trainers.online.engine_turns import EnginesInTurns, EngineTurns
from rlhf_cli.trainers.online.interfaces import Engines
from rlhf_cli.trainers.online.prompt_source import RolloutSource
from rlhf_cli.trainers.online.rollout import Rollout
from rlhf_cli.trainers.online.sampling_clock import SamplingClock
from rlhf_cli.trainers.online.state import LoopState, SourceState

Sampling = tuple[Rollout | None, SourceState]
"""A batch, None if the last prompts gave none, and the source state after it."""


class Lookahead:
    """A run's batches in order, sampled `lag` iterations ahead. Use as a context manager, which stops the thread.

    With `partial_rollout`, pushes do not wait for the batch in flight.
    """

    def __init__(
        self,
        source: RolloutSource,
        engines: Engines,
        turns: ActorTurns,
        *,
        lag: int,
        total_iterations: int,
        partial_rollout: bool = False,
    ) -> None:
        self._engines = engines
        self._engine_turns = EngineTurns()
        self._source = replace(
            source,
            engines=EnginesInTurns(engines, self._engine_turns) if partial_rollout else engines,
            check_wanted=turns.check_wanted,
        )
        self._turns = turns
        self._lag = lag
        self._partial_rollout = partial_rollout
        self._total_iterations = total_iterations
        # One worker: batches must be sampled in order, because each starts from the source state that the previous one
        # left.
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="sampling")
        self._flights: deque[Future[Sampling]] = deque()  # in flight, or finished and not yet taken
        self._clock = SamplingClock()
        self._failure: BaseException | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *failure: object) -> None:
        self._thread.shutdown(wait=self._end())

    def is_used_up(self, state: LoopState) -> bool:
        """Return whether no data remains. Known in advance only with dynamic sampling."""
        return not (state.ahead or self._flights) and self._source.is_used_up(state.source)

    def take(self, state: LoopState, timer: PhaseTimer) -> tuple[Rollout, LoopState] | None:
        """Return the next batch and the state without it, and start sampling the batches that may start; None if no
        prompt gave a group.

        Raises:
            BaseException: the error that stopped the sampling thread.
        """
        if not self._lag:
            return self._sampled_now(state, timer)
        if self._failure is not None:
            raise self._failure
        ahead, source = tuple(state.ahead), state.source
        self._begin(source, num_trained=state.iteration)
        while not ahead and self._flights:
            with self._clock.waiting(), timer("generate"):
                self._flights[0].exception()
            ahead, source = self._with_next(ahead, source)
            if self._failure is not None:
                raise self._failure
        if not ahead:
            return None
        # Hold the actor from here until `wait`: a restarted engine must not read weights in the middle of an update.
        self._turns.take()
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
        if not self._lag:
            return state, {}
        # Release the actor before waiting: an engine restarted by the sampling thread may need it to finish its batch.
        self._turns.give(version)
        if not self._partial_rollout:
            with self._clock.waiting(), timer("generate"):
                for flight in self._flights:
                    flight.exception()
        ahead, source = tuple(state.ahead), state.source
        while self._flights and self._flights[0].done():
            ahead, source = self._with_next(ahead, source)
        return replace(state, ahead=ahead, source=source), self._clock.metrics()

    @contextmanager
    def engines(self, timer: PhaseTimer) -> Iterator[None]:
        """Block the sampling thread from the engines while weights are pushed."""
        if not self._partial_rollout:
            yield
            return
        with timer("transfer"), self._engine_turns.push():  # waits for the current look
            yield

    def rest(self) -> None:
        """Wait for the batch in flight, and start no other until the next `take`, so that the engines are idle.

        A sampling error is raised by the next `take`.
        """
        self._flights = deque(flight for flight in self._flights if not flight.cancel())
        with self._clock.waiting():
            failures = [flight.exception() for flight in self._flights]
        self._failure = self._failure or next(filter(None, failures), None)
        if any(failures):
            self._give_up_flights()

    def leave(self) -> None:
        """Stop sampling, even during a round, and release the GPUs."""
        if self._end():
            self._engines.sleep()

    def _sampled_now(self, state: LoopState, timer: PhaseTimer) -> tuple[Rollout, LoopState] | None:
        if not self._has_more(state.source):
            return None
        rollout, source = self._source.sample(state.source, timer)
        return None if rollout is None else (rollout, replace(state, ahead=(), source=source))

    def _has_more(self, source: SourceState) -> bool:
        return source.iteration < self._total_iterations and not self._source.is_used_up(source)

    def _begin(self, source: SourceState, *, num_trained: int) -> None:
        """Start the batches allowed after `num_trained` iterations. Each continues from the previous batch's source
        state.
        """
        first = source.iteration + len(self._flights)
        for _ in range(first, min(num_trained + 1 + self._lag, self._total_iterations)):
            after = self._flights[-1] if self._flights else source
            self._flights.append(self._thread.submit(self._sample, after))

    def _sample(self, after: Future[Sampling] | SourceState) -> Sampling:
        # A failed batch raises its error again here, so that later batches fail instead of using a wrong state.
        source = after if isinstance(after, SourceState) else after.result()[1]
        with self._clock.sampling():
            return self._source.sample(source, PhaseTimer()) if self._has_more(source) else (None, source)

    def _with_next(self, ahead: tuple[Rollout, ...], source: SourceState) -> tuple[tuple[Rollout, ...], SourceState]:
        """Add the next finished batch. Returns the batches, and the source state after the last one."""
        flight = self._flights.popleft()
        self._failure = flight.exception()
        if self._failure is not None:
            self._give_up_flights()
            return ahead, source
        rollout, source = flight.result()
        return ahead if rollout is None else (*ahead, rollout), source

    def _end(self) -> bool:
        """Stop sampling. Returns whether it has stopped."""
        # Cancel queued batches first, so that the thread does not start the next one.
        self._flights = deque(flight for flight in self._flights if not flight.cancel())
        self._turns.end()
        # `cancel` fails for a running batch, which `end` above has asked to stop.
        if self._flights:
            # Continue after the timeout: a stuck engine must not block saving.
            with suppress(TimeoutError):
                self._flights[-1].exception(END_SECONDS)
        return all(flight.done() for flight in self._flights)

    def _give_up_flights(self) -> None:
        """Leave the engines idle after an error, because the next push requires them."""
        for flight in self._flights:
            flight.exception()  # each fails with the previous one's error
        self._flights.clear()
        if isinstance(self._failure, ProcessDied) or not self._engines.is_generating:
            return
        self._engines.cut(0)
        while self._engines.is_generating:
            self._engines.collect()
