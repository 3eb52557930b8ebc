"""Lock for the engines when weights are pushed during sampling.

Engines generate asynchronously. The sampling thread uses them briefly to start batches and collect responses; the
training thread pushes between two such uses.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Condition

from rlhf_cli.data.rollouts import Generation, GenerationRequest, SamplingParams
from rlhf_cli.trainers.online.interfaces import SamplingEngines


class EngineTurns:
    """Engine lock. Pushes have priority; otherwise a push could wait indefinitely, because looks follow in quick
    succession.
    """

    def __init__(self) -> None:
        self._change = Condition()
        self._is_used = False
        self._push_waits = False

    @contextmanager
    def look(self) -> Iterator[None]:
        """Use the engines for the block. Waits while a push is pending."""
        with self._used(lambda: not (self._is_used or self._push_waits)):
            yield

    @contextmanager
    def push(self) -> Iterator[None]:
        """Use the engines for the block, as soon as the current look ends."""
        self._announce(True)
        try:
            with self._used(lambda: not self._is_used):
                yield
        finally:
            self._announce(False)

    def _announce(self, waits: bool) -> None:
        with self._change:
            self._push_waits = waits
            # Wake all waiting threads: the one that may continue is not known here.
            self._change.notify_all()

    @contextmanager
    def _used(self, is_free: Callable[[], bool]) -> Iterator[None]:
        with self._change:
            self._change.wait_for(is_free)
            self._is_used = True
        # The block runs without holding the condition's lock, so that `push` can announce itself during a look.
        try:
            yield
        finally:
            with self._change:
                self._is_used = False
                self._change.notify_all()


class EnginesInTurns:
    """Engines for the sampling thread. Calls are short because they have time limits."""

    def __init__(self, engines: SamplingEngines, turns: EngineTurns) -> None:
        self._engines = engines
        self._turns = turns

    def begin(self, requests: list[GenerationRequest], sampling: SamplingParams) -> None:
        """Start a batch."""
        with self._turns.look():
            self._engines.begin(requests, sampling)

    @property
    def is_generating(self) -> bool:
        """Whether responses in the batch are pending."""
        with self._turns.look():  # during a push, a batch may have no pending call
            return self._engines.is_generating

    def collect(self, timeout: float | None = None) -> list[tuple[int, Generation]]:
        """Return finished responses with request numbers."""
        with self._turns.look():
            return self._engines.collect(timeout)

    def cut(self, max_tokens: int) -> None:
        """Drop responses that exceed `max_tokens`."""
        with self._turns.look():
            self._engines.cut(max_tokens)

    def wake_cache(self) -> None:
        """Prepare to generate."""
        with self._turns.look():
            self._engines.wake_cache()

    def sleep(self) -> None:
        """Release the GPUs."""
        with self._turns.look():
            self._engines.sleep()
