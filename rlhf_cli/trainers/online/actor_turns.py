"""The turns of two threads at the actor: the thread that trains, and the thread that samples meanwhile."""

from collections.abc import Iterator
from contextlib import contextmanager
from threading import Lock

from rlhf_cli.errors import ProcessDied

END_SECONDS = 30.0
"""How long the end of a run waits for the thread that samples. A thread that waits longer, as for an engine of a node
that was lost, ends when the roles end.
"""


class NotWanted(Exception):
    """Ends the sampling of a batch that nobody will train on, because the run ends."""


class ActorTurns:
    """Whose turn it is.

    The thread that trains holds the actor while it trains. An engine that the thread that samples starts again needs
    the actor's weights, and waits until they are whole.
    """

    def __init__(self) -> None:
        self._lock = Lock()
        self._version: int | None = None
        self._is_taken = False
        self._is_over = False

    def take(self) -> None:
        """Hold the actor from now on."""
        self._lock.acquire()
        self._is_taken = True

    def give(self, version: int) -> None:
        """Leave the actor, whose weights have this version, to others."""
        self._version = version
        self._leave()

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Hold the actor for the block, by whose end its weights are the same.

        Raises:
            ProcessDied: the run ends, and an engine that was started again does not give the actor back.
        """
        if not self._lock.acquire(timeout=END_SECONDS if self._is_over else -1):
            raise ProcessDied("a rollout engine that was started again does not take the weights of the actor")
        self._is_taken = True
        try:
            yield
        finally:
            if self._is_taken:  # unless the run ended meanwhile
                self._leave()

    def end(self) -> None:
        """End the sampling soon, also if it waits for the actor."""
        self._is_over = True
        if self._is_taken:
            self._leave()

    def check_wanted(self) -> None:
        """Raise NotWanted after the end."""
        if self._is_over:
            raise NotWanted

    @contextmanager
    def borrowed(self) -> Iterator[int | None]:
        """Hold the actor for the block; yield the version of its weights, None if it is the engines' version.

        Raises:
            NotWanted: the run ended instead.
        """
        with self._lock:
            self.check_wanted()
            yield self._version

    def _leave(self) -> None:
        self._is_taken = False
        self._lock.release()
