"""Detects whether the kernel has killed a process for memory, here or in this container, and the memory limits."""

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

_VMSTAT = "proc/vmstat"
_CGROUPS = "sys/fs/cgroup"
_KILLS = ("memory.events", "memory.oom_control")
"""Files with a line "oom_kill COUNT", in cgroup version 2 and 1."""
_LIMITS = ("memory.max", "memory.limit_in_bytes")


def num_killed(root: Path = Path("/")) -> int:
    """Return the number of processes killed for memory in this container, or on the machine since boot; 0 if unknown.

    Args:
        root: folder that contains `proc` and `sys`.
    """
    # The machine's counter includes other containers.
    counters = [_counter(folder / name) for folder in _cgroups(root) for name in _KILLS]
    found = [counter for counter in counters if counter is not None]
    return sum(found) if found else _counter(root / _VMSTAT) or 0


def is_shm_full(folder: str = "/dev/shm") -> bool:
    """Return whether /dev/shm has no room for another page. A process that writes there then dies of SIGBUS."""
    with suppress(OSError):
        # Huge pages of 2 MiB may be larger than what is left.
        return os.statvfs(folder).f_bavail * os.statvfs(folder).f_frsize < 2 << 20
    return False


def total_memory() -> int:
    """Return the bytes of host memory of this machine."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def usable_memory(root: Path = Path("/")) -> int:
    """Return the bytes of host memory for this container: its smallest limit, or the size of the machine."""
    limits = [_text(folder / name).strip() for folder in _cgroups(root) for name in _LIMITS]
    # Version 2 has the text "max" without a limit, version 1 a number larger than any memory.
    return min([total_memory(), *(int(limit) for limit in limits if limit.isdigit())])


def _cgroups(root: Path) -> Iterator[Path]:
    """Yield the folders of this process's memory cgroup: the container's root, and below it the process's own."""
    for line in _text(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers in ("", "memory"):
            mounted = root / _CGROUPS / controllers
            yield from dict.fromkeys([mounted, mounted / path.lstrip("/")])


def _counter(file: Path) -> int | None:
    """Return the file's count of killed processes, or None if it has none."""
    words = (line.split() for line in _text(file).splitlines())
    return next((int(word[1]) for word in words if word[0] == "oom_kill"), None)


def _text(file: Path) -> str:
    """Return the file's text, "" if it cannot be read."""
    with suppress(OSError):
        return file.read_text(encoding="ascii")
    return ""


# Read at import: only later kills can belong to this run.
_AT_START = num_killed()


def kernel_has_killed() -> bool:
    """Return whether the kernel has killed a process for memory since this process started."""
    return num_killed() > _AT_START
