"""Hardware that a plan is made for: a table of GPUs, this machine, or values given by flags."""

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec

from rlhf_cli.backends.doctor.gpus import Gpu, gpus
from rlhf_cli.backends.process.killed import usable_memory
from rlhf_cli.config.plan import GpuName, PlanConfig
from rlhf_cli.environment import processor_name
from rlhf_cli.errors import UsageError, full_memory
from rlhf_cli.models.fused import is_installed

GIB = 2**30
_TERA, _GIGA = 1e12, 1e9


@dataclass(frozen=True)
class Hardware:
    """Processors of one kind on equal nodes.

    - `memory`: bytes per GPU that a program can allocate; on a CPU, of the machine.
    - `flops`: dense bf16 operations per second with float32 accumulation, from data sheets.
    - `bandwidth`: memory bandwidth in bytes per second.
    - `link`, `network`, `host_link`: bytes per second and direction of a GPU to others on the node, to other nodes, and
      to host memory.
    - `host_memory`: bytes per node, None if unknown.
    - `has_liger`, `has_flash`: whether liger-kernel and flash-attn are installed; for GPUs of the table, only the first
      is assumed.
    - `assumption`: completes a sentence with what was assumed about the GPUs' speed.
    """

    name: str
    memory: float
    flops: float
    bandwidth: float
    link: float
    network: float
    host_link: float
    num_gpus: int = 1
    num_nodes: int = 1
    host_memory: float | None = None
    is_cpu: bool = False
    has_liger: bool = True
    has_flash: bool = False
    assumption: str = ""

    @property
    def node_gpus(self) -> list[int]:
        """Number of GPUs per node."""
        return [self.num_gpus] * self.num_nodes

    @property
    def total_gpus(self) -> int:
        """Number of GPUs on all nodes."""
        return self.num_gpus * self.num_nodes

    @property
    def title(self) -> str:
        """Describe nodes and GPUs."""
        if self.is_cpu:
            return f"this CPU ({self.num_gpus} cores, {self.memory / GIB:.0f} GiB)"
        nodes = f"{self.num_nodes} nodes with " if self.num_nodes > 1 else ""
        return f"{nodes}{self.num_gpus} x {self.name} ({self.memory / GIB:.0f} GiB)"


def _gpu(name: str, gib: float, tflops: float, tb: float, link: float, network: float, host: float) -> Hardware:
    speeds = (tflops * _TERA, tb * _TERA, link * _GIGA, network * _GIGA, host * _GIGA)
    return Hardware(name, gib * GIB, *speeds)


GPUS: dict[GpuName, Hardware] = {
    "a100-40": _gpu("A100 40GB", 39.4, 312, 1.555, 300, 25, 25),
    "a100-80": _gpu("A100 80GB", 79.2, 312, 2.039, 300, 25, 25),
    "h100": _gpu("H100", 79.1, 989, 3.35, 450, 50, 55),
    "h200": _gpu("H200", 139.8, 989, 4.8, 450, 50, 55),
    "b200": _gpu("B200", 178.3, 2250, 8.0, 900, 50, 55),
    "l40s": _gpu("L40S", 44.4, 362, 0.864, 25, 12.5, 25),
    "rtx4090": _gpu("RTX 4090", 23.5, 165, 1.008, 20, 1.25, 25),
}
"""GPUs by the value of --gpu: memory that CUDA reports in GiB, TFLOP/s and TB/s from NVIDIA's data sheets (SXM forms),
and GB/s per direction of NVLink or PCIe, of a network with one port per GPU, and of the link to host memory."""

_NAMES: dict[str, GpuName] = {
    "H200": "h200",
    "H100": "h100",
    "B200": "b200",
    "L40S": "l40s",
    "4090": "rtx4090",
    "A100-40G": "a100-40",
    "A100": "a100-80",
}
"""Rows by a part of a GPU's name, in NVIDIA's driver or in Ray."""


_ASSUMED = "; {} is planned with the speed of an A100"
_OF_GPUS = (
    *("num_gpus", "num_nodes", "gpu_memory_gib", "gpu_tflops", "gpu_bandwidth", "gpu_link", "network"),
    "price_per_gpu_hour",
)
"""Settings that only a plan for GPUs reads."""
# Placements list all GPUs, and a plan compares hundreds of them.
_MOST_GPUS = 8192


def hardware_of(plan: PlanConfig) -> Hardware:
    """Return the hardware that the settings name; by default this machine's.

    Raises:
        UsageError: GPUs are requested but of no known kind, too many, or with `--gpu cpu`.
    """
    of_gpus = plan.changed(*_OF_GPUS)
    if plan.gpu == "cpu":
        if of_gpus:
            raise UsageError(f"--{of_gpus} describes GPUs, which --gpu cpu has none of: remove one of the two")
        return _with_memory(this_cpu(), plan)
    here = gpus() if plan.gpu is None else []
    if plan.gpu is None and not here and not plan.describes_gpu:
        if of_gpus:
            raise UsageError(f"this machine has no GPU: set --gpu {', '.join(GPUS)}, or --gpu_memory_gib and others")
        return _with_memory(this_cpu(), plan)
    base = GPUS[plan.gpu] if plan.gpu is not None and plan.gpu != "cpu" else _of_driver(here)
    host = _given(plan.host_memory_gib, GIB)
    values = {
        "memory": _given(plan.gpu_memory_gib, GIB),
        "flops": _given(plan.gpu_tflops, _TERA),
        "bandwidth": _given(plan.gpu_bandwidth, _TERA),
        "link": _given(plan.gpu_link, _GIGA),
        "network": _given(plan.network, _GIGA),
        "host_memory": host if host is not None or not here else usable_memory(),
    }
    given = {name: value for name, value in values.items() if value is not None}
    base = replace(base, assumption="") if {"flops", "bandwidth"} <= given.keys() else base
    num_gpus = plan.num_gpus or max(1, len(here))
    if num_gpus * plan.num_nodes > _MOST_GPUS:
        raise UsageError(
            f"--num_gpus {num_gpus} with --num_nodes {plan.num_nodes}: a plan has at most {_MOST_GPUS:,} GPUs; lower "
            "one of them"
        )
    return replace(base, **given, num_gpus=num_gpus, num_nodes=plan.num_nodes)  # type: ignore[arg-type]


def _with_memory(cpu: Hardware, plan: PlanConfig) -> Hardware:
    given = _given(plan.host_memory_gib, GIB)
    return cpu if given is None else replace(cpu, memory=given, host_memory=given)


def _given(value: float | None, unit: float) -> float | None:
    return None if value is None else value * unit


def _of_driver(here: list[Gpu]) -> Hardware:
    """Return the row of this machine's smallest GPU; without GPUs, or for an unknown one, speeds of an A100."""
    if not here:
        return replace(GPUS["a100-80"], name="own GPU", assumption=_ASSUMED.format("own GPU"))
    smallest = min(here, key=lambda gpu: gpu.memory)
    memory = smallest.memory * 2.0**20
    return replace(_with_packages(_of_name(smallest.name)), name=smallest.name, memory=memory)


def _with_packages(row: Hardware) -> Hardware:
    """Return the row with the packages with kernels that this machine has."""
    return replace(row, has_liger=is_installed(), has_flash=find_spec("flash_attn") is not None)


def _of_name(name: str) -> Hardware:
    """Return the row of a GPU's name; for an unknown one, the speeds of an A100."""
    known = next((key for part, key in _NAMES.items() if part in name), None)
    if known is not None:
        return GPUS[known]
    return replace(GPUS["a100-80"], assumption=_ASSUMED.format(name))


def hardware_of_run(node_gpus: Sequence[int], kinds: Sequence[str]) -> Hardware | None:
    """Return the GPUs of a run: the smallest by this machine's driver, otherwise by Ray's names; None if unknown.

    Args:
        node_gpus: GPUs per node.
        kinds: Ray's names of the GPUs in the cluster, such as "H100".
    """
    # From the driver: initializing CUDA here would allocate memory in the driver process.
    here = gpus()
    # Ray's A100 may have 40 or 80 GB.
    rows = [GPUS["a100-40"] if kind == "A100" else _of_name(kind) for kind in kinds]
    if here:
        base = replace(_of_driver(here), host_memory=float(usable_memory()))
    elif rows and not any(row.assumption for row in rows):
        base = _with_packages(min(rows, key=lambda row: row.memory))
    else:
        return None
    return replace(base, num_gpus=max(node_gpus), num_nodes=len(node_gpus))


_ASSUMED_SPEED = (1e11, 1e10)
"""Operations and bytes per second of a CPU that cannot be measured: a few cores with two channels of memory."""


def this_cpu() -> Hardware:
    """Measure this machine's CPU, for about 0.2 seconds. If host memory is full, its speed is assumed."""
    try:
        return _cpu(*_measured_speed())
    except (MemoryError, RuntimeError) as error:
        if full_memory(error) is None:
            raise
        return unmeasured_cpu()


def unmeasured_cpu() -> Hardware:
    """Return this machine's memory with assumed speeds, which suffice to compare changes of a plan with each other."""
    return _cpu(*_ASSUMED_SPEED)


def _cpu(flops: float, bandwidth: float) -> Hardware:
    cores, memory = len(os.sched_getaffinity(0)), float(usable_memory())
    link = bandwidth / 4  # a copy between processes reads and writes twice
    return Hardware(
        processor_name() or "CPU", memory, flops, bandwidth, link, link, link, cores, 1, memory, is_cpu=True
    )


def _measured_speed() -> tuple[float, float]:
    """Return operations per second of a matrix product in the dtype of `auto`, and bytes per second of a copy."""
    import torch

    from rlhf_cli.environment import fast_dtype

    size = 768
    dtype = torch.bfloat16 if fast_dtype()[0] == "bf16" else torch.float32
    left = torch.ones(size, size, dtype=dtype)
    flops = 2 * size**3 / _seconds(lambda: left @ left)
    values = torch.ones(2**23)
    return flops, 2 * values.nbytes / _seconds(values.clone)


def _seconds(work: Callable[[], object]) -> float:
    """Return the shortest time of a few calls."""
    work()
    shortest, end = float("inf"), time.perf_counter() + 0.1
    while time.perf_counter() < end:
        start = time.perf_counter()
        work()
        shortest = min(shortest, time.perf_counter() - start)
    return shortest
