"""Errors of rollout engines as the driver reports them."""

from typing import Any

import ray
from ray.exceptions import RayTaskError

from rlhf_cli.backends.cluster.placement import ENGINE
from rlhf_cli.backends.cluster.ray_cluster import PROCESS_DEATHS, death_reason
from rlhf_cli.errors import OutOfMemory, ProcessDied, RunError, Shortage, full_memory, one_line


def reason_of(error: Exception) -> str | Shortage:
    """Shorten Ray's error to one line. The full text is a traceback through several processes."""
    return death_reason(error.cause if isinstance(error, RayTaskError) else error, ENGINE)


def cause_of(error: RayTaskError) -> Exception:
    """Return the engine's error without Ray's traceback."""
    cause = error.cause
    if not isinstance(cause, RunError) and (kind := full_memory(cause)) is not None:
        return OutOfMemory(Shortage(kind, "in a rollout engine", role=ENGINE, detail=one_line(cause)))
    # UsageError and RunError are a ValueError and a RuntimeError.
    return cause if isinstance(cause, ValueError | RuntimeError) else error


def get_all(calls: list[object]) -> list[Any]:
    """Return the results of Ray calls to engines. Raises ProcessDied, or the engine's error."""
    try:
        return list(ray.get(calls))
    except RayTaskError as error:
        raise cause_of(error) from error
    except PROCESS_DEATHS as error:
        raise ProcessDied("a rollout engine died (", reason_of(error), ")") from error
