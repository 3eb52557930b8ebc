"""An asyncio event loop on a background thread, so that I/O continues while the driver works."""

import asyncio
import threading
from collections.abc import Callable, Coroutine
from typing import TypeVar, TypeVarTuple

_Result = TypeVar("_Result")
_Arguments = TypeVarTuple("_Arguments")


class LoopThread:
    """Background thread that runs an event loop until `end`. Its methods are for other threads.

    `on_defect` gets exceptions of callbacks, which asyncio would only log. It is called in the loop.
    """

    def __init__(self, name: str, *, on_defect: Callable[[BaseException], object] | None = None) -> None:
        self.loop = asyncio.new_event_loop()
        if on_defect is not None:
            self.loop.set_exception_handler(
                lambda _, context: on_defect(context.get("exception") or RuntimeError(context["message"]))
            )
        self._thread = threading.Thread(target=self.loop.run_forever, name=name, daemon=True)
        self._thread.start()

    @property
    def has_ended(self) -> bool:
        """Whether the thread has exited."""
        return not self._thread.is_alive()

    def call_soon(self, function: Callable[[*_Arguments], object], *arguments: *_Arguments) -> None:
        """Schedule a function on the loop. Never blocks."""
        self.loop.call_soon_threadsafe(function, *arguments)

    def run(self, work: Coroutine[object, object, _Result]) -> _Result:
        """Run a coroutine on the loop and return the result. Blocks the calling thread."""
        future = asyncio.run_coroutine_threadsafe(work, self.loop)
        try:
            return future.result()
        # Ctrl-C interrupts only the wait: without the cancel, the coroutine would continue.
        except BaseException:
            future.cancel()
            raise

    async def ask(self, work: Coroutine[object, object, _Result]) -> _Result:
        """Run a coroutine on the loop and return the result. Awaited in another loop, whose cancellation cancels it."""
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, self.loop))

    def end(self, last: Callable[[], Coroutine[object, object, object]]) -> None:
        """Run a final coroutine, then stop the loop and join the thread. No-op if already stopped.

        Unfinished tasks are not awaited. If the coroutine raises, the error propagates and the loop continues.
        """
        if not self.has_ended:
            self.run(last())
            self.loop.call_soon_threadsafe(self.loop.stop)
            self._thread.join()
        self.loop.close()
