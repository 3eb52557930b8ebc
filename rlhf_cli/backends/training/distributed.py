"""Process group of a training role, and collectives over the ranks.

Ranks are started by a launcher or as Ray actors, which set the same environment variables. A process without these
variables is the only rank.
"""

import functools
import gc
import os
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import TypeVar, cast

import deepspeed
import torch
import torch.distributed as dist

from rlhf_cli.backends.training.distributed_env import free_port
from rlhf_cli.backends.training.extension_builds import (
    is_built,
    plain_architectures,
    remove_stale_locks,
    use_own_ninja,
)
from rlhf_cli.errors import UsageError

_SHARED_MEMORY = "deepspeed_shm_comm"
"""DeepSpeed's operator for shared-memory communication between CPU ranks. Compiling it takes over a minute."""

T = TypeVar("T")


def join_process_group(*, timeout: timedelta = timedelta(minutes=30)) -> None:
    """Join the process group described by environment variables, or create a group with a single rank."""
    if dist.is_initialized():
        return
    if "RANK" not in os.environ:
        os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_SIZE": "1"}
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    os.environ.setdefault("LOCAL_SIZE", os.environ.get("LOCAL_WORLD_SIZE", os.environ["WORLD_SIZE"]))
    backend = "nccl" if torch.cuda.is_available() else "gloo"
    if torch.cuda.is_available():
        # Before NCCL starts, which uses the current device.
        if int(os.environ["LOCAL_RANK"]) >= torch.cuda.device_count():
            raise UsageError(
                f"{os.environ['LOCAL_SIZE']} ranks on this machine, but only {torch.cuda.device_count()} GPUs are "
                "visible: start one rank per GPU, or run on the CPU with CUDA_VISIBLE_DEVICES=-1"
            )
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    # Before deepspeed.init_distributed, which may compile operators.
    use_own_ninja()
    plain_architectures()
    remove_stale_locks()
    _load_muon_uncompiled()
    if os.environ["WORLD_SIZE"] == "1":
        _leave_out_shared_memory()
    # DeepSpeed calls gc.collect up to a dozen times per engine. Frozen objects, such as imported modules, are skipped.
    gc.freeze()
    deepspeed.init_distributed(dist_backend=backend, timeout=timeout, verbose=False)
    _unlink_shared_buffers()


def compile_notice() -> list[str]:
    """Return a line if several CPU ranks that join a process group first compile an operator."""
    if os.environ.get("WORLD_SIZE", "1") == "1" or torch.cuda.is_available() or is_built(_SHARED_MEMORY):
        return []
    return ["DeepSpeed compiles its shared-memory operator for CPU ranks: once, for a minute or more"]


def _unlink_shared_buffers() -> None:
    """Unlink DeepSpeed's shared-memory buffers as soon as all ranks have opened them."""
    # On a CPU, DeepSpeed keeps hundreds of megabytes per rank in /dev/shm. Unlinked files disappear with the last rank,
    # even if it is killed. Otherwise, a killed run would leave them forever, and a later run with the same port would
    # open them.
    dist.barrier()
    group = f"{os.environ['MASTER_ADDR']}_{os.environ['MASTER_PORT']}"
    for path in Path("/dev/shm").glob(f"deepspeed_allreduce_buffer_*{group}_*"):
        path.unlink(missing_ok=True)


def leave_process_group() -> None:
    """Leave the process group, so that no rank waits for this one. No-op outside a group."""
    if dist.is_initialized():
        dist.destroy_process_group()


def device() -> torch.device:
    """Return this rank's device."""
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


def num_gpus() -> int:
    """Return the number of GPUs in the group: one per rank, or 0."""
    return dist.get_world_size() if torch.cuda.is_available() else 0


@functools.cache
def sequence_group(ranks_per_sequence: int) -> dist.ProcessGroup | None:
    """Return the sequence-parallel group of this rank, or None without sequence parallelism. Call it on all ranks."""
    if ranks_per_sequence == 1:
        return None
    # Every rank must create every group: `new_group` is a collective over all ranks.
    own = None
    for first in range(0, dist.get_world_size(), ranks_per_sequence):
        members = list(range(first, first + ranks_per_sequence))
        group = dist.new_group(members)
        own = group if dist.get_rank() in members else own
    return own


def reduce_metrics(metrics: dict[str, float], *, ranks_per_pack: int = 1) -> dict[str, float]:
    """Reduce metrics over all ranks: maximum for names ending in `_max`, sum for all others.

    Ranks that share a pack have equal metrics, which count once. All ranks must pass the same names in the same order.
    """
    if dist.get_world_size() == 1:
        return metrics
    values = torch.tensor(list(metrics.values()), dtype=torch.float64, device=device())
    is_max = torch.tensor([name.endswith("_max") for name in metrics], dtype=torch.bool, device=values.device)
    sums, maxima = values.clone(), values
    dist.all_reduce(sums, op=dist.ReduceOp.SUM)
    dist.all_reduce(maxima, op=dist.ReduceOp.MAX)
    # Each value was summed once for every rank that shares the pack.
    sums /= ranks_per_pack
    return dict(zip(metrics, torch.where(is_max, maxima, sums).tolist(), strict=True))


def summed(values: torch.Tensor) -> torch.Tensor:
    """Sum a tensor over all ranks, in place. Call it on all ranks."""
    if dist.get_world_size() > 1:
        dist.all_reduce(values, op=dist.ReduceOp.SUM)
    return values


def gather_rows(rows: torch.Tensor, *, ranks_per_pack: int = 1) -> tuple[torch.Tensor, int]:
    """Concatenate rows from all ranks. Returns the rows on this rank's device, and the index of this rank's first row.

    The number of rows may differ between ranks. Ranks that share a pack have equal rows, which are included once. Call
    it on all ranks.
    """
    if dist.get_world_size() == 1:
        return rows, 0
    # Objects instead of tensors, because `all_gather` requires equal sizes.
    parts: list[torch.Tensor] = [rows] * dist.get_world_size()
    dist.all_gather_object(parts, rows.cpu())
    parts = parts[::ranks_per_pack]
    start = sum(len(part) for part in parts[: dist.get_rank() // ranks_per_pack])
    return torch.cat(parts).to(rows.device), start


def any_rank(flag: bool) -> bool:
    """Return whether `flag` is true on any rank. Call it on all ranks."""
    if dist.get_world_size() == 1:
        return flag
    votes = torch.tensor(int(flag), device=device())
    dist.all_reduce(votes, op=dist.ReduceOp.MAX)
    return bool(votes.item())


def by_first_rank(decide: Callable[[], T]) -> T:
    """Run `decide` on rank 0 and return the result on all ranks. A UsageError is raised on all ranks.

    Call it on all ranks.
    """
    # If each rank decided alone, files that differ between machines would lead to different decisions, and the other
    # ranks would wait forever for a rank that has raised an error.
    outcome: list[object] = [None, None]
    if dist.get_rank() == 0:
        try:
            outcome[0] = decide()
        except UsageError as error:
            outcome[1] = str(error)
    if dist.get_world_size() > 1:
        dist.broadcast_object_list(outcome)
    if outcome[1] is not None:
        raise UsageError(outcome[1])
    return cast(T, outcome[0])


def barrier() -> None:
    """Wait until all ranks have reached this point."""
    if dist.get_world_size() > 1:
        dist.barrier()


def _load_muon_uncompiled() -> None:
    """Import DeepSpeed's Muon without loading Inductor. With torch before 2.13, Inductor is loaded (about 2 s)."""
    # DeepSpeed imports Muon for a type check of the optimizer. The module decorates functions with torch.compile, which
    # loads Inductor (two seconds) unless another backend is set. torch before 2.13 cannot set the default backend.
    if not hasattr(torch.compiler, "set_default_backend"):
        return
    torch.compiler.set_default_backend("eager")
    try:
        import deepspeed.runtime.zero.muon.muon_optimizer  # noqa: F401
    finally:
        torch.compiler.set_default_backend(None)


def _leave_out_shared_memory() -> None:
    """Prevent DeepSpeed from compiling the shared-memory operator. Use it only with a single rank."""
    # deepspeed.comm compiles the operator only if it is listed as compatible.
    deepspeed.ops.__compatible_ops__[_SHARED_MEMORY] = False
