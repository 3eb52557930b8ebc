"""Whether the kernel has killed processes because the memory of this machine was full."""

from contextlib import suppress
from pathlib import Path

VMSTAT = Path("/proc/vmstat")


def num_killed(vmstat: Path = VMSTAT) -> int:
    """Return how many processes the kernel has killed for memory since the machine started; 0 if it is not known."""
    with suppress(OSError):
        for line in vmstat.read_text(encoding="ascii").splitlines():
            if line.startswith("oom_kill "):
                return int(line.split()[1])
    return 0


_AT_START = num_killed()


def kernel_has_killed() -> bool:
    """Return whether the kernel has killed a process for memory since this process started."""
    return num_killed() > _AT_START
