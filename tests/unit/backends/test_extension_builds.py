"""PyTorch's compiler finds ninja, and locks of dead processes are ignored."""

import os
import shutil
import sysconfig
import threading
import time

import pytest
import torch

from rlhf_cli.backends.training.distributed import compile_notice
from rlhf_cli.backends.training.extension_builds import (
    STALE_SECONDS,
    plain_architectures,
    remove_stale_locks,
    use_own_ninja,
)

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


@pytest.mark.parametrize("path", ["/nowhere", "/usr/bin:/bin"])
def test_ninja_is_found_where_the_environment_is_not_activated(monkeypatch, path):
    monkeypatch.setenv("PATH", path)
    for _ in range(2):
        use_own_ninja()
        assert os.environ["PATH"] == f"{sysconfig.get_path('scripts')}:{path}"
    found = shutil.which("ninja")
    assert found is not None
    assert found.startswith(sysconfig.get_path("scripts"))


@pytest.mark.parametrize(
    ("listed", "plain"),
    [("9.0a", "9.0"), ("8.0 9.0a 10.0f+PTX", "8.0 9.0 10.0+PTX"), ("8.6;12.0a", "8.6;12.0"), ("Hopper", "Hopper")],
)
def test_deepspeed_can_parse_the_list_of_architectures(monkeypatch, listed, plain):
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", listed)
    plain_architectures()
    assert os.environ["TORCH_CUDA_ARCH_LIST"] == plain


def test_cpu_ranks_that_compile_the_shared_memory_operator_say_so_until_it_is_built(monkeypatch, tmp_path):
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert compile_notice() == []
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert "compiles its shared-memory operator" in compile_notice()[0]
    built = tmp_path / "deepspeed_shm_comm" / "deepspeed_shm_comm.so"
    built.parent.mkdir()
    built.touch()
    assert compile_notice() == []
