"""Detects whether the kernel's OOM killer was active on this machine."""

from contextlib import suppress
from pathlib import Path

_VMSTAT = Path("/proc/vmstat")


def num_killed(vmstat: Path = _VMSTAT) -> int:
    """Return the number of processes killed for memory since boot; 0 if unknown."""
    with suppress(OSError):
        for line in vmstat.read_text(encoding="ascii").splitlines():
            if line.startswith("oom_kill "):
                return int(line.split()[1])
    return 0


# Read at import: only later kills can belong to this run.
_AT_START = num_killed()


def kernel_has_killed() -> bool:
    """Return whether the kernel has killed a process for memory since this process started."""
    return num_killed() > _AT_START
