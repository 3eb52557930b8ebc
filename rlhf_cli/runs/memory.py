"""Defaults that depend on memory, and host memory of sleeping roles, from the plan of the run."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TypeVar

from rlhf_cli.backends.cluster.placement import Layout
from rlhf_cli.backends.doctor.gpus import gpus
from rlhf_cli.backends.process.killed import usable_memory
from rlhf_cli.commands.offline import OfflineConfig
from rlhf_cli.commands.online import OnlineConfig
from rlhf_cli.config.base import CommandConfig
from rlhf_cli.config.plan import PlanConfig
from rlhf_cli.planning.changes import best_changes
from rlhf_cli.planning.hardware import GPUS, Hardware, unmeasured_cpu
from rlhf_cli.planning.memory import GIB
from rlhf_cli.planning.phases import Batching, batching_of, gpu_memory, shortage, sleeping_by_node
from rlhf_cli.planning.planner import shapes_of, workload_of
from rlhf_cli.planning.workload import Workload
from rlhf_cli.runs.plan import planner_of

_ConfigT = TypeVar("_ConfigT", bound=CommandConfig)


def hardware_of_ranks(num_ranks: int) -> Hardware:
    """Return this machine as memory for the ranks of an offline run: of its smallest GPU, or of a CPU for all ranks."""
    # From the driver: initializing CUDA here would allocate memory in the driver process.
    memory = min((gpu.memory << 20 for gpu in gpus()), default=None)
    return unmeasured_cpu() if memory is None else _hardware(memory, [num_ranks])


def _hardware(memory: float, node_gpus: Sequence[int]) -> Hardware:
    """Return GPUs with this memory. Their speed does not matter for it."""
    return replace(GPUS["a100-80"], memory=float(memory), num_gpus=max(node_gpus), num_nodes=len(node_gpus))


def online_workload(
    config: OnlineConfig, layout: Layout, *, hardware: Hardware | None = None, has_critic: bool
) -> Workload:
    """Return the workload of a run that is placed on these GPUs; without them, only host memory is known."""
    hardware = hardware or _hardware(0, [island.num_gpus for island in layout.islands])
    return workload_of(config, PlanConfig(), hardware, shapes_of(config), has_critic=has_critic, layout=layout)


def shortage_notice(config: OnlineConfig, work: Workload, batching: Batching) -> str:
    """Return a line with what the plan of a run lacks and the flags that it fits with; "" if it fits.

    Args:
        config: the settings as given, before the layout was filled in.
    """
    lack = shortage(work, gpu_memory(work, batching), batching)
    if not lack:
        return ""
    planner = planner_of(config, PlanConfig())
    changes = best_changes(config, planner(config, work.hardware), planner)
    # A forecast may be wrong, so the run starts.
    if not changes or changes[0].gpus:
        hardware = "this machine" if work.hardware.is_cpu else "these GPUs"
        return f"The plan does not fit {hardware} with any flags: {lack}"
    return f"The plan does not fit: {lack}; it fits with {changes[0].flags}"


def offline_batching(config: OfflineConfig, hardware: Hardware, *, num_ranks: int, longest: int) -> Batching:
    """Choose gradient checkpointing and tokens per micro-batch for the memory of GPUs or of this machine.

    Args:
        longest: tokens of the longest item of the data.
    """
    config = config.updated({"num_processes": num_ranks})
    work = workload_of(config, PlanConfig(), hardware, shapes_of(config), has_critic=False)
    return batching_of(replace(work, longest=-(-longest // config.deepspeed.sequence_parallel_size)))


def with_batching(config: _ConfigT, batching: Batching) -> _ConfigT:
    """Return the settings with the chosen micro-batches."""
    values = {"gradient_checkpointing": batching.recomputes, "train_max_tokens_per_gpu": batching.max_tokens}
    return config.updated(values)


def sleep_memory_fact(work: Workload, *, has_gpus: bool) -> dict[str, str]:
    """Return a summary line about the host memory of sleeping roles, if any."""
    if not (has_gpus and work.models_sleep):
        return {}
    return described(sleeping_by_node(work), usable_memory())


def described(by_node: Mapping[int, float], available: int) -> dict[str, str]:
    """Compare the need of the fullest node with this node's memory."""
    needed = max(by_node.values())
    line = f"{needed / GIB:.0f} GiB per node while roles sleep, up to twice that if pinned buffers are rounded up"
    has = f"{available / GIB:.0f} GiB"
    # Warn instead of failing, because the estimate is rough.
    return {"Host memory": f"{line}; this node has {has}" + (", WHICH IS NOT ENOUGH" if needed > available else "")}
