"""Who sits on which GPU: a pure function from settings to a layout, and its printed form.

Leaves out asking Ray for the places: see ray_cluster. "GPU" means one place for one rank; on machines without
GPUs it is a process.
"""

import sys
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from rlhf_cli.config.online import CriticPlacementConfig, PlacementConfig, RolloutConfig
from rlhf_cli.errors import UsageError


@dataclass(frozen=True)
class Island:
    """GPUs of one node that are asked for together."""

    node: int
    num_gpus: int


@dataclass(frozen=True)
class Seat:
    """Where one rank of a role, or one rollout engine, runs."""

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
        """The seats of a role by rank."""
        return [seat for seat in self.seats if seat.role == role]

    def users(self, island: int, gpu: int) -> list[str]:
        """Roles that sit on one GPU."""
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
    """Roles that share the same GPUs."""

    roles: tuple[str, ...]
    num_nodes: int
    gpus_per_node: int
    flags: str  # that set its size


ENGINE = "engine"


def plan_layout(
    placement: PlacementConfig, rollout: RolloutConfig, *, roles: tuple[str, ...], node_gpus: list[int]
) -> Layout:
    """The places of the trained and frozen roles and of the rollout engines.

    Args:
        roles: the roles this run has, of "actor", "critic", "ref", "reward".
        node_gpus: free GPUs of each node, largest first.

    Raises:
        UsageError: the roles do not fit, or sharing roles differ in size; names what is needed and what there is.
    """
    free = list(node_gpus)
    islands: list[Island] = []
    seats: list[Seat] = []
    for pool in _pools(placement, roles):
        first = len(islands)
        islands += [Island(node, pool.gpus_per_node) for node in _take(free, pool, total=node_gpus)]
        shared = len(pool.roles) > 1 or placement.colocate_all_models
        seats += [seat for role in pool.roles for seat in _rank_seats(role, islands, first=first, shared=shared)]
    if placement.colocate_all_models:
        seats += _shared_engines(rollout, islands)
    else:
        seats += _own_engines(rollout, islands, free, total=node_gpus)
    return Layout(tuple(islands), tuple(seats))


def check_layout(placement: PlacementConfig, rollout: RolloutConfig, *, roles: tuple[str, ...]) -> None:
    """UsageError for roles that fit together on no cluster, however large."""
    plan_layout(placement, rollout, roles=roles, node_gpus=[sys.maxsize])


def _pools(placement: PlacementConfig, roles: tuple[str, ...]) -> list[_Pool]:
    if placement.colocate_all_models:
        return [_pool(placement, roles, "colocate_all_models")]
    together = []
    if placement.colocate_actor_ref:
        together.append((("actor", "ref"), "colocate_actor_ref"))
    if isinstance(placement, CriticPlacementConfig) and placement.colocate_critic_reward:
        together.append((("critic", "reward"), "colocate_critic_reward"))
    pools, seated = [], set()
    for pair, flag in together:
        members = tuple(role for role in pair if role in roles)
        if members:
            pools.append(_pool(placement, members, flag))
            seated |= set(members)
    return pools + [_pool(placement, (role,), "") for role in roles if role not in seated]


def _pool(placement: PlacementConfig, roles: tuple[str, ...], flag: str) -> _Pool:
    shapes = {role: _shape(placement, role) for role in roles}
    if len(set(shapes.values())) > 1:
        sizes = ", ".join(f"{role} {nodes} x {gpus}" for role, (nodes, gpus) in shapes.items())
        raise UsageError(f"--{flag} needs the same nodes and GPUs per node for all that share them, got {sizes}")
    return _Pool(roles, *shapes[roles[0]], flags=f"--{roles[0]}_num_nodes or --{roles[0]}_num_gpus_per_node")


def _shape(placement: PlacementConfig, role: str) -> tuple[int, int]:
    return getattr(placement, f"{role}_num_nodes"), getattr(placement, f"{role}_num_gpus_per_node")


def _take(free: list[int], pool: _Pool, *, total: list[int]) -> list[int]:
    """Nodes for the islands of a pool: those with the least that still suffices, so that large blocks stay whole."""
    left = list(free)
    nodes = []
    for _ in range(pool.num_nodes):
        fitting = [node for node, count in enumerate(free) if count >= pool.gpus_per_node]
        if not fitting:
            raise UsageError(
                f"{' + '.join(pool.roles)}: {pool.num_nodes} x {pool.gpus_per_node} GPUs are needed (nodes x GPUs on "
                f"each), and of {_shapes(total)} there are {_shapes(left)} not taken by other roles; let roles share "
                f"GPUs with --colocate_all_models, or lower {pool.flags}"
            )
        nodes.append(min(fitting, key=lambda candidate: (free[candidate], candidate)))
        free[nodes[-1]] -= pool.gpus_per_node
    return nodes


def _shapes(node_gpus: list[int]) -> str:
    """Nodes by their number of GPUs, "3 x 8 + 1 x 4"."""
    counts = Counter(count for count in node_gpus if count)
    return " + ".join(f"{counts[size]} x {size}" for size in sorted(counts, reverse=True)) or "none"


def _rank_seats(role: str, islands: list[Island], *, first: int, shared: bool) -> list[Seat]:
    places = [(i, gpu) for i in range(first, len(islands)) for gpu in range(islands[i].num_gpus)]
    return [Seat(role, rank, island, (gpu,), shared) for rank, (island, gpu) in enumerate(places)]


def _shared_engines(rollout: RolloutConfig, islands: list[Island]) -> list[Seat]:
    size, count = rollout.vllm_tensor_parallel_size, rollout.vllm_num_engines
    num_gpus = sum(island.num_gpus for island in islands)
    if any(island.num_gpus % size for island in islands):
        raise UsageError(
            f"--vllm_tensor_parallel_size {size} does not divide the {islands[0].num_gpus} GPUs per node that the "
            "engines share with the actor under --colocate_all_models"
        )
    if size * count != num_gpus:
        raise UsageError(
            f"--colocate_all_models: {count} engines of {size} GPUs do not cover the {num_gpus} GPUs of the actor; "
            f"give --vllm_num_engines {num_gpus // size} with --vllm_tensor_parallel_size {size}"
        )
    starts = [(i, gpu) for i, island in enumerate(islands) for gpu in range(0, island.num_gpus, size)]
    return [Seat(ENGINE, n, i, tuple(range(gpu, gpu + size)), True) for n, (i, gpu) in enumerate(starts)]


def _own_engines(rollout: RolloutConfig, islands: list[Island], free: list[int], *, total: list[int]) -> list[Seat]:
    size = rollout.vllm_tensor_parallel_size
    flags = "--vllm_num_engines or --vllm_tensor_parallel_size"
    pool = _Pool(("rollout engines",), rollout.vllm_num_engines, size, flags)
    seats = []
    for rank, node in enumerate(_take(free, pool, total=total)):
        islands.append(Island(node, size))
        seats.append(Seat(ENGINE, rank, len(islands) - 1, tuple(range(size)), False))
    return seats


def on_nodes(layout: Layout, nodes: Sequence[int]) -> Layout:
    """The layout with each island on the node that the cluster has chosen for it, which need not be the planned one."""
    moved = (replace(island, node=node) for island, node in zip(layout.islands, nodes, strict=True))
    return replace(layout, islands=tuple(moved))


def describe(layout: Layout, *, unit: str) -> list[str]:
    """The layout in a line per distinct set of roles and nodes alike, for printing before anything is loaded.

    Args:
        unit: what a place is on this cluster, "GPU" or "process".
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
    """ "node 3", "nodes 0-3" or "nodes 0, 2, 5"."""
    if len(numbers) == 1:
        return f"node {numbers[0]}"
    is_run = numbers == list(range(numbers[0], numbers[-1] + 1))
    return f"nodes {numbers[0]}-{numbers[-1]}" if is_run else f"nodes {', '.join(map(str, numbers))}"


def _plural(unit: str) -> str:
    return f"{unit}es" if unit.endswith("s") else f"{unit}s"
