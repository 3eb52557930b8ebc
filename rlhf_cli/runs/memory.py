"""Defaults that depend on GPU memory, and host memory of sleeping roles, from the plan of the run."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TypeVar

import psutil

from rlhf_cli.backends.cluster.placement import Layout
from rlhf_cli.backends.doctor.gpus import gpus
from rlhf_cli.commands.offline import OfflineConfig
from rlhf_cli.commands.online import OnlineConfig
from rlhf_cli.config.base import CommandConfig
from rlhf_cli.config.plan import PlanConfig
from rlhf_cli.planning.hardware import GPUS, Hardware
from rlhf_cli.planning.memory import GIB
from rlhf_cli.planning.phases import Batching, batching_of, sleeping_by_node
from rlhf_cli.planning.planner import shapes_of, workload_of
from rlhf_cli.planning.workload import Workload

_ConfigT = TypeVar("_ConfigT", bound=CommandConfig)


def gpu_bytes() -> int | None:
    """Return the memory of the smallest GPU on this machine, or None without GPUs."""
    # From the driver: initializing CUDA here would allocate memory in the driver process.
    return min((gpu.memory << 20 for gpu in gpus()), default=None)


def _hardware(memory: float, node_gpus: Sequence[int]) -> Hardware:
    """Return the GPUs of a run. Their speed does not matter for memory."""
    return replace(GPUS["a100-80"], memory=float(memory), num_gpus=max(node_gpus), num_nodes=len(node_gpus))


def online_workload(config: OnlineConfig, layout: Layout, *, memory: float = 0.0, has_critic: bool) -> Workload:
    """Return the workload of a run that is placed on GPUs with this memory."""
    num_gpus = [island.num_gpus for island in layout.islands]
    hardware = _hardware(memory, num_gpus)
    return workload_of(config, PlanConfig(), hardware, shapes_of(config), has_critic=has_critic, layout=layout)


def offline_batching(config: OfflineConfig, *, memory: float, num_ranks: int, longest: int) -> Batching:
    """Choose gradient checkpointing and tokens per micro-batch for a GPU's memory.

    Args:
        longest: tokens of the longest item of the data.
    """
    config = config.updated({"num_processes": num_ranks})
    work = workload_of(config, PlanConfig(), _hardware(memory, [num_ranks]), shapes_of(config), has_critic=False)
    return batching_of(replace(work, longest=-(-longest // config.deepspeed.sequence_parallel_size)))


def with_batching(config: _ConfigT, batching: Batching) -> _ConfigT:
    """Return the settings with the chosen micro-batches."""
    values = {"gradient_checkpointing": batching.recomputes, "train_max_tokens_per_gpu": batching.max_tokens}
    return config.updated(values)


def sleep_memory_fact(work: Workload, *, has_gpus: bool) -> dict[str, str]:
    """Return a summary line about the host memory of sleeping roles, if any."""
    if not (has_gpus and work.models_sleep):
        return {}
    return described(sleeping_by_node(work), psutil.virtual_memory().total)


def described(by_node: Mapping[int, float], available: int) -> dict[str, str]:
    """Compare the need of the fullest node with this node's memory."""
    needed = max(by_node.values())
    line = f"{needed / GIB:.0f} GiB per node while roles sleep, up to twice that if pinned buffers are rounded up"
    has = f"{available / GIB:.0f} GiB"
    # Warn instead of failing, because the estimate is rough.
    return {"Host memory": f"{line}; this node has {has}" + (", WHICH IS NOT ENOUGH" if needed > available else "")}
