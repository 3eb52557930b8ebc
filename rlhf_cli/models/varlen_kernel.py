"""The compiled form of attention on a CPU: built with the machine's C++ compiler on first use, and called by ctypes.

The library is kept in the user's cache under a name that says source and flags. Processes that start together may
each build it; the last one's file, moved into place as a whole, is as good as the first's.
"""

import ctypes
import functools
import hashlib
import logging
import os
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch

from rlhf_cli.environment import user_cache

SOURCE = Path(__file__).with_name("varlen_cpu.cpp")
FLAGS = ("-std=c++17", "-O3", "-fopenmp", "-shared", "-fPIC")
VECTORS = {"AVX512": ("-mavx512f",), "AVX2": ("-mavx2", "-mfma")}
"""Flags by what PyTorch says of the processor; elsewhere the compiler's default."""
NAMES = {torch.float32: "float32", torch.bfloat16: "bfloat16"}

logger = logging.getLogger(__name__)


class _Pack(ctypes.Structure):
    """`Pack` of the source."""

    _fields_ = (
        ("bounds", ctypes.c_void_p),
        ("bounds_k", ctypes.c_void_p),
        *((name, ctypes.c_long) for name in ("sequences", "heads", "groups", "size", "value_size")),
        ("scale", ctypes.c_float),
        ("window", ctypes.c_long),
    )


class VarlenKernel:
    """Attention over a pack in float32 inside, for contiguous float32 or bfloat16 tensors."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library

    def forward(
        self, tensors: Sequence[torch.Tensor], output: torch.Tensor, bounds: Sequence[torch.Tensor], **settings: float
    ) -> None:
        """Write the output of query, key and value; `bounds` and `settings` as `varlen_attention` has them."""
        self._call("forward", tensors, tensors, [output], bounds, **settings)

    def backward(
        self,
        grad: torch.Tensor,
        tensors: Sequence[torch.Tensor],
        grads: Sequence[torch.Tensor],
        bounds: Sequence[torch.Tensor],
        **settings: float,
    ) -> None:
        """Write the gradients of query, key and value."""
        self._call("backward", tensors, [grad, *tensors], grads, bounds, **settings)

    def _call(
        self,
        name: str,
        tensors: Sequence[torch.Tensor],
        inputs: Sequence[torch.Tensor],
        outputs: Sequence[torch.Tensor],
        bounds: Sequence[torch.Tensor],
        *,
        scale: float,
        window: int,
    ) -> None:
        query, key, value = tensors
        # Held by name until the call is over: their memory is passed as bare addresses.
        held = [tensor.contiguous() for tensor in inputs]
        cu_seqlens, cu_seqlens_k = (tensor.to("cpu", torch.int32).contiguous() for tensor in bounds)
        pack = _Pack(
            cu_seqlens.data_ptr(),
            cu_seqlens_k.data_ptr(),
            cu_seqlens.numel() - 1,
            *(query.shape[1], key.shape[1], query.shape[2], value.shape[2]),
            scale,
            window,
        )
        pointers = [ctypes.c_void_p(tensor.data_ptr()) for tensor in (*held, *outputs)]
        function = self._library[f"{name}_{NAMES[query.dtype]}"]
        function(ctypes.byref(pack), *pointers, ctypes.c_long(torch.get_num_threads()))


@functools.cache
def varlen_kernel() -> VarlenKernel | None:
    """The kernel for this machine, built if it has to be; None, with a warning that says why, where it cannot be."""
    try:
        return VarlenKernel(ctypes.CDLL(str(build())))
    except (OSError, subprocess.CalledProcessError) as error:
        reason = (error.stderr if isinstance(error, subprocess.CalledProcessError) else str(error)).strip()
        logger.warning("attention on this CPU is not compiled and slower: %s", reason.splitlines()[-1])
        return None


def build() -> Path:
    """The library's file in the user's cache, compiled unless it is there.

    Raises OSError where there is no compiler or the cache cannot be written, CalledProcessError where it fails.
    """
    flags = [*FLAGS, *VECTORS.get(torch.backends.cpu.get_cpu_capability(), ())]
    key = hashlib.sha256(SOURCE.read_bytes() + " ".join(flags).encode()).hexdigest()[:16]
    library = user_cache("kernels") / f"varlen-{key}.so"
    if not library.exists():
        library.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=library.parent) as folder:
            built = Path(folder) / library.name
            command = [os.environ.get("CXX") or "g++", *flags, str(SOURCE), "-o", str(built)]
            subprocess.run(command, check=True, capture_output=True, text=True)
            built.replace(library)
    return library
