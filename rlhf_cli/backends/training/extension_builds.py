"""Prepares compiling DeepSpeed's operators with PyTorch: ninja on PATH, architectures, and no stale lock files.

PyTorch creates a lock file while compiling and waits forever if it already exists. The compiling process has the file
open. If no process has it open, it belongs to a killed process, or to another machine that shares the home directory.
"""

import glob
import itertools
import logging
import os
import re
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import ninja
from torch.utils.cpp_extension import get_default_build_root

# Longer than compiling an operator takes, because another machine may own the lock.
STALE_SECONDS = 300.0
"""Age at which a lock file is stale if no process on this machine has it open."""

logger = logging.getLogger(__name__)


def use_own_ninja() -> None:
    """Put the ninja from this environment first on PATH."""
    # If the environment is not activated, ninja may be missing, or the system's version would rebuild everything.
    paths = os.environ.get("PATH", os.defpath).split(os.pathsep)
    if paths[0] != ninja.BIN_DIR:
        os.environ["PATH"] = os.pathsep.join([ninja.BIN_DIR, *paths])


def plain_architectures() -> None:
    """Remove suffixes such as the "a" of 9.0a from TORCH_CUDA_ARCH_LIST, which NVIDIA's containers set."""
    # DeepSpeed parses the list as numbers, and its operators use no instruction that only exists with the suffix.
    if listed := os.environ.get("TORCH_CUDA_ARCH_LIST"):
        os.environ["TORCH_CUDA_ARCH_LIST"] = re.sub(r"(\d\.\d)[af]\b", r"\1", listed)


def remove_stale_locks(*, poll_seconds: float = 0.5) -> None:
    """Wait for lock files that no process on this machine has open, and remove stale ones."""
    for lock in list(_in_builds("lock")):
        while (age := _age(lock)) is not None and not _is_open(lock):
            if age > STALE_SECONDS:
                logger.warning("removing the stale lock file %s of a killed process", lock)
                lock.unlink(missing_ok=True)
            else:
                time.sleep(poll_seconds)


def is_built(name: str) -> bool:
    """Return whether an operator has been compiled, maybe for another version, which compiles it again."""
    return any(_in_builds(f"{name}.so"))


def _in_builds(file: str) -> Iterator[Path]:
    """Yield the files of this name in PyTorch's build folders, of all versions."""
    root = Path(os.environ.get("TORCH_EXTENSIONS_DIR") or get_default_build_root())
    return itertools.chain(root.glob(f"*/{file}"), root.glob(f"*/*/{file}"))


def _age(lock: Path) -> float | None:
    """Return the file's age in seconds, or None if it does not exist."""
    with suppress(FileNotFoundError):
        return time.time() - lock.stat().st_mtime
    return None


def _is_open(lock: Path) -> bool:
    """Return whether a process on this machine has the file open."""
    wanted = str(lock.resolve())
    for descriptor in glob.iglob("/proc/[0-9]*/fd/*"):
        # The process may have exited, or belong to another user.
        with suppress(OSError):
            if os.readlink(descriptor) == wanted:
                return True
    return False
