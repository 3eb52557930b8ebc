"""Checks of NVIDIA GPUs: driver, torch's build, the CUDA compiler, and how the GPUs are connected."""

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

FIRST_DRIVER = {12: 525, 13: 580}
"""Oldest driver of each CUDA major version (NVIDIA's CUDA compatibility table)."""
SLOW_LINKS = {"SYS": "the link between processors", "NODE": "several PCIe host bridges", "PHB": "a PCIe host bridge"}
_SECONDS = 20

Run = Callable[[list[str]], str | None]


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU as the driver reports it; `memory` in MiB."""

    name: str
    memory: int
    driver: str
    capability: str


def run(command: list[str]) -> str | None:
    """Return the standard output of a command; None if the command is missing, fails or hangs."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_SECONDS)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None


def gpus(run: Run = run) -> list[Gpu]:
    """Return the GPUs that nvidia-smi lists."""
    listed = run(["nvidia-smi", "--query-gpu=name,memory.total,driver_version,compute_cap", "--format=csv,noheader"])
    rows = [[cell.strip() for cell in line.split(",")] for line in (listed or "").splitlines() if line.strip()]
    return [Gpu(row[0], int(row[1].split()[0]), row[2], row[3]) for row in rows if len(row) == 4]


def gpu_findings(found: list[Gpu], *, torch_cuda: str | None, run: Run = run) -> list[Finding]:
    """Return the findings about the GPUs; a machine without any has one finding."""
    if not found:
        return [_no_gpu(torch_cuda, run)]
    names = ", ".join(f"{name} x {count}" for name, count in _counted([gpu.name for gpu in found]))
    memory = min(gpu.memory for gpu in found) / 1024
    listed = ok("GPUs", f"{names}, {memory:.0f} GiB, compute capability {found[0].capability}")
    return [listed, _driver(found[0], torch_cuda), _capability(found[0]), _nvcc(), *_links(len(found), run)]


HIDDEN = ("", "-1")
"""Values of CUDA_VISIBLE_DEVICES that hide all GPUs."""


def check_usable_gpus(
    *, devices: Sequence[str] | None = None, run: Run = run, probe: Callable[[], tuple[bool, str | None]] | None = None
) -> None:
    """Raise RunError if this machine has a GPU that torch cannot use: a run would compute on the CPU for days.

    Imports torch only where there is a GPU.

    Args:
        devices: files of NVIDIA's devices; by default this machine's.
        probe: returns (whether torch can use a GPU, the CUDA version of its build).
    """
    found = glob.glob("/dev/nvidia[0-9]*") if devices is None else devices
    if not found or os.environ.get("CUDA_VISIBLE_DEVICES") in HIDDEN:
        return
    is_usable, torch_cuda = (probe or _torch_probe)()
    if is_usable:
        return
    listed = gpus(run)
    finding = _driver(listed[0], torch_cuda) if listed else _no_gpu(torch_cuda, run)
    reason, fix = finding.message, finding.cure
    if finding.status == "ok":
        reason, fix = f"torch finds none of the {len(found)} GPUs of this machine", "run rlhf doctor"
    raise RunError(f"{reason}: {fix}, or set CUDA_VISIBLE_DEVICES=-1 to compute on the CPU")


def _torch_probe() -> tuple[bool, str | None]:
    import torch

    return torch.cuda.is_available(), torch.version.cuda


def _counted(names: list[str]) -> list[tuple[str, int]]:
    return [(name, names.count(name)) for name in dict.fromkeys(names)]


def _no_gpu(torch_cuda: str | None, run: Run) -> Finding:
    if torch_cuda is not None and run(["nvidia-smi", "-L"]) is None and Path("/dev/nvidiactl").exists():
        return Finding("GPUs", "error", "a GPU device exists but nvidia-smi does not answer", "reinstall the driver")
    return ok("GPUs", "none; everything runs on the CPU")


def _driver(gpu: Gpu, torch_cuda: str | None) -> Finding:
    if torch_cuda is None:
        cure = "pip install --force-reinstall 'rlhf-cli[vllm]'"
        return Finding("CUDA", "error", f"torch is a CPU build, so it does not see {gpu.name}", cure)
    major, driver = int(torch_cuda.split(".")[0]), int(gpu.driver.split(".")[0])
    first = FIRST_DRIVER.get(major, 0)
    if driver < first:
        message = f"driver {gpu.driver} is too old for torch's CUDA {torch_cuda}, which needs {first} or newer"
        return Finding("CUDA", "error", message, f"update the NVIDIA driver to {first} or newer")
    return ok("CUDA", f"torch is built for CUDA {torch_cuda}, driver {gpu.driver}")


def _capability(gpu: Gpu) -> Finding:
    if float(gpu.capability) < 8.0:
        message = f"{gpu.name} has compute capability {gpu.capability}; packed attention and bf16 need 8.0"
        return Finding("GPU generation", "warning", message, "use --param_dtype fp32 --attn_implementation sdpa")
    return ok("GPU generation", "packed attention kernels and bf16 are available")


def _nvcc() -> Finding:
    places = [os.environ.get("CUDA_HOME", ""), "/usr/local/cuda"]
    nvcc = shutil.which("nvcc") or next((f"{p}/bin/nvcc" for p in places if p and Path(p, "bin/nvcc").exists()), None)
    if nvcc is not None:
        return ok("CUDA compiler", nvcc)
    message = "nvcc was not found: models that sleep at --zero_stage 3 compile CUDA code with it"
    return Finding("CUDA compiler", "warning", message, "install the CUDA toolkit, or set CUDA_HOME to its folder")


def _links(count: int, run: Run) -> list[Finding]:
    """Return how the GPUs are connected, by the slowest way between two of them."""
    if count < 2:
        return []
    ways = _ways_between(run(["nvidia-smi", "topo", "-m"]) or "", count)
    if ways and all(way.startswith("NV") for way in ways):
        return [ok("GPU links", f"NVLink between all GPUs ({', '.join(sorted(set(ways)))})")]
    slow = next((way for way in SLOW_LINKS if way in ways), None)
    if slow is None:
        return [ok("GPU links", ", ".join(sorted(set(ways))) or "unknown")]
    message = f"some GPUs reach each other through {SLOW_LINKS[slow]} ({slow}) only"
    cure = "place the ranks of one role on GPUs that NVLink or one PCIe switch connects (CUDA_VISIBLE_DEVICES)"
    return [Finding("GPU links", "warning", message, cure)]


def _ways_between(table: str, count: int) -> list[str]:
    """Return the cells above the diagonal of nvidia-smi's table of GPUs."""
    rows = [line.split() for line in table.splitlines() if re.match(r"GPU\d+\s", line)]
    return [row[1 + other] for number, row in enumerate(rows) for other in range(number + 1, count) if len(row) > count]
