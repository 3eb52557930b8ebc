"""What PyTorch needs to compile DeepSpeed's operators: ninja on PATH, and no lock that a killed process has left.

PyTorch makes a file while it compiles and waits for another's without an end. The process that compiles has the file
open; a file that nobody has open is of a killed process, or of another machine with the same home directory.
"""

import glob
import logging
import os
import time
from contextlib import suppress
from pathlib import Path

import ninja
from torch.utils.cpp_extension import get_default_build_root

STALE_SECONDS = 300.0
"""Age from which a lock that nobody here has open counts as left behind: longer than operators take to compile."""

logger = logging.getLogger(__name__)


def use_own_ninja() -> None:
    """Put the ninja that was installed with this program first on PATH.

    Where its environment is not activated there may be none, or the system's, and another version compiles all anew.
    """
    paths = os.environ.get("PATH", os.defpath).split(os.pathsep)
    if paths[0] != ninja.BIN_DIR:
        os.environ["PATH"] = os.pathsep.join([ninja.BIN_DIR, *paths])


def remove_stale_locks(*, poll_seconds: float = 0.5) -> None:
    """Wait until no lock is left whose owner is not on this machine, removing locks that are too old."""
    root = Path(os.environ.get("TORCH_EXTENSIONS_DIR") or get_default_build_root())
    for lock in [*root.glob("*/lock"), *root.glob("*/*/lock")]:
        while (age := _age(lock)) is not None and not _is_open(lock):
            if age > STALE_SECONDS:
                logger.warning("removing %s, which a process that was killed has left", lock)
                lock.unlink(missing_ok=True)
            else:
                time.sleep(poll_seconds)


def _age(lock: Path) -> float | None:
    """Return the seconds since the file was made; None if there is none."""
    with suppress(FileNotFoundError):
        return time.time() - lock.stat().st_mtime
    return None


def _is_open(lock: Path) -> bool:
    """Return whether a process of this machine has the file open."""
    wanted = str(lock.resolve())
    for descriptor in glob.iglob("/proc/[0-9]*/fd/*"):
        with suppress(OSError):  # a process that has ended, or is not ours
            if os.readlink(descriptor) == wanted:
                return True
    return False
