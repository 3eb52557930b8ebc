"""Finds and ends the processes an engine has started.

Leaves out how an engine ends them itself: this is the last resort after it tried, or after its owner was killed.
"""

import os
import threading
import time

import psutil

OWNER_VARIABLE = "RLHF_ROLLOUT_OWNER"
_LOOK_SECONDS = 1.0


def process_tree(pid: int) -> list[psutil.Process]:
    """Return all living descendants of a process, without Python's resource tracker.

    That one ends by itself with its parent and removes shared memory left behind; killing it leaks the memory.
    """
    return [child for child in psutil.Process(pid).children(recursive=True) if not _is_resource_tracker(child)]


def _is_resource_tracker(process: psutil.Process) -> bool:
    try:
        return any("resource_tracker" in argument for argument in process.cmdline())
    except psutil.Error:
        return True  # already gone


def end_processes(processes: list[psutil.Process], *, patience: float = 5.0) -> None:
    """Wait up to `patience` seconds for the processes to end, then kill those left.

    A process is known by its start time too, so that a number given to another one meanwhile is left alone.
    """
    _, left = psutil.wait_procs(processes, timeout=patience)
    for process in left:
        if process.pid != os.getpid() and process.is_running():
            process.kill()
    psutil.wait_procs(left, timeout=patience)


def end_with_owner() -> threading.Thread | None:
    """End this process when the process named in OWNER_VARIABLE has ended; return the watching thread, None without a
    name.

    vLLM's processes outlive an owner that was killed: its engine core waits for requests for good. Called in the
    workers, whose parent is that engine core (or the owner itself, if the worker runs inside the core).
    """
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
            time.sleep(_LOOK_SECONDS)
    except psutil.NoSuchProcess:
        pass
    if parent != owner and os.getppid() == parent:
        psutil.Process(parent).kill()
    psutil.Process().kill()
