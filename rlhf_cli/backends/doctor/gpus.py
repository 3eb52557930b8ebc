"""Checks of NVIDIA GPUs: driver, torch build, CUDA compiler and interconnect."""

import glob
import os
import re
import shutil
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from rlhf_cli.backends.doctor.finding import Finding, ok
from rlhf_cli.errors import RunError

_FIRST_DRIVER = {12: 525, 13: 580}
"""Minimum driver version for each CUDA major version (from NVIDIA's CUDA compatibility table)."""
_SLOW_LINKS = {"SYS": "the link between processors", "NODE": "several PCIe host bridges", "PHB": "a PCIe host bridge"}
# Without persistence mode, nvidia-smi takes several seconds while the driver initializes the GPUs.
_SECONDS = 20

Run = Callable[[list[str]], str | None]


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU as reported by the driver; `memory` in MiB."""

    name: str
    memory: int
    driver: str
    capability: str


def run(command: list[str]) -> str | None:
    """Run a command and return stdout, or None if it is missing, fails or hangs."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_SECONDS)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None


def gpus(run: Run = run) -> list[Gpu]:
    """List the GPUs reported by nvidia-smi."""
    listed = run(["nvidia-smi", "--query-gpu=name,memory.total,driver_version,compute_cap", "--format=csv,noheader"])
    rows = [[cell.strip() for cell in line.split(",")] for line in (listed or "").splitlines() if line.strip()]
    return [Gpu(row[0], int(row[1].split()[0]), row[2], row[3]) for row in rows if len(row) == 4]


def gpu_findings(found: list[Gpu], *, torch_cuda: str | None, run: Run = run) -> list[Finding]:
    """Return all findings about the GPUs, or a single one if there are no GPUs."""
    if not found:
        return [_no_gpu(torch_cuda, run)]
    names = ", ".join(f"{name} x {count}" for name, count in _counted([gpu.name for gpu in found]))
    memory = min(gpu.memory for gpu in found) / 1024
    listed = ok("GPUs", f"{names}, {memory:.0f} GiB, compute capability {found[0].capability}")
    return [listed, _driver(found[0], torch_cuda), _capability(found[0]), _nvcc(), *_links(len(found), run)]


_HIDDEN = ("", "-1")
"""Values of CUDA_VISIBLE_DEVICES that hide all GPUs."""


def check_usable_gpus(
    *, devices: Sequence[str] | None = None, run: Run = run, probe: Callable[[], tuple[bool, str | None]] | None = None
) -> None:
    """Raise RunError if this machine has a GPU that torch cannot use. Otherwise, a run could use the CPU for days.

    Args:
        devices: NVIDIA device files; by default those on this machine.
        run: runs a command and returns stdout.
        probe: returns (whether torch can use a GPU, CUDA version of the torch build).
    """
    # Device files first, because importing torch takes seconds.
    found = glob.glob("/dev/nvidia[0-9]*") if devices is None else devices
    if not found or os.environ.get("CUDA_VISIBLE_DEVICES") in _HIDDEN:
        return
    is_usable, torch_cuda = (probe or _torch_probe)()
    if is_usable:
        return
    listed = gpus(run)
    finding = _driver(listed[0], torch_cuda) if listed else _no_gpu(torch_cuda, run)
    reason, fix = finding.message, finding.cure
    if finding.status == "ok":
        reason, fix = f"torch detects none of the {len(found)} GPUs on this machine", "run rlhf doctor"
    raise RunError(f"{reason}: {fix}, or set CUDA_VISIBLE_DEVICES=-1 to use the CPU")


def _torch_probe() -> tuple[bool, str | None]:
    import torch

    return torch.cuda.is_available(), torch.version.cuda


def _counted(names: list[str]) -> list[tuple[str, int]]:
    return [(name, names.count(name)) for name in dict.fromkeys(names)]


def _no_gpu(torch_cuda: str | None, run: Run) -> Finding:
    if torch_cuda is not None and run(["nvidia-smi", "-L"]) is None and Path("/dev/nvidiactl").exists():
        return Finding("GPUs", "error", "a GPU device exists but nvidia-smi fails", "reinstall the driver")
    return ok("GPUs", "none; everything runs on the CPU")


def _driver(gpu: Gpu, torch_cuda: str | None) -> Finding:
    if torch_cuda is None:
        cure = "pip install --force-reinstall 'rlhf-cli[vllm]'"
        return Finding("CUDA", "error", f"torch is a CPU build and cannot use {gpu.name}", cure)
    major, driver = int(torch_cuda.split(".")[0]), int(gpu.driver.split(".")[0])
    first = _FIRST_DRIVER.get(major, 0)
    if driver < first:
        message = f"driver {gpu.driver} is too old for torch's CUDA {torch_cuda}, which requires {first} or newer"
        return Finding("CUDA", "error", message, f"update the NVIDIA driver to {first} or newer")
    return ok("CUDA", f"torch is built for CUDA {torch_cuda}, driver {gpu.driver}")


def _capability(gpu: Gpu) -> Finding:
    # 8.0 is Ampere, the first generation with bf16 and FlashAttention 2.
    if float(gpu.capability) < 8.0:
        message = f"{gpu.name} has compute capability {gpu.capability}; packed attention and bf16 require 8.0"
        return Finding("GPU generation", "warning", message, "use --param_dtype fp32 --attn_implementation sdpa")
    return ok("GPU generation", "packed attention kernels and bf16 are available")


def _nvcc() -> Finding:
    places = [os.environ.get("CUDA_HOME", ""), "/usr/local/cuda"]
    nvcc = shutil.which("nvcc") or next((f"{p}/bin/nvcc" for p in places if p and Path(p, "bin/nvcc").exists()), None)
    if nvcc is not None:
        return ok("CUDA compiler", nvcc)
    message = "nvcc not found: --deepspeed_enable_sleep at --zero_stage 3 requires it to compile CUDA code"
    return Finding("CUDA compiler", "warning", message, "install the CUDA toolkit, or set CUDA_HOME to the toolkit")


def _links(count: int, run: Run) -> list[Finding]:
    """Report the slowest connection between any two GPUs."""
    if count < 2:
        return []
    ways = _ways_between(run(["nvidia-smi", "topo", "-m"]) or "", count)
    if ways and all(way.startswith("NV") for way in ways):
        return [ok("GPU links", f"NVLink between all GPUs ({', '.join(sorted(set(ways)))})")]
    slow = next((way for way in _SLOW_LINKS if way in ways), None)
    if slow is None:
        return [ok("GPU links", ", ".join(sorted(set(ways))) or "unknown")]
    message = f"some GPUs are connected only through {_SLOW_LINKS[slow]} ({slow})"
    cure = "place each role's ranks on GPUs connected by NVLink or a PCIe switch (CUDA_VISIBLE_DEVICES)"
    return [Finding("GPU links", "warning", message, cure)]


def _ways_between(table: str, count: int) -> list[str]:
    """Parse nvidia-smi's topology matrix and return the cells above the diagonal."""
    rows = [line.split() for line in table.splitlines() if re.match(r"GPU\d+\s", line)]
    return [row[1 + other] for number, row in enumerate(rows) for other in range(number + 1, count) if len(row) > count]
