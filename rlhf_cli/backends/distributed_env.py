"""What a launcher has told this process about its ranks; imports nothing heavy."""

import os
import socket


def free_port() -> int:
    """A TCP port of this machine that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])


def is_under_launcher() -> bool:
    """Whether deepspeed, torchrun or the like has started this process as one of several ranks."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def rank_and_world_size() -> tuple[int, int]:
    """(rank, world size) that a launcher has announced; (0, 1) without one."""
    return int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
