"""Workarounds that skip unneeded work during DeepSpeed's startup, which takes seconds in each process."""

import deepspeed
import torch

_SHARED_MEMORY = "deepspeed_shm_comm"
"""DeepSpeed's operator for shared-memory communication between CPU ranks. Compiling it takes over a minute."""


def load_muon_uncompiled() -> None:
    """Import DeepSpeed's Muon without loading Inductor. With torch before 2.13, Inductor is loaded (about 2 s)."""
    # DeepSpeed imports Muon for a type check of the optimizer. The module decorates functions with torch.compile, which
    # loads Inductor (two seconds) unless another backend is set. torch before 2.13 cannot set the default backend.
    if not hasattr(torch.compiler, "set_default_backend"):
        return
    torch.compiler.set_default_backend("eager")
    try:
        import deepspeed.runtime.zero.muon.muon_optimizer  # noqa: F401
    finally:
        torch.compiler.set_default_backend(None)


def leave_out_shared_memory() -> None:
    """Prevent DeepSpeed from compiling the shared-memory operator. Use it only with a single rank."""
    # deepspeed.comm compiles the operator only if it is listed as compatible.
    deepspeed.ops.__compatible_ops__[_SHARED_MEMORY] = False
