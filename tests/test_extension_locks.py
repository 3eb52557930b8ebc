"""Locks of PyTorch's compiler: one of a live process is left alone, an old one of nobody is removed."""

import os
import threading
import time

import pytest

from rlhf_cli.backends.extension_locks import STALE_SECONDS, remove_stale_locks

OLD = time.time() - 2 * STALE_SECONDS


@pytest.fixture
def lock(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    path = tmp_path / "an_operator" / "lock"
    path.parent.mkdir()
    path.touch()
    return path


def test_an_old_lock_that_nobody_has_open_is_removed(lock):
    os.utime(lock, (OLD, OLD))
    remove_stale_locks()
    assert not lock.exists()


def test_the_lock_of_a_process_that_compiles_is_left(lock):
    os.utime(lock, (OLD, OLD))
    with lock.open():
        remove_stale_locks()
    assert lock.exists()


def test_a_young_lock_is_waited_for(lock):
    threading.Timer(0.3, lock.unlink).start()
    begin = time.monotonic()
    remove_stale_locks(poll_seconds=0.01)
    assert time.monotonic() - begin > 0.25
    assert not lock.exists()
