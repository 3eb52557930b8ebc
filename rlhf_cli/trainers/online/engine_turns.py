"""The turns of two threads at the engines, if weights are pushed while a batch is sampled.

Engines generate by themselves. The thread that samples uses them for a moment at a time: it begins batches and looks at
responses. The thread that trains pushes between two looks.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Condition

from rlhf_cli.data.rollouts import Generation, GenerationRequest, SamplingParams
from rlhf_cli.trainers.online.interfaces import SamplingEngines


class EngineTurns:
    """Whose turn it is. A push comes first, else it would wait for as long as looks follow each other."""

    def __init__(self) -> None:
        self._change = Condition()
        self._is_used = False
        self._push_waits = False

    @contextmanager
    def look(self) -> Iterator[None]:
        """Use the engines for the block, unless a push waits."""
        with self._used(lambda: not (self._is_used or self._push_waits)):
            yield

    @contextmanager
    def push(self) -> Iterator[None]:
        """Use the engines for the block, as soon as the look under way has ended."""
        self._announce(True)
        try:
            with self._used(lambda: not self._is_used):
                yield
        finally:
            self._announce(False)

    def _announce(self, waits: bool) -> None:
        with self._change:
            self._push_waits = waits
            self._change.notify_all()

    @contextmanager
    def _used(self, is_free: Callable[[], bool]) -> Iterator[None]:
        with self._change:
            self._change.wait_for(is_free)
            self._is_used = True
        try:
            yield
        finally:
            with self._change:
                self._is_used = False
                self._change.notify_all()


class EnginesInTurns:
    """Engines as the thread that samples uses them; its looks have time limits."""

    def __init__(self, engines: SamplingEngines, turns: EngineTurns) -> None:
        self._engines = engines
        self._turns = turns

    def begin(self, requests: list[GenerationRequest], sampling: SamplingParams) -> None:
        """Start a batch."""
        with self._turns.look():
            self._engines.begin(requests, sampling)

    @property
    def is_generating(self) -> bool:
        """Whether responses of the batch are still to come."""
        with self._turns.look():  # within a push a batch may have no call to wait for
            return self._engines.is_generating

    def collect(self, timeout: float | None = None) -> list[tuple[int, Generation]]:
        """Return finished responses, each with the number of its request."""
        with self._turns.look():
            return self._engines.collect(timeout)

    def cut(self, max_tokens: int) -> None:
        """Give up the responses of the batch that have, or get, more than so many tokens."""
        with self._turns.look():
            self._engines.cut(max_tokens)

    def wake_cache(self) -> None:
        """Be ready to generate."""
        with self._turns.look():
            self._engines.wake_cache()

    def sleep(self) -> None:
        """Leave the accelerators to others."""
        with self._turns.look():
            self._engines.sleep()
