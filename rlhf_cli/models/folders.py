"""Folders that appear whole or not at all, and a lock for processes that make the same one."""

import contextlib
import ctypes
import fcntl
import os
import shutil
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def whole_folder(path: str | Path) -> Iterator[Path]:
    """Yield an empty folder beside `path` to fill, which becomes `path` when the block ends well."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    written = path.with_name(f".{path.name}.writing-{os.getpid()}")
    shutil.rmtree(written, ignore_errors=True)
    try:
        written.mkdir()
        yield written
        _open_to_readers(written)
        _flush_folder(written)
        _put_in_place(written, path)
    finally:
        shutil.rmtree(written, ignore_errors=True)


@contextlib.contextmanager
def one_at_a_time(path: Path) -> Iterator[None]:
    """Let one process after the other make the file or folder at `path`, so that the next ones find it made.

    If the file system knows no locks, all processes make the file at once, which is slower but as correct.
    """
    try:
        lock = path.with_suffix(".lock").open("w")
    except OSError:
        yield
        return
    with lock:
        with contextlib.suppress(OSError):
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _open_to_readers(folder: Path) -> None:
    """Make files as readable as the folder: safetensors' own are their owner's alone, regardless of the umask."""
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
    """Rename `written` to `path`; a folder already there changes places with it, so one is there at any moment."""
    if path.is_dir():
        _exchange(written, path)
    else:
        os.rename(written, path)
    _flush(path.parent)


def _exchange(first: Path, second: Path) -> None:
    at_cwd, exchange = -100, 2
    libc = ctypes.CDLL(None, use_errno=True)
    renamed = libc.renameat2(at_cwd, os.fsencode(first), at_cwd, os.fsencode(second), exchange)
    if renamed != 0:
        # Some network file systems have no exchange: two renames, with the older folder beside in between.
        aside = second.with_name(f".{second.name}.old-{os.getpid()}")
        os.rename(second, aside)
        os.rename(first, second)
        shutil.rmtree(aside)
