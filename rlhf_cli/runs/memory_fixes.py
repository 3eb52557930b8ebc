"""Adds the fix that a run's plan finds to its out-of-memory errors."""

import gc
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace

from rlhf_cli.backends.process.killed import is_shm_full
from rlhf_cli.config.base import CommandConfig
from rlhf_cli.config.plan import PlanConfig
from rlhf_cli.errors import OutOfMemory, RunError, Shortage, full_memory, one_line

_LOST_RANK = "by peer"
"""Part of Gloo's messages when a rank is gone: connection reset, or closed, by peer."""


@contextmanager
def with_memory_fixes(config: CommandConfig, node_gpus: Sequence[int] = ()) -> Iterator[None]:
    """Name flags that help in out-of-memory errors of the block, and convert those of libraries to OutOfMemory.

    Args:
        node_gpus: GPUs per node of a cluster, by default this machine's.
    """
    try:
        yield
    except RunError as error:
        _explain(error, config, node_gpus)
        raise
    except Exception as error:
        found = _shortage(error)
        if found is None:
            raise
        shortage = OutOfMemory(found)
        _explain(shortage, config, node_gpus)
        raise shortage from error


def _shortage(error: Exception) -> Shortage | None:
    """Return what memory was full, None for other errors."""
    kind = full_memory(error)
    if kind is not None:
        return Shortage(kind, detail=one_line(error))
    # SIGBUS leaves no message: the ranks that are left only see a closed connection.
    if _LOST_RANK in str(error) and is_shm_full():
        return Shortage("space in /dev/shm", doubt="the connection to a rank was lost while /dev/shm was full")
    return None


def _explain(error: RunError, config: CommandConfig, node_gpus: Sequence[int]) -> None:
    shortage = error.shortage
    if shortage is None or shortage.from_plan:
        return
    _release(error)
    # A plan is not possible for every run, and host memory may still be full. The error keeps its own fix then.
    with suppress(Exception):
        # Imported here: no other run needs it.
        from rlhf_cli.commands.plan import PLANNED
        from rlhf_cli.planning.fixes import explained
        from rlhf_cli.planning.hardware import hardware_of
        from rlhf_cli.runs.plan import planner_of

        if config.command not in PLANNED:
            return
        plan = PlanConfig()
        hardware = hardware_of(plan)
        if node_gpus:
            hardware = replace(hardware, num_gpus=max(node_gpus), num_nodes=len(node_gpus))
        if hardware.is_cpu:
            # Processes may share cores.
            hardware = replace(hardware, num_gpus=max(hardware.num_gpus, config.setting("num_processes") or 1))
        error.explain(*explained(shortage, config, hardware, planner_of(config, plan)))


def _release(error: BaseException) -> None:
    """Free the memory that the local variables of failed functions hold, so that a plan has room."""
    part: BaseException | None = error
    while part is not None:
        traceback.clear_frames(part.__traceback__)
        part = part.__cause__ or part.__context__
    gc.collect()
