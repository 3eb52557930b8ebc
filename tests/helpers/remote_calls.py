"""Remote calls of rank and engine groups, for fakes of Ray and fakes that reply by method name."""

from collections.abc import Callable
from typing import Any


class _Recorder:
    """Stand-in for a worker's object, and for its `role` and `engine`."""

    def __getattr__(self, name: str) -> Any:
        return self if name in ("role", "engine") else lambda *args: (name, args)


def recorded(call: Callable[..., Any], *work: Any) -> tuple[str, tuple[Any, ...]]:
    """Return the method name and arguments of a remote call."""
    found: tuple[str, tuple[Any, ...]] = call(_Recorder(), *work)
    return found


class FakeCall:
    """A call. Response collection completes when waited for, everything else at once."""

    def __init__(self, do, *, waits):
        self._do = do
        self.result = None if waits else do()
        self._waits = waits

    def get(self):
        if self._waits:
            self.result, self._waits = self._do(), False
        if isinstance(self.result, Exception):
            raise self.result
        return self.result


class FakeRay:
    """Ray functions for such calls."""

    def get(self, call, timeout=None):
        if isinstance(call, list):
            return [self.get(one) for one in call]
        return call.get()

    def wait(self, calls, num_returns, timeout):
        return calls[:1], calls[1:]

    def kill(self, worker):
        worker.alive = False
