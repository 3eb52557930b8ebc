"""Environment variables for libraries, garbage collector settings, and the default dtype for this machine."""

import gc
import glob
import os
import re
from functools import cache
from pathlib import Path
from typing import Literal

_QUIET = {
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR": "false",
    "TOKENIZERS_PARALLELISM": "true",
    "TRANSFORMERS_VERBOSITY": "error",
}

SECRET = re.compile(r"KEY|TOKEN|SECRET|PASS|CREDENTIAL|AUTH", re.IGNORECASE)
"""Pattern in names of environment variables whose values must not appear in files."""
_SHORTEST_SECRET = 6
"""Shorter values, such as `TOKENIZERS_PARALLELISM=true`, are ordinary words."""

SPIN_COUNT = "100000"
"""Spin iterations before an idle OpenMP thread sleeps, about 0.2 ms. By default, threads spin forever, and processes
that share cores starve each other (4 to 6 times slower). If threads sleep immediately, waking them costs more than a
small layer (4 times slower on virtual machines)."""

USUAL = gc.get_threshold()
SELDOM = (100_000, 50, 50)
"""Garbage collector thresholds during startup, and in the driver of online runs."""

_ONEDNN_CACHES = ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY")
_ONEDNN_CAPACITY = "128"
"""Size limit for the caches in which oneDNN and PyTorch keep compiled bf16 kernels on a CPU, one per shape. Packs keep
producing new shapes, and the default is 1,024 kernels with up to 1 MB each: a lot with many processes."""


def prepare_environment() -> None:
    """Set environment variables that the user has not set. Call it before importing torch, Ray or vLLM."""
    for name, value in _QUIET.items():
        os.environ.setdefault(name, value)
    if not has_gpu_device():
        # Otherwise DeepSpeed warns about a missing GPU on import.
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
        os.environ.setdefault("GOMP_SPINCOUNT", SPIN_COUNT)


def without_secrets(text: str) -> str:
    """Replace the values of environment variables that hold secrets."""
    values = [value for name, value in os.environ.items() if SECRET.search(name) and len(value) >= _SHORTEST_SECRET]
    for value in sorted(values, key=len, reverse=True):
        text = text.replace(value, "(hidden)")
    return text


def has_gpu_device() -> bool:
    """Return whether this machine has a GPU device, without importing torch."""
    # /dev/dxg is the GPU in Windows Subsystem for Linux.
    return bool(glob.glob("/dev/nvidia[0-9]*")) or os.path.exists("/dev/dxg")


_FAST_BF16 = {"amx_bf16": "AMX", "avx512_bf16": "AVX512-BF16", "bf16": "BF16 of ARM"}
"""CPU flags that indicate fast bf16 matrix products. On other AVX512 CPUs, oneDNN converts every operand, which is
slower than float32."""


@cache
def fast_dtype() -> tuple[Literal["bf16", "fp32"], str]:
    """Return the fastest dtype on this machine with the reason, without importing torch."""
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1")
    if has_gpu_device() and not hidden:
        return "bf16", "bf16 is fast on a GPU"
    # This machine may be a head node without a GPU.
    if os.environ.get("RAY_ADDRESS"):
        return "bf16", "the Ray cluster at RAY_ADDRESS is assumed to have GPUs"
    return dtype_of_processor(_processor())


def dtype_of_processor(description: str) -> tuple[Literal["bf16", "fp32"], str]:
    """Return the fastest dtype on a CPU with the reason.

    Args:
        description: contents of /proc/cpuinfo.
    """
    flags = processor_flags(description)
    extension = next((name for flag, name in _FAST_BF16.items() if flag in flags), None)
    if extension is None:
        return "fp32", "this CPU has no fast bf16 instructions (AMX, AVX512-BF16)"
    return "bf16", f"this CPU has fast bf16 instructions ({extension})"


def processor_flags(description: str | None = None) -> set[str]:
    """Return the instruction sets of this machine's CPU, or those in a description like /proc/cpuinfo."""
    lines = (line.partition(":") for line in (_processor() if description is None else description).splitlines())
    return {flag for name, _, value in lines if name.strip() in ("flags", "Features") for flag in value.split()}


def processor_name() -> str:
    """Return the model name of this machine's CPU; empty if the system does not report it."""
    lines = (line.partition(":") for line in _processor().splitlines())
    return next((value.strip() for name, _, value in lines if name.strip() == "model name"), "")


def _processor() -> str:
    try:
        return Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    # Not on Linux.
    except OSError:
        return ""


def rest_collector() -> None:
    """Run the garbage collector rarely during startup.

    While modules are imported and models are built, it takes a fifth of the time and finds nothing.
    """
    gc.set_threshold(*SELDOM)


def resume_collector(thresholds: tuple[int, int, int] = USUAL) -> None:
    """Restore normal garbage collection. Existing objects are frozen, because they live until the end."""
    gc.freeze()
    gc.set_threshold(*thresholds)


def onednn_caches() -> dict[str, str]:
    """Return the environment variables that limit oneDNN's caches, with the user's values if set."""
    return {name: os.environ.get(name, _ONEDNN_CAPACITY) for name in _ONEDNN_CACHES}


def user_cache(kind: str) -> Path:
    """Return the cache folder for one kind of file."""
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "rlhf-cli" / kind
