"""The Ray cluster of a run: started or joined, places reserved, and nothing left behind at the end.

Leaves out who sits where (placement) and what runs there (worker, worker_group).
"""

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn

import ray
from ray.util.placement_group import (
    PlacementGroup,
    placement_group,
    placement_group_table,
    remove_placement_group,
)
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from rlhf_cli.backends.cluster.placement import Layout, Seat, on_nodes
from rlhf_cli.backends.process.killed import kernel_has_killed
from rlhf_cli.backends.process.signals import children_apart
from rlhf_cli.errors import RunError, UsageError, first_line, full_memory, memory_sentence

RESERVE_SECONDS = 120
START_TRIES = 2
SLOW_START = "timed out during startup"
"""Part of Ray's message where its processes on this machine take longer to start than it waits, on a busy machine."""
GPU_RANK_THREADS = 8
"""CPU threads that a process with a GPU has use for: they pack, they drive kernels, they sum on no CPU."""
CPU_ONLY_PLACES = 1024
"""Places offered by a node without GPUs: there a place is a process and the operating system shares the cores."""


PROCESS_DEATHS = (ray.exceptions.RayActorError, ray.exceptions.OutOfMemoryError)
"""Ray's errors about a process that is gone; the second one if Ray's memory monitor has ended it."""


def death_reason(error: Exception) -> str:
    """Return why a process died, in words: full memory by name, else the first line of Ray's error."""
    kind = full_memory(error)
    if kind is None and isinstance(error, PROCESS_DEATHS) and kernel_has_killed():
        kind = "host memory"  # Ray only knows that the process is gone
    return first_line(error) if kind is None else memory_sentence(kind, "")


@dataclass(frozen=True)
class Cluster:
    """The resources of the nodes of a running Ray cluster."""

    node_ids: list[str]  # Ray's, in the order of their GPUs
    node_gpus: list[int]  # largest first
    num_cpus: float
    has_gpus: bool
    is_local: bool  # started by this process

    @property
    def unit(self) -> str:
        """Return the kind of a place on this cluster."""
        return "GPU" if self.has_gpus else "process"

    def threads(self, num_processes: int) -> int:
        """Return the CPU threads of each of a role's processes: roles take turns, the processes of one share the cores.

        OMP_NUM_THREADS counts if this process started Ray; in a submitted job it is Ray's, and of another machine.
        """
        chosen = os.environ.get("OMP_NUM_THREADS", "")
        if self.is_local and chosen.isdigit():
            return max(1, int(chosen))
        share = max(1, (os.cpu_count() or 1) // num_processes)
        return min(share, GPU_RANK_THREADS) if self.has_gpus else share


@contextmanager
def ray_cluster() -> Iterator[Cluster]:
    """Join the cluster at RAY_ADDRESS, or start one on this machine; leave it, or stop it, at the end."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
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
            address=address or "local",
            include_dashboard=None if address else False,
            log_to_driver=False,
            logging_level="error",
        )


def _join_or_start(init: Callable[[], None], *, address: str | None, tries: int = START_TRIES) -> None:
    """Call `init`, again where Ray's own processes were too slow. Raise a sentence for each failure of Ray's start."""
    try:
        init()
    except ConnectionError as error:
        # `ray start` wants tokens once ~/.ray/auth_token exists; Ray shows none to an address that it is given.
        raise UsageError(
            f"RAY_ADDRESS={address}: no Ray cluster answers there ({error}); if it was started with a token, set "
            "RAY_AUTH_MODE=token"
        ) from error
    except OSError as error:
        if "AF_UNIX" not in str(error):
            raise
        variable = "RAY_TMPDIR" if os.environ.get("RAY_TMPDIR") else "TMPDIR"
        raise UsageError(
            f"{variable}={os.environ.get(variable)}: too long for the sockets that Ray keeps there, whose paths "
            "may have 107 bytes; set RAY_TMPDIR to a shorter folder, /tmp say"
        ) from error
    except Exception as error:
        if SLOW_START not in str(error):  # Ray raises a plain Exception
            raise
        ray.shutdown()
        if tries > 1:
            _join_or_start(init, address=address, tries=tries - 1)
            return
        raise RunError(
            f"Ray's processes did not start in time, {START_TRIES} times in a row: the machine is too busy or its "
            "memory is full; try again when it is idle"
        ) from error


def _describe_cluster(*, is_local: bool) -> Cluster:
    nodes = sorted((node for node in ray.nodes() if node["Alive"]), key=_num_gpus, reverse=True)
    gpus = [_num_gpus(node) for node in nodes]
    has_gpus = any(gpus)
    return Cluster(
        node_ids=[node["NodeID"] for node in nodes],
        node_gpus=gpus if has_gpus else [CPU_ONLY_PLACES] * len(nodes),
        num_cpus=sum(node["Resources"].get("CPU", 0) for node in nodes),
        has_gpus=has_gpus,
        is_local=is_local,
    )


def _num_gpus(node: dict[str, Any]) -> int:
    return int(node["Resources"].get("GPU", 0))


class Reservation:
    """Places of a layout, held on the cluster until released; `layout` names their nodes."""

    def __init__(self, layout: Layout, cluster: Cluster) -> None:
        self._cluster = cluster
        self.layout = layout
        self._cpus = _cpus_per_place(layout, cluster)
        self._groups = [self._ask(index) for index in range(len(layout.islands))]
        self._wait()
        self.layout = on_nodes(layout, self._nodes())

    def options(self, seat: Seat) -> dict[str, Any]:
        """Return the options of the Ray actor that takes this seat."""
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
        """Give all places back; does nothing if the cluster is already gone."""
        with suppress(ray.exceptions.RaySystemError, ConnectionError):
            for group in self._groups:
                remove_placement_group(group)

    def _gpu_share(self, seat: Seat, users: int) -> float:
        if not seat.shared:
            return len(seat.gpus)
        # an engine over several GPUs that others sit on too takes no share: it receives the ones to use
        return _floor(1 / users) if len(seat.gpus) == 1 else 0

    def _ask(self, index: int) -> PlacementGroup:
        """Return a bundle for each GPU of an island, so that ranks do not share one by accident; one for an engine's
        own.
        """
        size = self.layout.islands[index].num_gpus
        is_engines_own = any(s.island == index and not s.shared and len(s.gpus) > 1 for s in self.layout.seats)
        count, gpus = (1, size) if is_engines_own else (size, 1)
        bundle = {"CPU": self._cpus} | ({"GPU": float(gpus)} if self._cluster.has_gpus else {})
        return placement_group([bundle] * count, strategy="STRICT_PACK")

    def _nodes(self) -> list[int]:
        """Return the number of each island's node; nodes that have joined the cluster meanwhile come last."""
        numbers = {node: number for number, node in enumerate(self._cluster.node_ids)}
        holders = [placement_group_table(group)["bundles_to_node_id"][0] for group in self._groups]
        return [numbers.setdefault(node, len(numbers)) for node in holders]

    def _wait(self) -> None:
        """Wait for the places a second at a time, so that signals are heard.

        `wait` asks Ray alone, where `ready` would start a process for its task.
        """
        deadline = time.monotonic() + RESERVE_SECONDS
        for group in self._groups:
            while not group.wait(1):
                if time.monotonic() > deadline:
                    self._give_up()

    def _give_up(self) -> NoReturn:
        self.release()
        raise RunError(
            f"the Ray cluster did not give {self.layout.num_gpus} {self._cluster.unit} places within "
            f"{RESERVE_SECONDS} s: {ray.available_resources()} are available; another job may hold the rest"
        )


def _cpus_per_place(layout: Layout, cluster: Cluster) -> float:
    """Return one core for each place, or an even part of the cores."""
    share = min(1.0, 0.9 * cluster.num_cpus / max(1, layout.num_gpus))
    return _floor(share)


def _floor(share: float) -> float:
    """Return the share in Ray's steps of 0.0001, never more than it was: the users of a place must fit together."""
    return int(share * 10_000) / 10_000
