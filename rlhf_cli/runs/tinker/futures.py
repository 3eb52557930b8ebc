"""Results of requests that clients retrieve later, and the order of the requests to a model."""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from rlhf_cli.errors import RunError, UsageError, full_memory

logger = logging.getLogger(__name__)

_KEPT_SECONDS = 300.0
"""Time for which a retrieved result is kept: a client whose connection broke asks again."""


@dataclass(frozen=True)
class Result:
    """Result of a request: protocol buffers or JSON."""

    content: bytes | dict[str, object]


Work = Callable[[], Awaitable[Result]]


class Futures:
    """Requests in progress and their results, by request ID."""

    def __init__(self) -> None:
        self._tasks: dict[str, asyncio.Task[Result]] = {}

    def start(self, request_id: str, work: Work) -> None:
        """Start the work, unless a request with this ID has been received before."""
        # Clients repeat a request if its answer was lost.
        if request_id not in self._tasks:
            self._tasks[request_id] = asyncio.create_task(_guarded(request_id, work))

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._tasks

    async def result(self, request_id: str, *, seconds: float) -> Result | None:
        """Return the result, None if it takes longer. Raises KeyError for an unknown request."""
        task = self._tasks[request_id]
        done, _ = await asyncio.wait({task}, timeout=seconds)
        if not done:
            return None
        asyncio.get_running_loop().call_later(_KEPT_SECONDS, self._tasks.pop, request_id, None)
        return failed("the session has finished", "user") if task.cancelled() else task.result()

    def drop(self, prefix: str) -> None:
        """Cancel and forget the requests whose IDs start like this."""
        for request_id in [request_id for request_id in self._tasks if request_id.startswith(prefix)]:
            self._tasks.pop(request_id).cancel()


async def _guarded(request_id: str, work: Work) -> Result:
    """Turn errors into the API's error results."""
    try:
        return await work()
    except UsageError as error:
        return failed(str(error), "user")
    except RunError as error:
        logger.error("%s: %s", request_id, error)
        return failed(str(error), "server")
    except Exception as error:
        if (kind := full_memory(error)) is not None:
            return failed(f"out of {kind}: lower --max_tokens_per_gpu, or set --gradient_checkpointing", "server")
        logger.exception("%s failed", request_id)
        return failed(f"unexpected {type(error).__name__}: {str(error)[:300]}", "server")


def failed(error: str, category: str) -> Result:
    """Return the API's result of a failed request."""
    return Result({"error": error, "category": category})


class Turns:
    """Admits the requests to a model in the order of their numbers, which start at 1."""

    def __init__(self) -> None:
        self._next = 1
        self._waiting: dict[int, asyncio.Event] = {}

    async def take(self, number: int | None) -> None:
        """Wait for the turn of a request. Call `leave` when its work is queued. None is next."""
        number = self._next if number is None else number
        if number < self._next:
            raise UsageError(f"request {number} of this model has been answered before")
        while number > self._next:
            await self._waiting.setdefault(number, asyncio.Event()).wait()

    def leave(self) -> None:
        """Admit the next request."""
        self._next += 1
        if (waiting := self._waiting.pop(self._next, None)) is not None:
            waiting.set()
