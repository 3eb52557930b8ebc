"""How the C library's allocator treats memory that tensors on a CPU give back."""

import ctypes

M_TRIM_THRESHOLD = -1
M_MMAP_MAX = -4


def keep_freed_memory() -> bool:
    """Make glibc keep freed memory for the next tensor instead of returning it to the kernel; return False without
    glibc.

    Tensors above 32 MiB are otherwise mapped anew each time and filled with zeroed pages: a sixth to a quarter of a
    training step with packs of 16k tokens is then spent in the kernel. For processes that train on a CPU; the memory in
    use stays at its peak until they end.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except AttributeError:
        return False
    # A trim threshold of -1 is the largest size_t: the heap's top is never given back.
    return bool(mallopt(M_MMAP_MAX, 0)) and bool(mallopt(M_TRIM_THRESHOLD, -1))
