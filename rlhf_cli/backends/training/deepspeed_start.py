"""What DeepSpeed loads and compiles when it starts and this program has no use for: seconds of every start."""

import deepspeed
import torch

SHARED_MEMORY = "deepspeed_shm_comm"
"""The operator with which the ranks of a CPU exchange tensors; to compile it once takes a minute and more."""


def load_muon_uncompiled() -> None:
    """Import DeepSpeed's Muon, which no setting here chooses, without loading Inductor.

    DeepSpeed imports Muon to compare it with the optimizer that it is given. Its functions are marked for
    torch.compile, which loads Inductor at that moment (two seconds of a CPU). torch before 2.13 cannot change the
    default backend, and takes the two seconds.
    """
    if not hasattr(torch.compiler, "set_default_backend"):
        return
    torch.compiler.set_default_backend("eager")
    try:
        import deepspeed.runtime.zero.muon.muon_optimizer  # noqa: F401
    finally:
        torch.compiler.set_default_backend(None)


def leave_out_shared_memory() -> None:
    """Keep DeepSpeed from compiling the operator between ranks: for a group of one rank."""
    deepspeed.ops.__compatible_ops__[SHARED_MEMORY] = False
