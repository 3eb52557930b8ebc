"""Finds and ends the processes an engine has started.

Leaves out how an engine ends them itself: this is the last resort after it tried.
"""

import os

import psutil


def process_tree(pid: int) -> list[psutil.Process]:
    """All living descendants of a process, without Python's resource tracker.

    That one ends by itself with its parent and removes shared memory left behind; killing it leaks the memory.
    """
    return [child for child in psutil.Process(pid).children(recursive=True) if not _is_resource_tracker(child)]


def _is_resource_tracker(process: psutil.Process) -> bool:
    try:
        return any("resource_tracker" in argument for argument in process.cmdline())
    except psutil.Error:
        return True  # already gone


def end_processes(processes: list[psutil.Process], *, patience: float = 5.0) -> None:
    """Waits up to `patience` seconds for the processes to end and kills those left.

    A process is known by its start time too, so that a number given to another one meanwhile is left alone.
    """
    _, left = psutil.wait_procs(processes, timeout=patience)
    for process in left:
        if process.pid != os.getpid() and process.is_running():
            process.kill()
    psutil.wait_procs(left, timeout=patience)
