"""Who sits on which GPU: a pure function from settings to a layout, and its printed form.

Leaves out asking Ray for the places: see ray_cluster. "GPU" means one place for one rank; on machines without
GPUs it is a process.
"""

import sys
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from rlhf_cli.config.placement import ActorPlacementConfig
from rlhf_cli.config.rollout import RolloutConfig
from rlhf_cli.errors import UsageError


@dataclass(frozen=True)
class Island:
    """GPUs of one node that are asked for together."""

    node: int
    num_gpus: int


@dataclass(frozen=True)
class Seat:
    """The place of one rank of a role, or of one rollout engine."""

    role: str
    rank: int
    island: int
    gpus: tuple[int, ...]  # positions in the island; several for a tensor-parallel engine
    shared: bool  # whether other roles sit on the same GPUs


@dataclass(frozen=True)
class Layout:
    """Places of all roles; nodes are numbered as the cluster lists them, from 0, the one with the most GPUs first."""

    islands: tuple[Island, ...]
    seats: tuple[Seat, ...]

    def of(self, role: str) -> list[Seat]:
        """Return the seats of a role by rank."""
        return [seat for seat in self.seats if seat.role == role]

    def local_size(self, role: str) -> int:
        """Return the ranks of a role on a node, the same number on each."""
        seats = self.of(role)
        return sum(seat.island == seats[0].island for seat in seats)

    def users(self, island: int, gpu: int) -> list[str]:
        """Return the roles that sit on one GPU."""
        return self._users.get((island, gpu), [])

    @cached_property
    def _users(self) -> dict[tuple[int, int], list[str]]:
        users: dict[tuple[int, int], list[str]] = defaultdict(list)
        for seat in self.seats:
            for gpu in seat.gpus:
                users[seat.island, gpu].append(seat.role)
        return users

    @property
    def num_gpus(self) -> int:
        """GPUs in all islands."""
        return sum(island.num_gpus for island in self.islands)


@dataclass(frozen=True)
class _Pool:
    """Roles that share GPUs: each has the first ones of the first nodes, as many as it needs."""

    shapes: dict[str, tuple[int, int]]  # nodes and GPUs on each, by role
    advice: str  # if there is no room for it

    @property
    def gpus_by_node(self) -> list[int]:
        """GPUs on each of its nodes: the ranks of the largest role that sits there."""
        num_nodes = max(nodes for nodes, _ in self.shapes.values())
        return [max(gpus for nodes, gpus in self.shapes.values() if nodes > node) for node in range(num_nodes)]


ENGINE = "engine"
SHARE = "let roles share GPUs with --colocate_all_models"
ENGINE_FLAGS = "--vllm_num_engines or --vllm_tensor_parallel_size"

_Place = tuple[int, tuple[int, ...]]
"""Island and positions in it of a rank or engine."""


def plan_layout(
    placement: ActorPlacementConfig, rollout: RolloutConfig, *, roles: tuple[str, ...], node_gpus: list[int]
) -> Layout:
    """Return the places of the trained and frozen roles and of the rollout engines.

    Args:
        roles: the roles of this run, from `config.roles.ROLES`.
        node_gpus: free GPUs of each node, largest first.

    Raises:
        UsageError: the roles do not fit; names the needed and the available resources.
    """
    free = list(node_gpus)
    islands: list[Island] = []
    places: dict[str, list[_Place]] = {}
    for pool in _pools(placement, roles):
        first = len(islands)
        islands += _take(free, pool, total=node_gpus)
        for role, (nodes, gpus) in pool.shapes.items():
            places[role] = [(first + node, (gpu,)) for node in range(nodes) for gpu in range(gpus)]
    if placement.colocate_all_models:
        places[ENGINE] = _shared_engines(rollout, placement.shape("actor"))
    else:
        size, first = rollout.vllm_tensor_parallel_size, len(islands)
        count = rollout.vllm_num_engines or 1
        pool = _Pool({"rollout engines": (count, size)}, f"{SHARE}, or lower {ENGINE_FLAGS}")
        islands += _take(free, pool, total=node_gpus)
        places[ENGINE] = [(first + number, tuple(range(size))) for number in range(count)]
    return Layout(tuple(islands), tuple(_seats(places)))


def check_layout(placement: ActorPlacementConfig, rollout: RolloutConfig, *, roles: tuple[str, ...]) -> None:
    """Raise UsageError for roles that fit together on no cluster, however large."""
    plan_layout(placement, rollout, roles=roles, node_gpus=[sys.maxsize])


def _seats(places: dict[str, list[_Place]]) -> list[Seat]:
    """Return the ranks in the order of their places; a seat is shared if another role sits on one of its GPUs."""
    users = Counter((island, gpu) for found in places.values() for island, gpus in found for gpu in gpus)
    return [
        Seat(role, rank, island, gpus, any(users[island, gpu] > 1 for gpu in gpus))
        for role, found in places.items()
        for rank, (island, gpus) in enumerate(found)
    ]


def _pools(placement: ActorPlacementConfig, roles: tuple[str, ...]) -> list[_Pool]:
    if placement.colocate_all_models:
        return [_pool(placement, roles)]
    pools, seated = [], set()
    for pair in placement.colocated_pairs:
        members = tuple(role for role in pair if role in roles)
        if members:
            pools.append(_pool(placement, members))
            seated |= set(members)
    return pools + [_pool(placement, (role,)) for role in roles if role not in seated]


def _pool(placement: ActorPlacementConfig, roles: tuple[str, ...]) -> _Pool:
    shapes = {role: placement.shape(role) for role in roles}
    largest = max(roles, key=lambda role: shapes[role][0] * shapes[role][1])
    lower = f"lower --{largest}_num_nodes or --{largest}_num_gpus_per_node"
    return _Pool(shapes, lower if placement.colocate_all_models else f"{SHARE}, or {lower}")


def _take(free: list[int], pool: _Pool, *, total: list[int]) -> list[Island]:
    """Return the islands of a pool, on nodes with the least that still suffices, so that large blocks stay whole."""
    left = list(free)
    islands = []
    for size in pool.gpus_by_node:
        fitting = [node for node, count in enumerate(free) if count >= size]
        if not fitting:
            needed = " + ".join(f"{count} x {gpus}" for gpus, count in Counter(pool.gpus_by_node).items())
            raise UsageError(
                f"{' + '.join(pool.shapes)}: {needed} GPUs are needed (nodes x GPUs on "
                f"each), and of {_sizes(total)} there are {_sizes(left)} not taken by other roles; {pool.advice}"
            )
        node = min(fitting, key=lambda candidate: (free[candidate], candidate))
        islands.append(Island(node, size))
        free[node] -= size
    return islands


def _sizes(node_gpus: list[int]) -> str:
    """Return the nodes by their number of GPUs, "3 x 8 + 1 x 4"."""
    counts = Counter(count for count in node_gpus if count)
    return " + ".join(f"{counts[size]} x {size}" for size in sorted(counts, reverse=True)) or "none"


def _shared_engines(rollout: RolloutConfig, actor: tuple[int, int]) -> list[_Place]:
    """Return the places of the engines on the GPUs of the actor, who sits on the first islands: weights reach them
    there alone.
    """
    size, count = rollout.vllm_tensor_parallel_size, rollout.vllm_num_engines or 1
    num_nodes, gpus_per_node = actor
    if gpus_per_node % size:
        raise UsageError(
            f"--vllm_tensor_parallel_size {size} does not divide the {gpus_per_node} GPUs per node that the "
            "engines share with the actor under --colocate_all_models"
        )
    num_gpus = num_nodes * gpus_per_node
    if size * count != num_gpus:
        raise UsageError(
            f"--colocate_all_models: {count} engines of {size} GPUs do not cover the {num_gpus} GPUs of the actor; "
            f"give --vllm_num_engines {num_gpus // size} with --vllm_tensor_parallel_size {size}"
        )
    return [(node, tuple(range(gpu, gpu + size))) for node in range(num_nodes) for gpu in range(0, gpus_per_node, size)]


def on_nodes(layout: Layout, nodes: Sequence[int]) -> Layout:
    """Return the layout with each island on the node that the cluster has chosen for it, which need not be the planned
    one.
    """
    moved = (replace(island, node=node) for island, node in zip(layout.islands, nodes, strict=True))
    return replace(layout, islands=tuple(moved))


def describe(layout: Layout, *, unit: str) -> list[str]:
    """Return the layout in a line per distinct set of roles and nodes alike, for printing before anything is loaded.

    Args:
        unit: the kind of a place on this cluster, "GPU" or "process".
    """
    places = Counter(
        (island.node, tuple(layout.users(index, gpu)))
        for index, island in enumerate(layout.islands)
        for gpu in range(island.num_gpus)
    )
    alike: dict[tuple[tuple[str, ...], int], list[int]] = defaultdict(list)
    for (node, roles), count in places.items():
        alike[roles, count].append(node)
    return [
        f"{_nodes(sorted(nodes))}: {count} {unit if count == 1 else _plural(unit)}{' each' if len(nodes) > 1 else ''} "
        f"for {' + '.join(roles)}"
        for (roles, count), nodes in alike.items()
    ]


def _nodes(numbers: list[int]) -> str:
    """Return the nodes in words: node 3, nodes 0-3 or nodes 0, 2, 5."""
    if len(numbers) == 1:
        return f"node {numbers[0]}"
    is_run = numbers == list(range(numbers[0], numbers[-1] + 1))
    return f"nodes {numbers[0]}-{numbers[-1]}" if is_run else f"nodes {', '.join(map(str, numbers))}"


def _plural(unit: str) -> str:
    return f"{unit}es" if unit.endswith("s") else f"{unit}s"
