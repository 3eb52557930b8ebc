"""Process of a rank or rollout engine: a Ray actor that builds an object and runs functions on it.

No heavy imports at module level, because environment variables must be set before torch is loaded.
"""

import asyncio
import faulthandler
import os
import sys
from collections.abc import Callable
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

from rlhf_cli.backends.training.distributed_env import free_port
from rlhf_cli.environment import rest_collector, resume_collector


class RayWorker:
    """Builds an object in its process, and runs functions on it."""

    def __init__(self, *, environment: dict[str, str], log_file: Path) -> None:
        os.environ |= environment
        _log_to(log_file)
        self._target: object = None

    def address(self) -> tuple[str, int]:
        """Return (IP address of this node, a free port) for the rendezvous of the role's ranks."""
        import ray

        return ray.util.get_node_ip_address(), free_port()

    def visible_gpus(self) -> str:
        """Return CUDA_VISIBLE_DEVICES as Ray set it for this process."""
        return os.environ.get("CUDA_VISIBLE_DEVICES", "")

    def build(self, environment: dict[str, str], factory: str, *args: object) -> None:
        """Build the object with `factory(*args)`. The factory is named as "module:name"."""
        os.environ |= environment
        self._target = _made(factory, *args)

    def call(self, function: Callable[..., object], *args: object) -> object:
        """Return `function(object, *args)`."""
        return function(self._target, *args)


class AsyncRayWorker(RayWorker):
    """A worker for an object with coroutines. Calls may overlap."""

    async def build(self, environment: dict[str, str], factory: str, *args: object) -> None:  # type: ignore[override]
        """Build the object with `factory(*args)`."""
        os.environ |= environment
        # In a thread, because loading may take minutes and would block the event loop.
        self._target = await asyncio.to_thread(_made, factory, *args)

    async def call(self, function: Callable[..., Any], *args: object) -> object:
        """Await `function(object, *args)`."""
        return await function(self._target, *args)


def _made(factory: str, *args: object) -> object:
    rest_collector()
    made = resolve_name(factory)(*args)
    resume_collector()
    return made


def _log_to(path: Path) -> None:
    """Redirect the output of this process and its children to a file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    # Append: a restarted process continues the log, and children write to it at the same time.
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    sys.stdout.flush()
    sys.stderr.flush()
    # The descriptors, not `sys.stdout`: C libraries and child processes write to them too.
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)
    # A crash in C code leaves a Python traceback in the log.
    faulthandler.enable(2)
