"""Ranks of a process group as helper script processes, with their results."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

from rlhf_cli.backends.training.distributed_env import free_port


def start_ranks(script: str, num_ranks: int, words: list[str], folder: Path) -> list[subprocess.Popen]:
    """Start `python script words` once per rank; logs and results go to the folder."""
    port = str(free_port())
    ranks = []
    for rank in range(num_ranks):
        place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": num_ranks, "LOCAL_SIZE": num_ranks}
        environment = os.environ | {name: str(value) for name, value in place.items()}
        environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        environment |= {"OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}
        with (folder / f"rank{rank}of{num_ranks}.log").open("w") as log:
            command = [sys.executable, str(Path(__file__).with_name(script)), *words]
            ranks.append(subprocess.Popen(command, env=environment, stdout=log, stderr=log))
    return ranks


def results_of(processes: dict[int, list[subprocess.Popen]], folder: Path) -> dict[tuple[int, int], dict[str, Any]]:
    """Return each rank's results by (rank, number of ranks). Leaves no process running."""
    found = {}
    try:
        for num_ranks, ranks in processes.items():
            for rank, process in enumerate(ranks):
                status = process.wait(timeout=800)
                log = (folder / f"rank{rank}of{num_ranks}.log").read_text()
                assert status == 0, log[-3000:]
                found[rank, num_ranks] = torch.load(folder / f"rank{rank}of{num_ranks}.pt")
    finally:
        for process in [process for ranks in processes.values() for process in ranks]:
            process.kill()
            process.wait()
    return found
