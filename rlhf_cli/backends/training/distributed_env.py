"""A launcher's variables about this process's ranks; imports nothing heavy."""

import os
import random
import socket

PORTS = (20_000, 32_000)


def free_port() -> int:
    """Return a TCP port of this machine that nobody listens on.

    Below the range from which the kernel gives ports to connections (32768 on): one from that range is often taken
    before the rank that is to use it listens there.
    """
    chooser = random.SystemRandom()  # training seeds the global generator, alike in every process
    while True:
        port = chooser.randrange(*PORTS)
        with socket.socket() as probe:
            try:
                probe.bind(("", port))
            except OSError:
                continue
            return port


def is_under_launcher() -> bool:
    """Return whether deepspeed, torchrun or the like has started this process as one of several ranks."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def rank_and_world_size() -> tuple[int, int]:
    """Return (rank, world size) that a launcher has announced; (0, 1) without one."""
    return int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
