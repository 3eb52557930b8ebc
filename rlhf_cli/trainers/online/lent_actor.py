"""The actor in the thread that trains, and the loans to the thread that samples."""

import threading
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from typing import Any


class NotWanted(Exception):
    """Ends sampling of a batch that is no longer needed because the run ends."""


@dataclass(frozen=True)
class _Loan:
    """A request for the actor: granted by its owner, returned by the borrower."""

    granted: Future[None] = field(default_factory=Future)
    returned: threading.Event = field(default_factory=threading.Event)


class LentActor:
    """The actor, owned by the thread that creates this object.

    A restarted engine needs the actor's weights. The owner lends the actor only while it waits for another thread.
    Therefore the weights never change during a loan, and two threads that need each other cannot deadlock.

    `version` is that of the actor's weights, None if the engines have the same version.
    """

    def __init__(self) -> None:
        self.version: int | None = None
        self._owner = threading.get_ident()
        self._requests = SimpleQueue[_Loan | None]()  # None wakes the owner
        self._is_over = False

    def wait(self, future: Future[Any]) -> None:
        """Wait until a future is done, and lend the actor meanwhile. For the owner."""
        future.add_done_callback(lambda _: self._requests.put(None))
        # A None of an earlier wait may be left, so the future decides.
        while not future.done():
            loan = self._requests.get()
            if loan is not None:
                loan.granted.set_result(None)
                loan.returned.wait()

    @contextmanager
    def borrowed(self) -> Iterator[int | None]:
        """Use the actor for the block, in any thread. Yields the version of its weights.

        Raises:
            NotWanted: the run ends.
        """
        if threading.get_ident() == self._owner:  # it samples itself: staleness 0, or an evaluation
            yield self.version
            return
        loan = _Loan()
        self._requests.put(loan)
        if self._is_over:  # `end` may have looked before the request was there
            self.end()
        loan.granted.result()
        try:
            yield self.version
        finally:
            loan.returned.set()

    def end(self) -> None:
        """Refuse all loans from now on, including requested ones. The owner must not wait afterwards."""
        # Set the flag before emptying the queue: a later request sees it, an earlier one is in the queue.
        self._is_over = True
        while True:
            try:
                loan = self._requests.get_nowait()
            except Empty:
                return
            if loan is not None:
                loan.granted.set_exception(NotWanted())
