"""Lock for the actor, shared by the training thread and the sampling thread."""

from collections.abc import Iterator
from contextlib import contextmanager
from threading import Lock

from rlhf_cli.errors import ProcessDied

END_SECONDS = 30.0
"""How long the end of a run waits for the sampling thread. A thread that is stuck longer, such as on a lost node's
engine, ends when the roles stop.
"""


class NotWanted(Exception):
    """Ends sampling of a batch that is no longer needed because the run ends."""


class ActorTurns:
    """Actor lock.

    The training thread holds it during training. When the sampling thread restarts an engine, the engine needs the
    actor's weights, so it waits until no update is in progress.
    """

    def __init__(self) -> None:
        # A plain lock, not a context manager: training takes it in `Lookahead.take` and gives it back in
        # `Lookahead.wait`.
        self._lock = Lock()
        self._version: int | None = None
        self._is_taken = False
        self._is_over = False

    def take(self) -> None:
        """Acquire the actor."""
        # Acquire first: `_is_taken` must be True only while this thread holds the lock, since `end` may release it.
        self._lock.acquire()
        self._is_taken = True

    def give(self, version: int) -> None:
        """Release the actor, and set the version of its weights."""
        # Set the version before releasing: a waiting `borrowed` reads it immediately.
        self._version = version
        self._leave()

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Hold the actor for the block. Its weights must be the same at the end.

        Raises:
            ProcessDied: the run is ending, and a restarted engine does not release the actor.
        """
        # Without a timeout, a checkpoint at the end of a failed run could wait forever for an engine that never
        # replies.
        if not self._lock.acquire(timeout=END_SECONDS if self._is_over else -1):
            raise ProcessDied("a restarted rollout engine does not receive the actor's weights")
        self._is_taken = True
        try:
            yield
        finally:
            if self._is_taken:  # `end` may have released it meanwhile
                self._leave()

    def end(self) -> None:
        """Stop sampling soon, even while it waits for the actor."""
        # Set the flag before releasing the lock: a waiting `borrowed` must see it and raise.
        self._is_over = True
        if self._is_taken:
            self._leave()

    def check_wanted(self) -> None:
        """Raise NotWanted after the end."""
        if self._is_over:
            raise NotWanted

    @contextmanager
    def borrowed(self) -> Iterator[int | None]:
        """Hold the actor for the block. Yields the version of its weights, None if the engines have the same version.

        Raises:
            NotWanted: the run has ended.
        """
        with self._lock:
            # The run may have ended while this thread waited for the lock.
            self.check_wanted()
            yield self._version

    def _leave(self) -> None:
        self._is_taken = False
        self._lock.release()
