"""Environment variables set by a launcher, and port selection. This module imports nothing heavy."""

import os
import random
import socket

# Below Linux's default range for outgoing connections (32768 and up): a port from that range is often taken before the
# rank can listen on it.
_PORTS = (20_000, 32_000)


def free_port() -> int:
    """Return a free TCP port on this machine."""
    # Not the global generator, which training seeds equally in every process.
    chooser = random.SystemRandom()
    while True:
        port = chooser.randrange(*_PORTS)
        with socket.socket() as probe:
            try:
                probe.bind(("", port))
            except OSError:
                continue
            return port


def is_under_launcher() -> bool:
    """Return whether a launcher such as deepspeed or torchrun has started this process."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


REPORTED_BY_PARENT = "RLHF_REPORTED_BY_PARENT"
"""Set for ranks that `rlhf --num_processes N` has started, which reports their end itself."""


def is_reported_by_parent() -> bool:
    """Return whether this rank was started by another `rlhf` process."""
    return REPORTED_BY_PARENT in os.environ


def ranks_per_node() -> int:
    """Return the number of ranks on this machine. Call it after the process group was joined."""
    return int(os.environ["LOCAL_SIZE"])


def rank_and_world_size() -> tuple[int, int]:
    """Return (rank, world size) as set by the launcher; (0, 1) without one."""
    return int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
