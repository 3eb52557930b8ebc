"""Peak host memory of a process tree, on pages that a test allocates."""

import os
import subprocess
import sys
import threading

from rlhf_cli.tracking import host_memory
from rlhf_cli.tracking.host_memory import HostMemory, root_of_run, tree_bytes

MIB = 2**20
# Holds 64 MiB of its own, and maps 64 MiB of a file that is 128 MiB in all.
CHILD = """
import mmap, sys
own = bytearray(b"x" * (64 << 20))
with open(sys.argv[1], "rb") as file:
    shared = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
    total = sum(shared[i] for i in range(0, 64 << 20, 4096))
print("ready", flush=True)
sys.stdin.read()
"""


def test_a_tree_counts_each_page_once(tmp_path):
    file = tmp_path / "weights"
    file.write_bytes(b"1" * (128 * MIB))
    before = tree_bytes(os.getpid())
    start = [sys.executable, "-S", "-c", CHILD, str(file)]
    children = [subprocess.Popen(start, stdin=subprocess.PIPE, stdout=subprocess.PIPE) for _ in range(2)]
    try:
        for child in children:
            assert child.stdout is not None
            assert child.stdout.readline() == b"ready\n"
        added = (tree_bytes(os.getpid()) - before) / MIB
    finally:
        for child in children:
            child.communicate()
    # Two times 64 of their own, 64 that both map, and 3 to 10 for an interpreter.
    assert 190 < added < 225
    assert tree_bytes(children[0].pid) == 0


def test_the_peak_is_that_since_the_last_call(monkeypatch):
    sizes, looks = [3], threading.Semaphore(0)

    def look(_: int) -> int:
        size = sizes[-1]
        looks.release()
        return size * 1024 * MIB

    monkeypatch.setattr(host_memory, "tree_bytes", look)
    monkeypatch.setattr(host_memory, "_SECONDS", 0.001)
    memory = HostMemory(os.getpid())
    memory.start()
    for size in (1, 1):
        assert looks.acquire(timeout=60)
        sizes.append(size)
    while looks.acquire(blocking=False):  # so that the next samples are of the last size
        pass
    assert looks.acquire(timeout=60)
    assert looks.acquire(timeout=60)
    assert memory.peak() == 3
    assert memory.peak() == 1
    memory.close()


def test_ranks_count_from_their_launcher(monkeypatch):
    monkeypatch.delenv("LOCAL_SIZE", raising=False)
    assert root_of_run() == os.getpid()
    monkeypatch.setenv("LOCAL_SIZE", "2")
    assert root_of_run() == os.getppid()
