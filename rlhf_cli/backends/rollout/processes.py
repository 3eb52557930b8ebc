"""Finds and kills child processes of a rollout engine.

This is the last resort, after the engine's shutdown has failed or the owner was killed.
"""

import os
import threading
import time

import psutil

OWNER_VARIABLE = "RLHF_ROLLOUT_OWNER"
_POLL_SECONDS = 1.0


def process_tree(pid: int) -> list[psutil.Process]:
    """List all live descendants of a process, except Python's resource tracker."""
    # The resource tracker exits with its parent and removes leaked shared memory. Killing it would leak that memory.
    return [child for child in psutil.Process(pid).children(recursive=True) if not _is_resource_tracker(child)]


def _is_resource_tracker(process: psutil.Process) -> bool:
    try:
        return any("resource_tracker" in argument for argument in process.cmdline())
    except psutil.Error:
        # The process has already exited, so there is nothing to kill.
        return True


def end_processes(processes: list[psutil.Process], *, patience: float = 5.0) -> None:
    """Wait up to `patience` seconds for the processes to exit, then kill the remaining ones."""
    _, left = psutil.wait_procs(processes, timeout=patience)
    for process in left:
        # `is_running` also compares the start time, so a process with a reused ID is not killed.
        if process.pid != os.getpid() and process.is_running():
            process.kill()
    psutil.wait_procs(left, timeout=patience)


def end_with_owner() -> threading.Thread | None:
    """Kill this process when the process in OWNER_VARIABLE exits. Returns the watching thread, or None if it is unset.

    Call it in vLLM's workers. A worker's parent is the engine core, or the owner if the worker runs inside the core.
    """
    # Otherwise vLLM's processes outlive a killed owner, because the engine core waits for requests forever.
    owner = os.environ.get(OWNER_VARIABLE)
    if owner is None:
        return None
    thread = threading.Thread(target=_end_after, args=(int(owner), os.getppid()), name="owner-watch", daemon=True)
    thread.start()
    return thread


def _end_after(owner: int, parent: int) -> None:
    try:
        process = psutil.Process(owner)
        while process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
            time.sleep(_POLL_SECONDS)
    except psutil.NoSuchProcess:
        pass
    # The engine core imports none of our code, so the worker must kill it. If the parent ID changed, the core is gone.
    if parent != owner and os.getppid() == parent:
        psutil.Process(parent).kill()
    psutil.Process().kill()
