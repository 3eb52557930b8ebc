"""The calls that groups of ranks and engines send, for fakes that answer by the name of the method."""

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
