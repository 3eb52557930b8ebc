"""Memory use of a run."""

from contextlib import suppress

import psutil

from rlhf_cli.tracking.figures import GIB


def host_gib() -> float:
    """Measure resident memory of this process and all descendants in GiB.

    Shared memory counts once, as the largest shared part of any single process: libraries and object stores are mapped
    by all of them.
    """
    private, shared = 0, 0
    this = psutil.Process()
    for process in (this, *this.children(recursive=True)):
        # A process may exit, or deny access, between listing and reading.
        with suppress(psutil.Error):
            usage = process.memory_info()
            # Linux only; other systems report no shared memory.
            common = getattr(usage, "shared", 0)
            private += usage.rss - common
            shared = max(shared, common)
    return (private + shared) / GIB
