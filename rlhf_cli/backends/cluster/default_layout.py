"""Default numbers of nodes, GPUs and engines for online runs, and sleep settings: a pure function of settings and GPUs.

`placement` then assigns ranks to GPUs.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from rlhf_cli.backends.cluster.placement import Layout
from rlhf_cli.config.placement import PlacementConfig
from rlhf_cli.config.roles import ROLES
from rlhf_cli.config.rollout import EngineConfig
from rlhf_cli.errors import UsageError

OWN_GPU_SHARE, SHARED_GPU_SHARE = 0.9, 0.6
"""Default memory fraction for an engine with exclusive GPUs, and for an engine that shares GPUs."""
TURNS = "models and engines take turns on all GPUs, because no placement flag is set"
AHEAD = "engines have separate GPUs, because they sample while the models train"
NO_SLEEP = "models and engines have separate GPUs, because models cannot sleep with these settings"


@dataclass(frozen=True)
class Needs:
    """Layout requirements from other settings.

    - `multiple`: must divide the number of ranks in each role.
    - `samples_ahead`: engines sample while models train.
    - `can_sleep`: models can move to host memory while other roles use the GPUs.
    """

    multiple: int = 1
    samples_ahead: bool = False
    can_sleep: bool = True


def leaves_places_open(placement: PlacementConfig, engine: EngineConfig) -> bool:
    """Return whether the number of ranks and engines depends on the cluster."""
    return not placement.has_sizes and engine.vllm_num_engines is None


def fill_layout(
    placement: PlacementConfig,
    engine: EngineConfig,
    *,
    roles: tuple[str, ...],
    node_gpus: Sequence[int],
    needs: Needs,
) -> tuple[PlacementConfig, EngineConfig, str]:
    """Fill in all unset numbers and switches. Returns the settings and the reason for the layout.

    Values set by the user are kept. The reason is empty if the user has chosen the layout.

    Args:
        placement, rollout: settings, possibly incomplete.
        roles: roles in this run.
        node_gpus: GPUs per node, largest first; empty on a cluster without GPUs.
        needs: requirements from other settings.
    """
    reason = ""
    if node_gpus and leaves_places_open(placement, engine):
        placement, engine, reason = _on_all_gpus(placement, engine, roles, list(node_gpus), needs)
    together = bool(placement.colocate_all_models)
    sleeps = bool(node_gpus) and together
    update = {"colocate_all_models": together}
    if placement.deepspeed_enable_sleep is None:
        update["deepspeed_enable_sleep"] = sleeps and needs.can_sleep
    update_engine: dict[str, object] = {"vllm_num_engines": engine.vllm_num_engines or 1}
    if engine.vllm_enable_sleep is None:
        update_engine["vllm_enable_sleep"] = sleeps
    return placement.model_copy(update=update), engine.model_copy(update=update_engine), reason


def memory_share(given: float | None, *, shared: bool) -> float:
    """Return an engine's GPU memory fraction: as set, otherwise depending on whether other roles share the GPUs."""
    return given if given is not None else SHARED_GPU_SHARE if shared else OWN_GPU_SHARE


def idle_gpus(layout: Layout, node_gpus: Sequence[int]) -> str:
    """Describe the number of unused GPUs, such as "2 GPUs idle"; "" if there are none."""
    idle = sum(node_gpus) - layout.num_gpus
    return f"{_sum_in_words([idle])} idle" if idle else ""


def _sum_in_words(node_gpus: Sequence[int]) -> str:
    count = sum(node_gpus)
    return f"{count} GPU{'' if count == 1 else 's'}"


def _on_all_gpus(
    placement: PlacementConfig, engine: EngineConfig, roles: tuple[str, ...], node_gpus: list[int], needs: Needs
) -> tuple[PlacementConfig, EngineConfig, str]:
    """Choose sizes that use as many GPUs as possible. Returns the settings and the reason."""
    pairs = [pair for pair in placement.colocated_pairs if set(pair) <= set(roles)]
    wants_turns = not needs.samples_ahead and needs.can_sleep and not pairs
    if placement.colocate_all_models or (placement.colocate_all_models is None and wants_turns):
        return (*_together(placement, engine, roles, node_gpus, needs), TURNS)
    if needs.samples_ahead and placement.colocate_all_models is None and not pairs:
        placement = placement.model_copy(update=_all_pairs(roles))
    apart = _apart(placement, engine, roles, node_gpus, needs)
    if apart is not None:
        reason = AHEAD if needs.samples_ahead else "" if needs.can_sleep else NO_SLEEP
        return (*apart, reason)
    if needs.samples_ahead:
        raise UsageError(
            f"--async_train samples while the models train, so engines require separate GPUs: "
            f"{_sum_in_words(node_gpus)} are not enough for {' + '.join(roles)} and an engine; remove --async_train"
        )
    # plan_layout then raises an error with the missing resources.
    if placement.colocate_all_models is False:
        return placement, engine, ""
    return (*_together(placement, engine, roles, node_gpus, needs), TURNS)


def _together(
    placement: PlacementConfig, engine: EngineConfig, roles: tuple[str, ...], node_gpus: list[int], needs: Needs
) -> tuple[PlacementConfig, EngineConfig]:
    """Place all roles on the same GPUs, with engines that use all of them."""
    size = engine.vllm_tensor_parallel_size
    shape = _largest_shape(node_gpus, at_most=sum(node_gpus), per_node=size, multiple=needs.multiple) or (1, 1)
    update = _sizes(roles, shape) | {"colocate_all_models": True}
    num_engines = max(1, shape[0] * shape[1] // size)
    return placement.model_copy(update=update), engine.model_copy(update={"vllm_num_engines": num_engines})


def _apart(
    placement: PlacementConfig, engine: EngineConfig, roles: tuple[str, ...], node_gpus: list[int], needs: Needs
) -> tuple[PlacementConfig, EngineConfig] | None:
    """Give each role the same number of GPUs, and the rest to the engines. Returns None if there are too few GPUs."""
    followers = {second for first, second in placement.colocated_pairs if {first, second} <= set(roles)}
    num_pools = len(set(roles) - followers)
    at_most = sum(node_gpus) // (num_pools + 1)
    shape = _largest_shape(node_gpus, at_most=at_most, per_node=1, multiple=needs.multiple)
    if shape is None:
        return None
    left = sorted(node_gpus)
    for _ in range(num_pools * shape[0]):
        node = next((number for number, count in enumerate(left) if count >= shape[1]), None)
        if node is None:
            return None
        left[node] -= shape[1]
        left.sort()
    num_engines = sum(count // engine.vllm_tensor_parallel_size for count in left)
    if not num_engines:
        return None
    filled = placement.model_copy(update=_sizes(roles, shape))
    return filled, engine.model_copy(update={"vllm_num_engines": num_engines})


def _all_pairs(roles: tuple[str, ...]) -> dict[str, object]:
    """Return the switches for all pairs of roles that can share GPUs while engines have separate ones."""
    pairs = [role for role in ROLES.values() if role.switch and {role.partner, role.name} <= set(roles)]
    return {role.switch: True for role in pairs}


def _sizes(roles: tuple[str, ...], shape: tuple[int, int]) -> dict[str, int | bool]:
    nodes, gpus = shape
    sizes = {"num_nodes": nodes, "num_gpus_per_node": gpus}
    return {f"{role}_{name}": size for role in roles for name, size in sizes.items()}


def _largest_shape(node_gpus: list[int], *, at_most: int, per_node: int, multiple: int) -> tuple[int, int] | None:
    """Return (nodes, GPUs per node) with the most GPUs, and as few nodes as possible. Returns None if nothing fits.

    Args:
        node_gpus: GPUs per node, largest first.
        at_most: limit for the total number of GPUs.
        per_node: must divide the GPUs per node.
        multiple: must divide the total number of GPUs.
    """
    shapes = [
        (nodes, gpus)
        for nodes in range(1, len(node_gpus) + 1)
        for gpus in range(per_node, node_gpus[nodes - 1] + 1, per_node)
        if nodes * gpus <= at_most and nodes * gpus % multiple == 0
    ]
    return max(shapes, key=lambda shape: (shape[0] * shape[1], -shape[0]), default=None)
