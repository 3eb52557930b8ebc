"""A lock on a run's output folder: two runs that write into one folder would mix their files and checkpoints."""

import errno
import fcntl
import json
import logging
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from rlhf_cli.errors import UsageError

LOCK_FILE = ".lock"

logger = logging.getLogger(__name__)


@contextmanager
def output_lock(folder: Path, *, flag: str = "--output") -> Iterator[None]:
    """Hold the folder, which is made if it is missing, until the block ends or this process dies.

    The kernel releases the lock when the process ends, however it ends. The file stays, because a process may just be
    opening it; only a folder that was made for a run that is refused goes again.

    Args:
        flag: the setting that names the folder.

    Raises:
        UsageError: another run holds the folder, or the folder cannot be made.
    """
    is_new = _make(folder, flag)
    try:
        with _held(folder / LOCK_FILE, folder, flag=flag):
            yield
    except UsageError:
        if is_new:
            _remove_empty(folder)
        raise


@contextmanager
def model_lock(folder: Path, *, flag: str) -> Iterator[None]:
    """Hold a folder that is replaced as a whole, by a lock beside it; its parent is made if it is missing.

    Args:
        flag: the setting that names the folder.

    Raises:
        UsageError: another run holds the folder, or its parent cannot be made.
    """
    folder = folder.resolve()  # names of one folder share a lock
    _make(folder.parent, flag)
    with _held(folder.with_name(f".{folder.name}{LOCK_FILE}"), folder, flag=flag):
        yield


@contextmanager
def new_output(folder: Path) -> Iterator[None]:
    """Hold a folder that the block makes as a whole; a block that fails leaves nothing.

    Raises:
        UsageError: the folder exists already, or another command is about to make it.
    """
    require_new(folder)
    with output_lock(folder):
        require_new(folder)  # another command may have made it since
        try:
            yield
        except BaseException:
            _remove_empty(folder)
            raise


def check_folder_can_be_made(folder: Path, *, flag: str) -> None:
    """Raise UsageError if the folder is missing and cannot be made where it is to be; nothing is touched."""
    there = next(path for path in (folder.absolute(), *folder.absolute().parents) if os.path.lexists(path))
    if not there.is_dir():
        raise UsageError(f"{flag}: {there} is a file, a folder is needed")
    if not os.access(there, os.W_OK | os.X_OK):
        raise UsageError(f"{flag} {folder} cannot be made: {os.strerror(errno.EACCES).lower()}")


def require_new(folder: Path) -> None:
    """Raise UsageError if the folder exists; a folder with the lock of a killed command alone does not count."""
    if folder.is_dir() and [path.name for path in folder.iterdir()] == [LOCK_FILE]:
        return
    if os.path.lexists(folder):
        raise UsageError(f"--output {folder} exists already; choose another folder")


def _remove_empty(folder: Path) -> None:
    """Remove the folder if there is nothing in it but its lock."""
    with suppress(OSError):
        if [path.name for path in folder.iterdir()] == [LOCK_FILE]:
            (folder / LOCK_FILE).unlink()
            folder.rmdir()


def _make(folder: Path, flag: str) -> bool:
    """Make the folder; return whether it was missing."""
    try:
        folder.mkdir(parents=True)
    except FileExistsError:
        if folder.is_dir():
            return False
        raise UsageError(f"{flag}: {folder} is a file, a folder is needed") from None
    except OSError as error:
        raise UsageError(f"{flag} {folder} cannot be made: {(error.strerror or str(error)).lower()}") from None
    return True


@contextmanager
def _held(lock: Path, folder: Path, *, flag: str) -> Iterator[None]:
    with _opened(lock, flag) as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UsageError(f"{flag} {folder} is in use by another run ({_holder(lock)})") from None
        except OSError as error:  # some network file systems know no locks
            logger.warning("%s cannot be locked (%s): do not start two runs with this %s", folder, error.strerror, flag)
        file.truncate(0)
        file.write(json.dumps({"pid": os.getpid(), "host": socket.gethostname()}))
        file.flush()
        yield


def _opened(lock: Path, flag: str) -> IO[str]:
    """Open the file of the lock. Raise UsageError if its folder cannot be written to."""
    try:
        return lock.open("a+", encoding="utf-8")
    except OSError as error:
        raise UsageError(f"{flag}: {lock} cannot be written: {(error.strerror or str(error)).lower()}") from None


def _holder(lock: Path) -> str:
    """Return who wrote the lock file, for people."""
    try:
        holder = json.loads(lock.read_text(encoding="utf-8"))
        return f"process {holder['pid']} on {holder['host']}"
    except (OSError, ValueError, KeyError):  # it is being written at this moment
        return "its process is not known"
