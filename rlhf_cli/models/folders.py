"""Atomic folder writes, and a lock for processes that create the same folder."""

import contextlib
import ctypes
import fcntl
import os
import shutil
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def whole_folder(path: str | Path) -> Iterator[Path]:
    """Yield an empty temporary folder, which replaces `path` when the block succeeds."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    # In the same directory, because rename works only within a file system. The PID keeps processes apart.
    written = path.with_name(f".{path.name}.writing-{os.getpid()}")
    shutil.rmtree(written, ignore_errors=True)
    try:
        written.mkdir()
        yield written
        _open_to_readers(written)
        # Sync contents before the rename: after a power failure, a renamed folder could otherwise contain empty files.
        _flush_folder(written)
        _put_in_place(written, path)
    finally:
        shutil.rmtree(written, ignore_errors=True)


@contextlib.contextmanager
def one_at_a_time(path: Path) -> Iterator[None]:
    """Let one process at a time create `path`, so that later ones find it complete.

    On file systems without locks, all processes create it at once, which is slower but still correct.
    """
    try:
        lock = path.with_suffix(".lock").open("w")
    except OSError:
        yield
        return
    with lock:
        with contextlib.suppress(OSError):
            # NFS without a lock daemon raises OSError. Closing the file releases the lock, also if the process dies.
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _open_to_readers(folder: Path) -> None:
    """Give files the folder's permissions: safetensors creates files readable only by the owner, ignoring the umask."""
    mode = folder.stat().st_mode & 0o666
    for file in folder.rglob("*"):
        if file.is_file():
            file.chmod(mode)


def _flush_folder(folder: Path) -> None:
    for entry in (*(p for p in folder.rglob("*") if p.is_file()), folder):
        _flush(entry)


def _flush(entry: Path) -> None:
    descriptor = os.open(entry, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _put_in_place(written: Path, path: Path) -> None:
    """Rename `written` to `path`. An existing folder is exchanged atomically, so `path` exists at any moment."""
    if path.is_dir():
        _exchange(written, path)
    else:
        os.rename(written, path)
    # A rename is durable only after the parent directory is synced.
    _flush(path.parent)


def _exchange(first: Path, second: Path) -> None:
    # AT_FDCWD from fcntl.h and RENAME_EXCHANGE from linux/fs.h. Python has no binding for renameat2.
    at_cwd, exchange = -100, 2
    libc = ctypes.CDLL(None, use_errno=True)
    renamed = libc.renameat2(at_cwd, os.fsencode(first), at_cwd, os.fsencode(second), exchange)
    if renamed != 0:
        # Some network file systems lack RENAME_EXCHANGE: rename twice, with the old folder set aside in between.
        aside = second.with_name(f".{second.name}.old-{os.getpid()}")
        os.rename(second, aside)
        os.rename(first, second)
        shutil.rmtree(aside)
