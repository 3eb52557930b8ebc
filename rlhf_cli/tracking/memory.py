"""How much memory a run holds."""

import sys
from contextlib import suppress

import psutil

from rlhf_cli.tracking.figures import GIB


def host_gib() -> float:
    """Return the resident memory in GiB of this process and all that descend from it, memory shared between them
    counted once.

    The shared part is taken as the largest of a single process: libraries and object stores are mapped by all.
    """
    private, shared = 0, 0
    this = psutil.Process()
    for process in (this, *this.children(recursive=True)):
        with suppress(psutil.Error):
            usage = process.memory_info()
            common = getattr(usage, "shared", 0)
            private += usage.rss - common
            shared = max(shared, common)
    return (private + shared) / GIB


def gpu_gib() -> float | None:
    """Return the peak GPU memory in GiB that PyTorch held here since the last call; None if no GPU is in use."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return None
    peak = torch.cuda.max_memory_reserved()
    torch.cuda.reset_peak_memory_stats()
    return peak / GIB
