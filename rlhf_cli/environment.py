"""Environment variables: settings of the user for this program, and of this program for its libraries."""

import gc
import glob
import os
from functools import cache
from pathlib import Path
from typing import Literal

QUIET = {
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "TOKENIZERS_PARALLELISM": "true",
    "TRANSFORMERS_VERBOSITY": "error",
}

SPIN_COUNT = "100000"
"""How often an OpenMP thread looks before it sleeps, some 0.2 ms. By default it spins for good, and processes that
share cores starve each other (4 to 6 times slower); if it sleeps at once, waking it costs more than small layers do
(4 times slower on virtual machines)."""

USUAL = gc.get_threshold()
SELDOM = (100_000, 50, 50)
"""After how many new objects, and collections of these, Python looks for cycles."""

ONEDNN_CACHES = ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY")
ONEDNN_CAPACITY = "128"
"""Products in bf16 that oneDNN, and PyTorch on top of it, compile on a CPU and keep: one for each shape, and packs have
ever new ones. By default each of both keeps 1,024, of up to a megabyte: much for several processes."""


def prepare_environment() -> None:
    """Set the variables that the user has not set. Call it before anything heavy is imported."""
    for name, value in QUIET.items():
        os.environ.setdefault(name, value)
    if not has_gpu_device():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")  # else DeepSpeed warns about the lack of a GPU on import
        os.environ.setdefault("GOMP_SPINCOUNT", SPIN_COUNT)


def has_gpu_device() -> bool:
    """Return whether this machine has the device of a GPU, seen without torch."""
    return bool(glob.glob("/dev/nvidia[0-9]*")) or os.path.exists("/dev/dxg")


FAST_BF16 = {"amx_bf16": "AMX", "avx512_bf16": "AVX512-BF16", "bf16": "BF16 of ARM"}
"""Flags of processors that multiply bf16 at least as fast as float32. oneDNN also takes bf16 on AVX512 without them,
but converts every operand."""


@cache
def fast_dtype() -> tuple[Literal["bf16", "fp32"], str]:
    """Return the type in which this machine multiplies fastest, and the reason; imports no torch."""
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1")
    if has_gpu_device() and not hidden:
        return "bf16", "products in bf16 are fast on a GPU"
    if os.environ.get("RAY_ADDRESS"):
        return "bf16", "the machines of the cluster at RAY_ADDRESS are taken for ones with GPUs"
    return dtype_of_processor(_processor())


def dtype_of_processor(description: str) -> tuple[Literal["bf16", "fp32"], str]:
    """Return the type in which a processor multiplies fastest, and the reason.

    Args:
        description: the text of /proc/cpuinfo.
    """
    lines = (line.partition(":") for line in description.splitlines())
    flags = {flag for name, _, value in lines if name.strip() in ("flags", "Features") for flag in value.split()}
    found = next((name for flag, name in FAST_BF16.items() if flag in flags), None)
    if found is None:
        return "fp32", "this processor has no fast products in bf16 (AMX, AVX512-BF16)"
    return "bf16", f"this processor multiplies bf16 fast ({found})"


def _processor() -> str:
    try:
        return Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:  # another system than Linux
        return ""


def rest_collector() -> None:
    """Let Python's collector of cycles look seldom while modules are imported and models are built.

    It walks through every object again and again, which takes a fifth of that time and finds nothing.
    """
    gc.set_threshold(*SELDOM)


def resume_collector() -> None:
    """Collect cycles as usual from here on, without the objects that exist already: they stay until the end."""
    gc.freeze()
    gc.set_threshold(*USUAL)


def onednn_caches() -> dict[str, str]:
    """Return the variables that bound oneDNN's caches in the processes of a run: the user's, or this program's."""
    return {name: os.environ.get(name, ONEDNN_CAPACITY) for name in ONEDNN_CACHES}


def user_cache(kind: str) -> Path:
    """Return the folder in which this program keeps one kind of files from run to run."""
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "rlhf-cli" / kind
