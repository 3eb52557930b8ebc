"""An event loop in a thread of its own: it works while the driver does something else."""

import asyncio
import threading
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar, TypeVarTuple

_Result = TypeVar("_Result")
_Arguments = TypeVarTuple("_Arguments")


class LoopThread:
    """A thread that runs an event loop, `loop`, from now on until `end`. Other threads call its methods."""

    def __init__(self, name: str) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, name=name, daemon=True)
        self._thread.start()

    @property
    def has_ended(self) -> bool:
        """Whether the thread is gone."""
        return not self._thread.is_alive()

    def call_soon(self, function: Callable[[*_Arguments], object], *arguments: *_Arguments) -> None:
        """Have the loop call a function. Returns at once."""
        self.loop.call_soon_threadsafe(function, *arguments)

    def run(self, work: Coroutine[Any, Any, _Result]) -> _Result:
        """Return the result of work in the loop, or raise its error. If the wait is interrupted, by Ctrl-C, cancel the
        work.
        """
        future = asyncio.run_coroutine_threadsafe(work, self.loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def end(self, last: Callable[[], Coroutine[Any, Any, object]]) -> None:
        """Run the last work, then end the loop and the thread; nothing happens if they have ended.

        Tasks that the last work leaves unfinished are not waited for. If it raises, the error is raised and the loop
        goes on.
        """
        if not self.has_ended:
            self.run(last())
            self.loop.call_soon_threadsafe(self.loop.stop)
            self._thread.join()
        self.loop.close()
