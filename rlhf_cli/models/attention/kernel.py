"""Compiled CPU attention: built with the local C++ compiler on first use, and called through ctypes.

The library is cached per user under a hash of source and flags. Processes that start together may each build it; the
last atomic rename wins, and all builds are equivalent.
"""

import ctypes
import functools
import hashlib
import logging
import os
import platform
import shlex
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from rlhf_cli.environment import user_cache

_SOURCE = Path(__file__).with_name("varlen_cpu.cpp")
# No -march=native: machines that share a home directory may have different processors. The cache key includes the
# vector flags below.
_FLAGS = ("-std=c++17", "-O3", "-fopenmp", "-shared", "-fPIC")
_VECTORS = {"AVX512": ("-mavx512f",), "AVX2": ("-mavx2", "-mfma")}
"""Compiler flags by PyTorch's CPU capability; otherwise the compiler default."""
NAMES = {torch.float32: "float32", torch.bfloat16: "bfloat16"}

logger = logging.getLogger(__name__)


class _Pack(ctypes.Structure):
    """C struct `Pack` in the source: fields must have the same order and types."""

    _fields_ = (
        ("bounds", ctypes.c_void_p),
        ("bounds_k", ctypes.c_void_p),
        ("sinks", ctypes.c_void_p),
        *((name, ctypes.c_long) for name in ("sequences", "heads", "groups", "size", "value_size")),
        ("scale", ctypes.c_float),
        ("window", ctypes.c_long),
    )


@dataclass(frozen=True)
class Operands:
    """Arguments of `varlen_attention`, in order."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    cu_seqlens: torch.Tensor
    cu_seqlens_k: torch.Tensor
    scale: float
    window: int
    sinks: torch.Tensor | None = None

    def check(self) -> None:
        """Raise ValueError for arguments that would make the kernel access memory out of bounds."""
        if self.query.shape[1] % self.key.shape[1] or self.key.shape[:2] != self.value.shape[:2]:
            raise ValueError("the number of query heads is not a multiple of the number of key and value heads")
        if self.sinks is not None and self.sinks.shape != self.query.shape[1:2]:
            raise ValueError("the number of sinks is not that of query heads")
        lengths, lengths_k = self.cu_seqlens.diff(), self.cu_seqlens_k.diff()
        if lengths.shape != lengths_k.shape or bool(((lengths < 0) | (lengths_k < lengths)).any()):
            raise ValueError("a sequence has fewer keys than queries")
        ends = self.cu_seqlens[0], self.cu_seqlens_k[0], self.cu_seqlens[-1], self.cu_seqlens_k[-1]
        if [int(end) for end in ends] != [0, 0, len(self.query), len(self.key)]:
            raise ValueError("sequence bounds do not match the tensors")


class VarlenKernel:
    """Functions in a compiled library for float32 and bfloat16, with float32 computation."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library

    def forward(self, of: Operands) -> torch.Tensor:
        """Compute the output [T, heads, value size]."""
        output = of.query.new_empty(*of.query.shape[:2], of.value.shape[-1])
        self._call("forward", of, [of.query, of.key, of.value], [output])
        return output

    def backward(self, grad: torch.Tensor, of: Operands) -> list[torch.Tensor]:
        """Compute the gradients of query, key and value in their shapes and dtypes, and of sinks, float32 [heads]."""
        inputs = [of.query, of.key, of.value]
        grads = [tensor.new_empty(tensor.shape) for tensor in inputs]
        # By sequence, because threads take sequences in any order.
        of_sinks_SH = torch.empty(of.cu_seqlens.numel() - 1, of.query.shape[1])
        self._call("backward", of, [grad, *inputs], [*grads, of_sinks_SH])
        return [*grads, of_sinks_SH.sum(0)]

    def _call(self, name: str, of: Operands, inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor]) -> None:
        of.check()
        if any(tensor.dtype != of.query.dtype for tensor in inputs):
            raise ValueError("the tensors do not have the same dtype")
        # Keep references until the call returns: the kernel only gets raw addresses, and contiguous() may create
        # copies.
        held = [tensor.contiguous() for tensor in inputs]
        bounds, bounds_k = (tensor.int().contiguous() for tensor in (of.cu_seqlens, of.cu_seqlens_k))
        sinks = None if of.sinks is None else of.sinks.float().contiguous()
        pack = _Pack(
            bounds.data_ptr(),
            bounds_k.data_ptr(),
            None if sinks is None else sinks.data_ptr(),
            bounds.numel() - 1,
            *(of.query.shape[1], of.key.shape[1], of.query.shape[2], of.value.shape[2]),
            of.scale,
            of.window,
        )
        pointers = [ctypes.c_void_p(tensor.data_ptr()) for tensor in (*held, *outputs)]
        function = self._library[f"{name}_{NAMES[of.query.dtype]}"]
        function(ctypes.byref(pack), *pointers, ctypes.c_long(torch.get_num_threads()))


@functools.cache
def varlen_kernel() -> VarlenKernel | None:
    """Return the kernel for this machine, building it if necessary.

    Logs a warning and returns None if it cannot be built.
    """
    try:
        # OSError also covers a missing compiler and a library that the loader rejects.
        return VarlenKernel(ctypes.CDLL(str(build())))
    except (OSError, RuntimeError, subprocess.CalledProcessError) as error:
        lines = (getattr(error, "stderr", "").strip() or str(error)).splitlines()
        reason = next((line for line in lines if "error" in line), lines[-1])
        logger.warning("compiled CPU attention is not available, using slower PyTorch code: %s", reason)
        return None


def build() -> Path:
    """Return the cached library, compiling it if necessary.

    Raises OSError without a compiler or if the cache is not writable, RuntimeError without a home directory,
    CalledProcessError if compilation fails.
    """
    flags = [*_FLAGS, *_VECTORS.get(torch.backends.cpu.get_cpu_capability(), ())]
    # Machines with different libc or architecture may share a home directory.
    machine = [platform.machine(), *platform.libc_ver()]
    key = hashlib.sha256(_SOURCE.read_bytes() + " ".join(flags + machine).encode()).hexdigest()[:16]
    library = user_cache("kernels") / f"varlen-{key}.so"
    if not library.exists():
        library.parent.mkdir(parents=True, exist_ok=True)
        # In the same directory, so that the rename below is atomic and no process loads a half-written file.
        with tempfile.TemporaryDirectory(dir=library.parent) as folder:
            built = Path(folder) / library.name
            compiler = shlex.split(os.environ.get("CXX") or "g++")
            command = [*compiler, *flags, str(_SOURCE), "-o", str(built)]
            subprocess.run(command, check=True, capture_output=True, text=True, errors="replace")
            built.replace(library)
    return library
