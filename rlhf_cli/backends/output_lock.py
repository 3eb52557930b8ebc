"""A lock on a run's output folder: two runs that write into one folder would mix their files and checkpoints."""

import fcntl
import json
import logging
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from rlhf_cli.errors import UsageError

LOCK_FILE = ".lock"

logger = logging.getLogger(__name__)


@contextmanager
def output_lock(folder: Path) -> Iterator[None]:
    """Hold the folder, which is made if it is missing, until the block ends or this process dies.

    The kernel releases the lock when the process ends, however it ends. The file stays, because a process may just be
    opening it; only a folder that was made for a run that is refused goes again.

    Raises:
        UsageError: another run holds the folder, or the folder cannot be made.
    """
    is_new = _make(folder)
    try:
        with _held(folder):
            yield
    except UsageError:
        if is_new:
            (folder / LOCK_FILE).unlink(missing_ok=True)
            with suppress(OSError):  # something was written
                folder.rmdir()
        raise


def _make(folder: Path) -> bool:
    """Make the folder; return whether it was missing."""
    try:
        folder.mkdir(parents=True)
    except FileExistsError:
        if folder.is_dir():
            return False
        raise UsageError(f"--output: {folder} is a file, a folder is needed") from None
    except OSError as error:
        raise UsageError(f"--output {folder} cannot be made: {(error.strerror or str(error)).lower()}") from None
    return True


@contextmanager
def _held(folder: Path) -> Iterator[None]:
    with (folder / LOCK_FILE).open("a+", encoding="utf-8") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UsageError(f"--output {folder} is in use by another run ({_holder(folder)})") from None
        except OSError as error:  # some network file systems know no locks
            logger.warning("%s cannot be locked (%s): do not start two runs with this --output", folder, error.strerror)
        file.truncate(0)
        file.write(json.dumps({"pid": os.getpid(), "host": socket.gethostname()}))
        file.flush()
        yield


def _holder(folder: Path) -> str:
    """Return who wrote the lock file, for people."""
    try:
        holder = json.loads((folder / LOCK_FILE).read_text(encoding="utf-8"))
        return f"process {holder['pid']} on {holder['host']}"
    except (OSError, ValueError, KeyError):  # it is being written at this moment
        return "its process is not known"
