"""This process's place among the ranks of one training group.

Leaves out how ranks are started: by nobody (one process), by a launcher, or by Ray actors, which set the same
environment variables.
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

from rlhf_cli.backends.training.deepspeed_start import leave_out_shared_memory, load_muon_uncompiled
from rlhf_cli.backends.training.distributed_env import free_port
from rlhf_cli.backends.training.extension_builds import remove_stale_locks, use_own_ninja
from rlhf_cli.errors import UsageError
from rlhf_cli.models.host_memory import keep_freed_memory

T = TypeVar("T")


def join_process_group(*, timeout: timedelta = timedelta(minutes=30)) -> None:
    """Join the ranks announced in the environment, or make a group of one where nothing is announced."""
    if dist.is_initialized():
        return
    if "RANK" not in os.environ:
        os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_SIZE": "1"}
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    os.environ.setdefault("LOCAL_SIZE", os.environ.get("LOCAL_WORLD_SIZE", os.environ["WORLD_SIZE"]))
    backend = "nccl" if torch.cuda.is_available() else "gloo"
    if not torch.cuda.is_available():
        keep_freed_memory()
    else:
        if int(os.environ["LOCAL_RANK"]) >= torch.cuda.device_count():
            raise UsageError(
                f"{os.environ['LOCAL_SIZE']} ranks are wanted on this machine, which shows "
                f"{torch.cuda.device_count()} GPUs: start as many, or hide them with CUDA_VISIBLE_DEVICES=-1"
            )
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    use_own_ninja()
    remove_stale_locks()
    load_muon_uncompiled()
    if os.environ["WORLD_SIZE"] == "1":
        leave_out_shared_memory()
    gc.freeze()  # DeepSpeed collects garbage up to a dozen times for each engine, and modules are none
    deepspeed.init_distributed(dist_backend=backend, timeout=timeout, verbose=False)
    _unlink_shared_buffers()


def _unlink_shared_buffers() -> None:
    """Take the names of DeepSpeed's shared buffers away once every rank has opened them.

    On a CPU it keeps hundreds of megabytes for each rank in /dev/shm. Without names they go when the last rank does,
    however it ends; with names a killed run would leave them there for good, and a later one on the same port would
    open them.
    """
    dist.barrier()
    group = f"{os.environ['MASTER_ADDR']}_{os.environ['MASTER_PORT']}"
    for path in Path("/dev/shm").glob(f"deepspeed_allreduce_buffer_*{group}_*"):
        path.unlink(missing_ok=True)


def leave_process_group() -> None:
    """Leave the group, so that no rank waits for this one; does nothing outside a group."""
    if dist.is_initialized():
        dist.destroy_process_group()


def device() -> torch.device:
    """Return the device this rank computes on."""
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


def num_gpus() -> int:
    """Return the number of GPUs that compute as one group: one for each rank, or none."""
    return dist.get_world_size() if torch.cuda.is_available() else 0


@functools.cache
def sequence_group(ranks_per_sequence: int) -> dist.ProcessGroup | None:
    """Return the group of neighbouring ranks that share each sequence with this one; None for one rank a sequence.

    Every rank must call it.
    """
    if ranks_per_sequence == 1:
        return None
    own = None
    for first in range(0, dist.get_world_size(), ranks_per_sequence):
        members = list(range(first, first + ranks_per_sequence))
        group = dist.new_group(members)
        own = group if dist.get_rank() in members else own
    return own


def reduce_metrics(metrics: dict[str, float], *, ranks_per_pack: int = 1) -> dict[str, float]:
    """Return the same metrics over all ranks: names ending in `_max` as maxima, all others as sums.

    Ranks that compute a pack together have the same metrics, which count once. Every rank must call it with the same
    names in the same order.
    """
    if dist.get_world_size() == 1:
        return metrics
    values = torch.tensor(list(metrics.values()), dtype=torch.float64, device=device())
    is_max = torch.tensor([name.endswith("_max") for name in metrics], dtype=torch.bool, device=values.device)
    sums, maxima = values.clone(), values
    dist.all_reduce(sums, op=dist.ReduceOp.SUM)
    dist.all_reduce(maxima, op=dist.ReduceOp.MAX)
    sums /= ranks_per_pack
    return dict(zip(metrics, torch.where(is_max, maxima, sums).tolist(), strict=True))


def summed(values: torch.Tensor) -> torch.Tensor:
    """Return the sum of the tensor over all ranks; every rank must call it."""
    if dist.get_world_size() > 1:
        dist.all_reduce(values, op=dist.ReduceOp.SUM)
    return values


def gather_rows(rows: torch.Tensor, *, ranks_per_pack: int = 1) -> tuple[torch.Tensor, int]:
    """Return the rows of all ranks end to end, on this rank's device, and where this rank's begin; every rank must call
    it.

    Ranks may have different numbers of rows, of the same shape and type. Ranks that compute a pack together have the
    same rows, which are there once.
    """
    if dist.get_world_size() == 1:
        return rows, 0
    parts: list[torch.Tensor] = [rows] * dist.get_world_size()
    dist.all_gather_object(parts, rows.cpu())
    parts = parts[::ranks_per_pack]
    start = sum(len(part) for part in parts[: dist.get_rank() // ranks_per_pack])
    return torch.cat(parts).to(rows.device), start


def any_rank(flag: bool) -> bool:
    """Return whether `flag` is true on at least one rank; every rank must call it."""
    if dist.get_world_size() == 1:
        return flag
    votes = torch.tensor(int(flag), device=device())
    dist.all_reduce(votes, op=dist.ReduceOp.MAX)
    return bool(votes.item())


def by_first_rank(decide: Callable[[], T]) -> T:
    """Return what `decide` returns on the first rank; its UsageError is raised on every rank. Every rank must call it.

    Other ranks would wait for a first rank that refuses to go on, and their own files may differ from its files.
    """
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
    """Wait until every rank is here."""
    if dist.get_world_size() > 1:
        dist.barrier()
