"""The calls that groups of ranks and engines send, for fakes of Ray and fakes that answer by the name of the method."""

from collections.abc import Callable
from typing import Any


class _Recorder:
    """Stands for the object that a worker holds, and for its parts `role` and `engine`."""

    def __getattr__(self, name: str) -> Any:
        return self if name in ("role", "engine") else lambda *args: (name, args)


def recorded(call: Callable[..., Any], *work: Any) -> tuple[str, tuple[Any, ...]]:
    """Return the name and the arguments of the method that a remote call calls."""
    found: tuple[str, tuple[Any, ...]] = call(_Recorder(), *work)
    return found


class FakeCall:
    """A call; what collects responses is done when it is waited for, all else at once."""

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
    """The functions of Ray for such calls."""

    def get(self, call, timeout=None):
        if isinstance(call, list):
            return [self.get(one) for one in call]
        return call.get()

    def wait(self, calls, num_returns, timeout):
        return calls[:1], calls[1:]

    def kill(self, worker):
        worker.alive = False
