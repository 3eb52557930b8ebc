"""The compiled form of attention on a CPU: built with the machine's C++ compiler on first use, and called by ctypes.

The library is kept in the user's cache under a name that identifies source and flags. Processes that start together may
each build it; the last one's file, moved into place as a whole, is as good as the first's.
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

SOURCE = Path(__file__).with_name("varlen_cpu.cpp")
FLAGS = ("-std=c++17", "-O3", "-fopenmp", "-shared", "-fPIC")
VECTORS = {"AVX512": ("-mavx512f",), "AVX2": ("-mavx2", "-mfma")}
"""Compiler flags by PyTorch's report on the processor; elsewhere the compiler's default."""
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


@dataclass(frozen=True)
class Operands:
    """What `varlen_attention` takes, in its order."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    cu_seqlens: torch.Tensor
    cu_seqlens_k: torch.Tensor
    scale: float
    window: int

    def check(self) -> None:
        """Raise ValueError for what would let a kernel read or write outside of the tensors."""
        if self.query.shape[1] % self.key.shape[1] or self.key.shape[:2] != self.value.shape[:2]:
            raise ValueError("query heads are not a multiple of the heads of key and value")
        lengths, lengths_k = self.cu_seqlens.diff(), self.cu_seqlens_k.diff()
        if lengths.shape != lengths_k.shape or bool(((lengths < 0) | (lengths_k < lengths)).any()):
            raise ValueError("a sequence has fewer keys than queries")
        ends = self.cu_seqlens[0], self.cu_seqlens_k[0], self.cu_seqlens[-1], self.cu_seqlens_k[-1]
        if [int(end) for end in ends] != [0, 0, len(self.query), len(self.key)]:
            raise ValueError("the bounds of the sequences do not fit the tensors")


class VarlenKernel:
    """The functions of a compiled library, for float32 and bfloat16; they compute in float32."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library

    def forward(self, of: Operands) -> torch.Tensor:
        """Return the output [T, heads, value size]."""
        output = of.query.new_empty(*of.query.shape[:2], of.value.shape[-1])
        self._call("forward", of, [of.query, of.key, of.value], [output])
        return output

    def backward(self, grad: torch.Tensor, of: Operands) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return the gradients of query, key and value in their shapes and types."""
        grads = of.query.new_empty(of.query.shape), of.key.new_empty(of.key.shape), of.value.new_empty(of.value.shape)
        self._call("backward", of, [grad, of.query, of.key, of.value], grads)
        return grads

    def _call(self, name: str, of: Operands, inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor]) -> None:
        of.check()
        if any(tensor.dtype != of.query.dtype for tensor in inputs):
            raise ValueError("the tensors are not of one type")
        # Held by name until the call is over: their memory is passed as bare addresses.
        held = [tensor.contiguous() for tensor in inputs]
        bounds, bounds_k = (tensor.int().contiguous() for tensor in (of.cu_seqlens, of.cu_seqlens_k))
        pack = _Pack(
            bounds.data_ptr(),
            bounds_k.data_ptr(),
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
    """Return the kernel for this machine, built if it has to be; None, with a warning that gives the reason, if it
    cannot be.
    """
    try:
        return VarlenKernel(ctypes.CDLL(str(build())))
    except (OSError, RuntimeError, subprocess.CalledProcessError) as error:
        lines = (getattr(error, "stderr", "").strip() or str(error)).splitlines()
        reason = next((line for line in lines if "error" in line), lines[-1])
        logger.warning("attention on this CPU is not compiled, which makes it slower: %s", reason)
        return None


def build() -> Path:
    """Return the library's file in the user's cache, compiled unless it is there.

    Raises OSError without a compiler or if the cache cannot be written, RuntimeError without a home folder,
    CalledProcessError if the compiler fails.
    """
    flags = [*FLAGS, *VECTORS.get(torch.backends.cpu.get_cpu_capability(), ())]
    machine = [platform.machine(), *platform.libc_ver()]  # machines may share a home
    key = hashlib.sha256(SOURCE.read_bytes() + " ".join(flags + machine).encode()).hexdigest()[:16]
    library = user_cache("kernels") / f"varlen-{key}.so"
    if not library.exists():
        library.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=library.parent) as folder:
            built = Path(folder) / library.name
            compiler = shlex.split(os.environ.get("CXX") or "g++")
            command = [*compiler, *flags, str(SOURCE), "-o", str(built)]
            subprocess.run(command, check=True, capture_output=True, text=True, errors="replace")
            built.replace(library)
    return library
