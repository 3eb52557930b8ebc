"""The process of one rank or one rollout engine: a Ray actor that holds an object and calls its methods.

Imports nothing heavy by itself, so that environment variables are set before torch is loaded.
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
    """Holds one object, built in its own process, and calls its methods on request."""

    def __init__(self, *, environment: dict[str, str], log_file: Path) -> None:
        os.environ |= environment
        log_to(log_file)
        self._target: object = None

    def address(self) -> tuple[str, int]:
        """Return (IP address of this node, a free port), at which the ranks of a role can meet."""
        import ray

        return ray.util.get_node_ip_address(), free_port()

    def visible_gpus(self) -> str:
        """Return CUDA_VISIBLE_DEVICES as Ray set it for this process."""
        return os.environ.get("CUDA_VISIBLE_DEVICES", "")

    def build(self, environment: dict[str, str], factory: str, *args: object) -> None:
        """Make the object this worker holds: `factory(*args)`, of a factory named as "module:name"."""
        os.environ |= environment
        self._target = _made(factory, *args)

    def call(self, function: Callable[..., object], *args: object) -> object:
        """Return `function(target, *args)` of the object that this worker holds."""
        return function(self._target, *args)


class AsyncRayWorker(RayWorker):
    """A worker whose object has coroutines; calls may overlap."""

    async def build(self, environment: dict[str, str], factory: str, *args: object) -> None:  # type: ignore[override]
        """Make the object this worker holds: `factory(*args)`, off the event loop."""
        os.environ |= environment
        self._target = await asyncio.to_thread(_made, factory, *args)

    async def call(self, function: Callable[..., Any], *args: object) -> object:
        """Await `function(target, *args)`, a coroutine of the object that this worker holds."""
        return await function(self._target, *args)


def _made(factory: str, *args: object) -> object:
    rest_collector()
    made = resolve_name(factory)(*args)
    resume_collector()
    return made


def log_to(path: Path) -> None:
    """Send the output of this process and its children to a file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    sys.stdout.flush()
    sys.stderr.flush()
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)
    faulthandler.enable(2)
