"""Peak host memory of a run's processes on this machine, sampled from a thread."""

import os
import threading
import time
from contextlib import suppress

import psutil

from rlhf_cli.tracking.figures import GIB

_SECONDS, _SHARE = 0.5, 0.02
"""Seconds between samples, and the fraction of a core that they may use: a sample visits the pages of each process."""


class HostMemory:
    """Largest memory of a process and its descendants since the last call of `peak`.

    A page that n of the processes map counts 1/n in each (proportional set size), so libraries, weights read from the
    same file, and object stores count once. Processes of a Ray cluster that was started before the run are no
    descendants, and are not counted.
    """

    def __init__(self, root: int) -> None:
        """`root`: process ID of the oldest process."""
        self._root = root
        self._latest = self._peak = 0.0
        self._due, self._wait = 0.0, _SECONDS
        self._lock = threading.Lock()
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="host memory", daemon=True)

    def start(self) -> None:
        """Sample regularly from now on, because memory of the middle of a step may be free again at its end."""
        self._thread.start()

    def close(self) -> None:
        """Stop sampling."""
        self._is_over.set()

    def peak(self) -> float:
        """Return the largest sample since the last call in GiB. Steps that are shorter than samples share one."""
        self._sample()
        with self._lock:
            peak, self._peak = self._peak, self._latest
        return peak

    def _watch(self) -> None:
        while not self._is_over.wait(self._wait):
            self._sample()

    def _sample(self) -> None:
        with self._lock:
            start = time.perf_counter()
            if start < self._due:
                return
            self._latest = tree_bytes(self._root) / GIB
            self._peak = max(self._peak, self._latest)
            end = time.perf_counter()
            self._wait = max(_SECONDS, (end - start) / _SHARE)
            self._due = end + self._wait / 2


def root_of_run() -> int:
    """Return the oldest process of a run on this machine: a launcher, whose children are ranks, or this process."""
    return os.getppid() if int(os.environ.get("LOCAL_SIZE", "1")) > 1 else os.getpid()


def tree_bytes(pid: int) -> int:
    """Return the memory of a process and its descendants, in bytes; 0 if it has ended."""
    with suppress(psutil.Error):
        process = psutil.Process(pid)
        return sum(_own_bytes(one) for one in (process, *process.children(recursive=True)))
    return 0


def _own_bytes(process: psutil.Process) -> int:
    """Return a process's share of memory: 0 if it has ended, without shared pages if another user's."""
    with suppress(psutil.NoSuchProcess):
        try:
            full = process.memory_full_info()
            return int(getattr(full, "pss", full.uss))
        except psutil.AccessDenied:
            plain = process.memory_info()
            # Linux only; other systems report no shared memory.
            return int(plain.rss - getattr(plain, "shared", 0))
    return 0
