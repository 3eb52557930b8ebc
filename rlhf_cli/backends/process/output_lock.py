"""Lock for a run's output folder, so that two runs never mix files and checkpoints."""

import errno
import fcntl
import json
import logging
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import psutil

from rlhf_cli.errors import UsageError

_LOCK_FILE = ".lock"
_CLOCK_SECONDS = 2.0
"""Precision of start times of processes, which the kernel counts from the boot."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Holder:
    """The process that a lock file names, and when it locked the folder, in seconds since the epoch."""

    pid: int
    host: str
    since: float

    @property
    def is_here(self) -> bool:
        """Whether the process belongs to this machine."""
        return self.host == socket.gethostname()

    @property
    def is_alive(self) -> bool:
        """Whether the process is running on this machine."""
        try:
            process = psutil.Process(self.pid)
            # A later process may have the same number.
            is_same = process.create_time() <= self.since + _CLOCK_SECONDS
            return self.is_here and is_same and process.status() != psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return False


def lock_holder(folder: Path) -> Holder | None:
    """Return the process that uses the folder or was killed while it did. None if all have released it."""
    return _holder(folder / _LOCK_FILE)


@contextmanager
def output_lock(folder: Path, *, flag: str = "--output") -> Iterator[None]:
    """Lock the folder until the block ends or this process dies. Creates the folder if it is missing.

    The kernel releases the lock whenever the process ends. If locking fails, a newly created folder is removed.

    Args:
        folder: the output folder.
        flag: name of the flag that sets the folder.

    Raises:
        UsageError: another run uses the folder, or the folder cannot be created.
    """
    # The lock file is never removed from a used folder: another process may be opening it, and would then lock a
    # deleted file.
    is_new = _make(folder, flag)
    try:
        with _held(folder / _LOCK_FILE, folder, flag=flag):
            yield
    except UsageError:
        if is_new:
            _remove_empty(folder)
        raise


@contextmanager
def model_lock(folder: Path, *, flag: str) -> Iterator[None]:
    """Lock a folder that will be replaced. The lock file is next to the folder; a missing parent is created.

    Args:
        folder: the folder to replace.
        flag: name of the flag that sets the folder.

    Raises:
        UsageError: another run uses the folder, or the parent cannot be created.
    """
    # Different paths to the same folder must use the same lock.
    folder = folder.resolve()
    _make(folder.parent, flag)
    with _held(folder.with_name(f".{folder.name}{_LOCK_FILE}"), folder, flag=flag):
        yield


@contextmanager
def new_output(folder: Path) -> Iterator[None]:
    """Lock a new folder that the block fills. If the block fails, an empty folder is removed.

    Raises:
        UsageError: the folder already exists, or another command is creating it.
    """
    require_new(folder)
    with output_lock(folder):
        # Check again, because another command may have created it before the lock was acquired.
        require_new(folder)
        try:
            yield
        except BaseException:
            _remove_empty(folder)
            raise


def check_folder_can_be_made(folder: Path, *, flag: str) -> None:
    """Raise UsageError if the folder does not exist and cannot be created. Creates nothing."""
    existing = next(path for path in (folder.absolute(), *folder.absolute().parents) if os.path.lexists(path))
    if not existing.is_dir():
        raise UsageError(f"{flag}: {existing} is a file, not a folder")
    if not os.access(existing, os.W_OK | os.X_OK):
        raise UsageError(f"{flag} {folder} cannot be created: {os.strerror(errno.EACCES).lower()}")


def require_new(folder: Path) -> None:
    """Raise UsageError if the folder exists, unless it contains only the lock file of a killed command."""
    if folder.is_dir() and [path.name for path in folder.iterdir()] == [_LOCK_FILE]:
        return
    if os.path.lexists(folder):
        raise UsageError(f"--output {folder} already exists; choose another folder")


def _remove_empty(folder: Path) -> None:
    """Remove the folder if it contains only the lock file."""
    with suppress(OSError):
        if [path.name for path in folder.iterdir()] == [_LOCK_FILE]:
            (folder / _LOCK_FILE).unlink()
            folder.rmdir()


def _make(folder: Path, flag: str) -> bool:
    """Create the folder. Returns false if it already exists."""
    try:
        folder.mkdir(parents=True)
    except FileExistsError:
        if folder.is_dir():
            return False
        raise UsageError(f"{flag}: {folder} is a file, not a folder") from None
    except OSError as error:
        raise UsageError(f"{flag} {folder} cannot be created: {(error.strerror or str(error)).lower()}") from None
    return True


@contextmanager
def _held(lock: Path, folder: Path, *, flag: str) -> Iterator[None]:
    with _opened(lock, flag) as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UsageError(f"{flag} {folder} is in use by another run ({_described(lock)})") from None
        # Some network file systems do not support locks.
        except OSError as error:
            logger.warning("%s cannot be locked (%s): do not start two runs with this %s", folder, error.strerror, flag)
        file.truncate(0)
        file.write(json.dumps({"pid": os.getpid(), "host": socket.gethostname()}))
        file.flush()
        try:
            yield
        finally:
            # A file that still names a process is that of a killed run.
            file.truncate(0)


def _opened(lock: Path, flag: str) -> IO[str]:
    """Open the lock file. Raises UsageError if the folder is not writable."""
    # Mode "a+" does not truncate: until the lock is acquired, the content belongs to another run.
    try:
        return lock.open("a+", encoding="utf-8")
    except OSError as error:
        raise UsageError(f"{flag}: {lock} cannot be written: {(error.strerror or str(error)).lower()}") from None


def _described(lock: Path) -> str:
    holder = _holder(lock)
    # The other process may be writing the file at this moment.
    return "unknown process" if holder is None else f"process {holder.pid} on {holder.host}"


def _holder(lock: Path) -> Holder | None:
    try:
        named = json.loads(lock.read_text(encoding="utf-8"))
        return Holder(int(named["pid"]), str(named["host"]), lock.stat().st_mtime)
    except (OSError, ValueError, KeyError, TypeError):
        return None
