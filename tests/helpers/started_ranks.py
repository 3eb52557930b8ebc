"""Ranks of process groups that run a helper script, with their results.

The script is imported once: `python started_ranks.py SCRIPT FOLDER 1,2 ARGUMENTS` forks the ranks of a group of one and
a group of two, and calls `main(*ARGUMENTS)` of the script in each of them.
"""

import importlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterable
from ctypes import CDLL
from pathlib import Path
from typing import Any

import torch
from forked_worker import PR_SET_PDEATHSIG

from rlhf_cli.backends.training.distributed_env import free_port


def start_ranks(script: str, group_sizes: Iterable[int], words: Iterable[object], folder: Path) -> subprocess.Popen:
    """Start the ranks of process groups of these sizes. Logs and results go to the folder."""
    arguments = [script, folder, ",".join(map(str, group_sizes)), *words]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}
    return subprocess.Popen([sys.executable, __file__, *map(str, arguments)], env=environment)


def results_of(
    ranks: subprocess.Popen, group_sizes: Iterable[int], folder: Path
) -> dict[tuple[int, int], dict[str, Any]]:
    """Return each rank's results by (rank, number of ranks). Leaves no process running."""
    try:
        status = ranks.wait(timeout=800)
    finally:
        ranks.kill()
        ranks.wait()
    assert status == 0, "\n".join(log.read_text()[-3000:] for log in folder.glob("rank*of*.log"))
    return {(rank, size): torch.load(folder / f"rank{rank}of{size}.pt") for size in group_sizes for rank in range(size)}


def main(script: str, folder: str, group_sizes: str, *words: str) -> None:
    """Fork the ranks and wait for all of them. The first failure ends the others."""
    module = importlib.import_module(script)
    assert threading.active_count() == 1, "a process with threads must not fork"
    sizes = [int(size) for size in group_sizes.split(",")]
    for size in sizes:
        port = str(free_port())
        for rank in range(size):
            if os.fork() == 0:
                CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
                place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_SIZE": size}
                os.environ.update({name: str(value) for name, value in place.items()})
                os.environ.update({"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port})
                log = os.open(f"{folder}/rank{rank}of{size}.log", os.O_WRONLY | os.O_CREAT, 0o644)
                os.dup2(log, 1)
                os.dup2(log, 2)
                module.main(*words)
                return
    for _ in range(sum(sizes)):
        _, status = os.wait()
        if status != 0:
            sys.exit(1)


if __name__ == "__main__":
    main(*sys.argv[1:])
