"""Assignment of ranks and engines to GPUs: a pure function from settings to a layout, and the printed description.

`ray_cluster` reserves the GPUs. Here, "GPU" means a slot for one rank; on machines without GPUs, it is a process.
"""

import sys
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from heapq import heappop, heappush
from typing import NamedTuple

from rlhf_cli.config.placement import LayoutSettings
from rlhf_cli.errors import UsageError


@dataclass(frozen=True)
class Island:
    """GPUs on the same node that are reserved together."""

    node: int
    num_gpus: int


class Seat(NamedTuple):
    """Placement slot for one rank or rollout engine. A tuple, because a plan makes hundreds of thousands."""

    role: str
    rank: int
    island: int
    # GPU indices in the island; more than one for a tensor-parallel engine.
    gpus: tuple[int, ...]
    # Whether other roles use the same GPUs.
    shared: bool


@dataclass(frozen=True)
class Layout:
    """Placement slots for all roles. Nodes are numbered from 0, in order of decreasing GPU count."""

    islands: tuple[Island, ...]
    seats: tuple[Seat, ...]

    def of(self, role: str) -> list[Seat]:
        """Return a role's slots in rank order."""
        return self._seats_by_role.get(role, [])

    def ranks_by_node(self, role: str) -> Counter[int]:
        """Return the number of a role's slots on each node."""
        return Counter(self.islands[seat.island].node for seat in self.of(role))

    def local_size(self, role: str) -> int:
        """Return a role's ranks per node, which is equal on all nodes."""
        seats = self.of(role)
        return sum(seat.island == seats[0].island for seat in seats)

    def users(self, island: int, gpu: int) -> list[str]:
        """Return the roles on a GPU."""
        return self._users.get((island, gpu), [])

    @cached_property
    def kinds_of_gpus(self) -> Counter[tuple[str, ...]]:
        """Number of GPUs by the roles on them; unused GPUs are not counted."""
        return Counter(tuple(roles) for roles in self._users.values())

    @cached_property
    def _seats_by_role(self) -> dict[str, list[Seat]]:
        seats: dict[str, list[Seat]] = defaultdict(list)
        for seat in self.seats:
            seats[seat.role].append(seat)
        return seats

    @cached_property
    def _users(self) -> dict[tuple[int, int], list[str]]:
        users: dict[tuple[int, int], list[str]] = defaultdict(list)
        for seat in self.seats:
            for gpu in seat.gpus:
                users[seat.island, gpu].append(seat.role)
        return users

    @property
    def num_gpus(self) -> int:
        """Total number of GPUs."""
        return sum(island.num_gpus for island in self.islands)


@dataclass(frozen=True)
class _Pool:
    """Roles that share GPUs. Each role uses the first GPUs on the first nodes."""

    # (nodes, GPUs per node) by role.
    shapes: dict[str, tuple[int, int]]
    # End of the error message if there are too few GPUs.
    advice: str

    @property
    def gpus_by_node(self) -> list[int]:
        """GPUs per node: the rank count of the largest role on the node."""
        num_nodes = max(nodes for nodes, _ in self.shapes.values())
        return [max(gpus for nodes, gpus in self.shapes.values() if nodes > node) for node in range(num_nodes)]


ENGINE, JUDGE = "engine", "judge"
_SHARE = "let roles share GPUs with --colocate_all_models"
_ENGINE_FLAGS = "--vllm_num_engines or --vllm_tensor_parallel_size"
_FOR_JUDGE = (
    "lower --judge_num_engines or --judge_tensor_parallel_size, or serve the judge elsewhere and set --judge to its URL"
)

_Place = tuple[int, tuple[int, ...]]
"""Island, and GPU indices in it, for a rank or engine."""


def plan_layout(settings: LayoutSettings, *, node_gpus: list[int]) -> Layout:
    """Assign all roles and rollout engines to GPUs.

    Args:
        settings: settings with all sizes filled in.
        node_gpus: free GPUs per node, largest first.

    Raises:
        UsageError: there are too few GPUs. The message names required and available GPUs.
    """
    free = list(node_gpus)
    islands: list[Island] = []
    places: dict[str, list[_Place]] = {}
    own, judges = settings.own_judge, list[Island]()
    if own is not None:
        judges = _take(free, _Pool({JUDGE: own}, _FOR_JUDGE), total=node_gpus)
    for pool in _pools(settings):
        first = len(islands)
        islands += _take(free, pool, total=node_gpus)
        for role, (nodes, gpus) in pool.shapes.items():
            places[role] = [(first + node, (gpu,)) for node in range(nodes) for gpu in range(gpus)]
    # A judge can be alone (rlhf data).
    size, count = settings.engine_size or 1, 1 if settings.num_engines is None else settings.num_engines
    if settings.together:
        # Without an actor (generate, eval), the first GPU is shared.
        places[ENGINE] = _shared_engines(size, count, settings.shapes.get("actor", (1, 1)))
    else:
        first = len(islands)
        pool = _Pool({"rollout engines": (count, size)}, f"{_SHARE}, or lower {_ENGINE_FLAGS}")
        islands += _take(free, pool, total=node_gpus)
        places[ENGINE] = [(first + number, tuple(range(size))) for number in range(count)]
    if own is not None:
        places[JUDGE] = [(len(islands) + number, tuple(range(own[1]))) for number in range(own[0])]
        islands += judges
    elif settings.judge is not None:
        places[JUDGE] = _beside_engines(settings.judge[1], places[ENGINE])
    return Layout(tuple(islands), tuple(_seats(places)))


def check_layout(settings: LayoutSettings) -> None:
    """Raise UsageError if the settings are inconsistent on a cluster of any size."""
    plan_layout(settings, node_gpus=[sys.maxsize])


def _seats(places: dict[str, list[_Place]]) -> list[Seat]:
    """Create the placement slots in rank order. A slot is shared if another role uses any of the GPUs."""
    users = Counter((island, gpu) for found in places.values() for island, gpus in found for gpu in gpus)
    shared = {place for place, count in users.items() if count > 1}
    return [
        Seat(role, rank, island, gpus, bool(shared) and any((island, gpu) in shared for gpu in gpus))
        for role, found in places.items()
        for rank, (island, gpus) in enumerate(found)
    ]


def _pools(settings: LayoutSettings) -> list[_Pool]:
    roles = tuple(settings.shapes)
    if settings.together:
        # Without other models (generate, eval), the engine and a judge share GPUs.
        return [_pool(settings, roles) if roles else _Pool({ENGINE: (1, 1)}, "lower the number of models")]
    pools, seated = [], set()
    for pair in settings.pairs:
        members = tuple(role for role in pair if role in roles)
        if members:
            pools.append(_pool(settings, members))
            seated |= set(members)
    return pools + [_pool(settings, (role,)) for role in roles if role not in seated]


def _pool(settings: LayoutSettings, roles: tuple[str, ...]) -> _Pool:
    shapes = {role: settings.shapes[role] for role in roles}
    largest = max(roles, key=lambda role: shapes[role][0] * shapes[role][1])
    lower = f"lower --{largest}_num_nodes or --{largest}_num_gpus_per_node"
    return _Pool(shapes, lower if settings.together else f"{_SHARE}, or {lower}")


def _take(free: list[int], pool: _Pool, *, total: list[int]) -> list[Island]:
    """Reserve islands for a pool on the nodes with the fewest sufficient GPUs (best fit), to keep large blocks free."""
    left = list(free)
    islands: list[Island] = []
    # Sorted lists are heaps. A cluster has a thousand nodes, but few numbers of GPUs.
    nodes: dict[int, list[int]] = defaultdict(list)
    for node, count in enumerate(free):
        nodes[count].append(node)
    for size in pool.gpus_by_node:
        best = min((count for count, found in nodes.items() if found and count >= size), default=None)
        if best is None:
            needed = " + ".join(f"{count} x {gpus}" for gpus, count in Counter(pool.gpus_by_node).items())
            raise UsageError(
                f"{' + '.join(pool.shapes)}: {needed} GPUs required (nodes x GPUs per node); the cluster has "
                f"{_sizes(total)}, of which {_sizes(left)} are not used by other roles; {pool.advice}"
            )
        node = heappop(nodes[best])
        heappush(nodes[best - size], node)
        islands.append(Island(node, size))
        free[node] -= size
    return islands


def _sizes(node_gpus: list[int]) -> str:
    """Format node sizes, such as "3 x 8 + 1 x 4" (nodes x GPUs)."""
    counts = Counter(count for count in node_gpus if count)
    return " + ".join(f"{counts[size]} x {size}" for size in sorted(counts, reverse=True)) or "none"


def _shared_engines(size: int, count: int, actor: tuple[int, int]) -> list[_Place]:
    """Place the engines on the actor's GPUs, which are in the first islands."""
    # Only there: ipc pushes work only between processes on the same GPU.
    num_nodes, gpus_per_node = actor
    if gpus_per_node % size:
        raise UsageError(
            f"--vllm_tensor_parallel_size {size} does not divide the {gpus_per_node} GPUs per node that the "
            "engines share with the actor (--colocate_all_models)"
        )
    num_gpus = num_nodes * gpus_per_node
    if size * count != num_gpus:
        raise UsageError(
            f"--colocate_all_models: {count} engines with {size} GPUs do not match the actor's {num_gpus} GPUs; "
            f"set --vllm_num_engines {num_gpus // size} with --vllm_tensor_parallel_size {size}"
        )
    return [(node, tuple(range(gpu, gpu + size))) for node in range(num_nodes) for gpu in range(0, gpus_per_node, size)]


def _beside_engines(size: int, engines: Sequence[_Place]) -> list[_Place]:
    """Place engines of a judge on the GPUs of the rollout engines, as many as fit."""
    places: list[_Place] = []
    gpus = [(island, gpu) for island, own in engines for gpu in own]
    for island in dict.fromkeys(island for island, _ in gpus):
        here = [gpu for other, gpu in gpus if other == island]
        places += [(island, tuple(here[at : at + size])) for at in range(0, len(here) - size + 1, size)]
    if not places:
        raise UsageError(
            f"--judge_tensor_parallel_size {size}: the judge shares GPUs with the rollout engines, which have fewer on "
            "each node; lower it, or set --judge_num_engines for a judge with GPUs of its own"
        )
    return places


def on_nodes(layout: Layout, nodes: Sequence[int]) -> Layout:
    """Update the layout with the nodes that the cluster has selected, which may differ from the planned ones."""
    moved = (replace(island, node=node) for island, node in zip(layout.islands, nodes, strict=True))
    return replace(layout, islands=tuple(moved))


def describe(layout: Layout, *, unit: str) -> list[str]:
    """Describe the layout, with one line per distinct set of roles.

    Args:
        layout: the layout.
        unit: name of a slot on this cluster, "GPU" or "process".
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
    """Format node numbers: "node 3", "nodes 0-3" or "nodes 0, 2, 5"."""
    if len(numbers) == 1:
        return f"node {numbers[0]}"
    is_run = numbers == list(range(numbers[0], numbers[-1] + 1))
    return f"nodes {numbers[0]}-{numbers[-1]}" if is_run else f"nodes {', '.join(map(str, numbers))}"


def _plural(unit: str) -> str:
    return f"{unit}es" if unit.endswith("s") else f"{unit}s"
