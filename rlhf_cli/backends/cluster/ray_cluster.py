"""Ray cluster: starts or joins one, reserves GPUs, and cleans up at the end.

`placement` plans the layout; `worker` and `start` run the roles.
"""

import os
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn

import ray
import torch
from ray.util.placement_group import (
    PlacementGroup,
    placement_group,
    placement_group_table,
    remove_placement_group,
)
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from rlhf_cli.backends.cluster.placement import Layout, Seat, on_nodes
from rlhf_cli.backends.process.killed import is_shm_full, kernel_has_killed
from rlhf_cli.backends.process.signals import children_apart
from rlhf_cli.errors import RunError, Shortage, UsageError, first_line, full_memory

_RESERVE_SECONDS = 120
_START_TRIES = 2
_SLOW_START = "timed out during startup"
"""Part of Ray's error message if its processes start too slowly, on a busy machine."""
# More threads would not help: with a GPU, the CPU only packs data and launches kernels.
_GPU_RANK_THREADS = 8
"""Maximum CPU threads for a process with a GPU."""
_KIND = "accelerator_type:"
# Effectively unlimited: without GPUs, a slot is a process, and processes share the cores.
_CPU_ONLY_PLACES = 1024
"""Number of slots on a node without GPUs."""


PROCESS_DEATHS = (ray.exceptions.RayActorError, ray.exceptions.OutOfMemoryError)
"""Ray's exceptions for a dead process. Ray raises the second one if its memory monitor has killed the process."""


_ENDED_SILENTLY = "exits with a connection error"
"""Part of Ray's message about a process that ended without a word, as after SIGKILL."""


def may_have_gpus() -> bool:
    """Return whether the cluster may have GPUs: this machine has some, or RAY_ADDRESS is set."""
    return bool(os.environ.get("RAY_ADDRESS")) or torch.cuda.is_available()


def death_reason(error: Exception, role: str) -> str | Shortage:
    """Describe why a process of a role died: full memory, or the first line of Ray's error."""
    if isinstance(error, RunError) and error.shortage is not None:
        return error.shortage
    kind, doubt = full_memory(error), ""
    # If the kernel has killed a process for memory, Ray reports only that the process is gone.
    if kind is None and isinstance(error, PROCESS_DEATHS):
        if kernel_has_killed():
            kind = "host memory"
        elif _ENDED_SILENTLY in str(error):
            kind, doubt = "host memory", "killed from outside, or crashed with an error at the end of its log"
            if is_shm_full():
                kind, doubt = "space in /dev/shm", "ended while /dev/shm was full"
    return first_line(error) if kind is None else Shortage(kind, role=role, doubt=doubt)


@dataclass(frozen=True)
class Cluster:
    """Resources of a running Ray cluster."""

    # Ray's node IDs, in the order of `node_gpus`.
    node_ids: list[str]
    # GPUs per node, largest first.
    node_gpus: list[int]
    num_cpus: float
    has_gpus: bool
    # Whether this process started the cluster.
    is_local: bool
    # Ray's names of the kinds of GPUs, such as "H100"; empty if unknown.
    gpu_kinds: tuple[str, ...] = ()

    @property
    def unit(self) -> str:
        """Return the name of a slot on this cluster."""
        return "GPU" if self.has_gpus else "process"

    def threads(self, num_processes: int) -> int:
        """Return the CPU threads for each process in a role. Roles run in turn, so each role can use all cores."""
        # Use OMP_NUM_THREADS only if this process started Ray: in a submitted job, Ray sets it for another machine.
        chosen = os.environ.get("OMP_NUM_THREADS", "")
        if self.is_local and chosen.isdigit():
            return max(1, int(chosen))
        share = max(1, (os.cpu_count() or 1) // num_processes)
        return min(share, _GPU_RANK_THREADS) if self.has_gpus else share


@contextmanager
def ray_cluster() -> Iterator[Cluster]:
    """Join the cluster at RAY_ADDRESS, or start one on this machine. At the end, leave or stop it."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    # Older Ray versions clear CUDA_VISIBLE_DEVICES in actors with num_gpus=0, but tensor-parallel engines on shared
    # GPUs use num_gpus=0 and need it.
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    address = os.environ.get("RAY_ADDRESS")
    _join_or_start(partial(_init_ray, address), address=address)
    try:
        yield _describe_cluster(is_local=not address)
    finally:
        ray.shutdown()


def _init_ray(address: str | None) -> None:
    with children_apart():
        ray.init(
            # "local" always starts a new cluster. Without an address, Ray could join one that another user started.
            address=address or "local",
            # No dashboard for a cluster that only this run uses.
            include_dashboard=None if address else False,
            log_to_driver=False,
            logging_level="error",
        )


def _join_or_start(init: Callable[[], None], *, address: str | None, tries: int = _START_TRIES) -> None:
    """Call `init`, and retry if Ray's processes were too slow. Converts Ray's startup errors to one-line errors."""
    try:
        init()
    except ConnectionError as error:
        # `ray start` requires tokens if ~/.ray/auth_token exists, but ray.init with an address sends none by default.
        raise UsageError(
            f"RAY_ADDRESS={address}: no Ray cluster responds ({error}); if it was started with a token, set "
            "RAY_AUTH_MODE=token"
        ) from error
    except OSError as error:
        if "AF_UNIX" not in str(error):
            raise
        variable = "RAY_TMPDIR" if os.environ.get("RAY_TMPDIR") else "TMPDIR"
        raise UsageError(
            f"{variable}={os.environ.get(variable)}: too long for Ray's socket paths, which are limited to 107 bytes; "
            "set RAY_TMPDIR to a shorter folder, such as /tmp"
        ) from error
    # Ray raises a plain Exception.
    except Exception as error:
        if _SLOW_START not in str(error):
            raise
        # Clean up the partial start before trying again.
        ray.shutdown()
        if tries > 1:
            _join_or_start(init, address=address, tries=tries - 1)
            return
        raise RunError(
            f"Ray's processes did not start in time, {_START_TRIES} times in a row: the machine is too busy or the "
            "memory is full; try again when it is idle"
        ) from error


def _describe_cluster(*, is_local: bool) -> Cluster:
    nodes = sorted((node for node in ray.nodes() if node["Alive"]), key=_num_gpus, reverse=True)
    gpus = [_num_gpus(node) for node in nodes]
    has_gpus = any(gpus)
    return Cluster(
        node_ids=[node["NodeID"] for node in nodes],
        node_gpus=gpus if has_gpus else [_CPU_ONLY_PLACES] * len(nodes),
        num_cpus=sum(node["Resources"].get("CPU", 0) for node in nodes),
        has_gpus=has_gpus,
        is_local=is_local,
        gpu_kinds=tuple(sorted({kind for node in nodes for kind in _gpu_kinds(node["Resources"])})),
    )


def _num_gpus(node: dict[str, Any]) -> int:
    return int(node["Resources"].get("GPU", 0))


def _gpu_kinds(resources: Iterable[str]) -> list[str]:
    """Return the kinds of a node's GPUs, which Ray adds to its resources as "accelerator_type:H100"."""
    return [name.removeprefix(_KIND) for name in resources if name.startswith(_KIND)]


class Reservation:
    """Reserves a layout's slots on the cluster until `release`. `layout` contains the selected nodes."""

    def __init__(self, layout: Layout, cluster: Cluster) -> None:
        self._cluster = cluster
        self.layout = layout
        self._cpus = _cpus_per_place(layout, cluster)
        self._groups = [self._ask(index) for index in range(len(layout.islands))]
        self._wait()
        self.layout = on_nodes(layout, self._nodes())

    def options(self, seat: Seat) -> dict[str, Any]:
        """Return the Ray actor options for this slot."""
        group = self._groups[seat.island]
        users = max(len(self.layout.users(seat.island, gpu)) for gpu in seat.gpus)
        return {
            "num_cpus": _floor(self._cpus / users),
            "num_gpus": self._gpu_share(seat, users) if self._cluster.has_gpus else 0,
            "scheduling_strategy": PlacementGroupSchedulingStrategy(
                group, placement_group_bundle_index=seat.gpus[0], placement_group_capture_child_tasks=False
            ),
        }

    def release(self) -> None:
        """Release all slots. No-op if the cluster is already gone."""
        with suppress(ray.exceptions.RaySystemError, ConnectionError):
            for group in self._groups:
                remove_placement_group(group)

    def _gpu_share(self, seat: Seat, users: int) -> float:
        if not seat.shared:
            return len(seat.gpus)
        # Ray supports no fractions of multiple GPUs, so a tensor-parallel engine on shared GPUs reserves none. It
        # receives the GPU IDs separately.
        return _floor(1 / users) if len(seat.gpus) == 1 else 0

    def _ask(self, index: int) -> PlacementGroup:
        """Create a placement group for an island."""
        # One bundle per GPU, so that ranks never share a GPU by accident. A tensor-parallel engine with exclusive GPUs
        # needs all of them in one bundle, because an actor cannot span bundles.
        size = self.layout.islands[index].num_gpus
        is_engines_own = any(s.island == index and not s.shared and len(s.gpus) > 1 for s in self.layout.seats)
        count, gpus = (1, size) if is_engines_own else (size, 1)
        bundle = {"CPU": self._cpus} | ({"GPU": float(gpus)} if self._cluster.has_gpus else {})
        return placement_group([bundle] * count, strategy="STRICT_PACK")

    def _nodes(self) -> list[int]:
        """Return each island's node number. Nodes that have joined the cluster later are numbered last."""
        numbers = {node: number for number, node in enumerate(self._cluster.node_ids)}
        holders = [placement_group_table(group)["bundles_to_node_id"][0] for group in self._groups]
        return [numbers.setdefault(node, len(numbers)) for node in holders]

    def _wait(self) -> None:
        """Wait until all slots are reserved."""
        # One second at a time, because Python handles signals only between calls. `wait` instead of `ready`, which
        # would start a worker process for a task.
        deadline = time.monotonic() + _RESERVE_SECONDS
        for group in self._groups:
            while not group.wait(1):
                if time.monotonic() > deadline:
                    self._give_up()

    def _give_up(self) -> NoReturn:
        self.release()
        raise RunError(
            f"the Ray cluster did not provide {self.layout.num_gpus} {self._cluster.unit} slots within "
            f"{_RESERVE_SECONDS} s: {ray.available_resources()} are available; another job may use the rest"
        )


def _cpus_per_place(layout: Layout, cluster: Cluster) -> float:
    """Return the CPUs to reserve per slot: one core, or less if there are more slots than cores."""
    # 0.9 leaves CPUs for other actors, such as reward workers.
    share = min(1.0, 0.9 * cluster.num_cpus / max(1, layout.num_gpus))
    return _floor(share)


def _floor(share: float) -> float:
    """Round down to Ray's resolution of 0.0001."""
    # Down, because the sum over all users must not exceed the slot.
    return int(share * 10_000) / 10_000
