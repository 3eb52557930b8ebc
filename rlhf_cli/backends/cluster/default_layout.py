"""Default numbers of nodes, GPUs and engines, and sleep settings of online runs: pure functions of settings and GPUs.

`candidate_layouts` are those that a plan compares. `placement` then assigns ranks to GPUs.
"""

from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass, replace
from math import gcd, prod

from rlhf_cli.backends.cluster.placement import Layout
from rlhf_cli.commands.inference import InferenceConfig
from rlhf_cli.config.placement import LayoutSettings
from rlhf_cli.config.roles import ROLES
from rlhf_cli.errors import UsageError

_OWN_GPU_SHARE, _SHARED_GPU_SHARE = 0.9, 0.6
"""Default memory fraction for an engine with exclusive GPUs, and for an engine that shares GPUs."""
_FEW_GPUS, _PARTS = 16, 16
"""Up to this many GPUs, models are tried on each number of them, above on multiples of a sixteenth."""
_TURNS = "models and engines take turns on all GPUs, because no placement flag is set"
_AHEAD = "engines have separate GPUs, because they sample while the models train"
_NO_SLEEP = "models and engines have separate GPUs, because models cannot sleep with these settings"


@dataclass(frozen=True)
class LayoutNeeds:
    """Layout requirements from other settings.

    - `multiple`: must divide the number of ranks in each role.
    - `samples_ahead`: engines sample while models train.
    - `can_sleep`: models can move to host memory while other roles use the GPUs.
    """

    multiple: int = 1
    samples_ahead: bool = False
    can_sleep: bool = True


def fill_layout(
    settings: LayoutSettings, *, node_gpus: Sequence[int], needs: LayoutNeeds
) -> tuple[LayoutSettings, str]:
    """Fill in all unset numbers and switches. Returns the settings and the reason for the layout.

    Values set by the user are kept. The reason is empty if the user has chosen the layout.

    Args:
        settings: settings, possibly incomplete.
        node_gpus: GPUs per node, largest first; empty on a cluster without GPUs.
        needs: requirements from other settings.
    """
    reason = ""
    if node_gpus and settings.is_open:
        settings, reason = _on_all_gpus(settings, list(node_gpus), needs)
    together = bool(settings.together)
    sleeps = bool(node_gpus) and together
    filled = replace(
        settings,
        together=together,
        num_engines=settings.num_engines or 1,
        engine_size=settings.engine_size or 1,
        models_sleep=sleeps and needs.can_sleep if settings.models_sleep is None else settings.models_sleep,
        engines_sleep=sleeps if settings.engines_sleep is None else settings.engines_sleep,
    )
    return filled, reason


def candidate_layouts(
    settings: LayoutSettings,
    *,
    node_gpus: Sequence[int],
    needs: LayoutNeeds,
    shared_sizes: Sequence[int],
    own_sizes: Sequence[int],
) -> Iterator[LayoutSettings]:
    """Yield complete layouts for settings without a placement flag, those that need the least memory first.

    Example, rlhf grpo on 4 GPUs: all roles on 4 GPUs with sleep and without; actor and reference on 1, 2 or 3 of them.

    Args:
        shared_sizes, own_sizes: GPUs per engine to try, for engines on shared GPUs and on separate ones.
    """
    for size in [] if needs.samples_ahead else shared_sizes:
        whole = _together(replace(settings, engine_size=size), list(node_gpus), needs)
        if settings.judge is not None and settings.judge[0] is None:
            yield replace(whole, models_sleep=needs.can_sleep, engines_sleep=True)
            continue
        for sleeps in [True, False] if needs.can_sleep else [False]:
            yield replace(whole, models_sleep=sleeps, engines_sleep=sleeps)
    awake = replace(settings, together=False, models_sleep=False, engines_sleep=False)
    paired = replace(awake, pairs=_all_pairs(settings.shapes.keys()))
    found: list[LayoutSettings] = []
    for size in own_sizes:
        for models in _splits(sum(besides_judge(awake, node_gpus))):
            apart = _apart(replace(paired, engine_size=size), list(node_gpus), needs, models=models)
            if apart is not None and apart not in found:
                found.append(apart)
    yield from found


def inference_layout(config: InferenceConfig, node_gpus: Sequence[int], *, has_reward_model: bool) -> LayoutSettings:
    """Return the layout of `generate` and `eval`, whose engines use the GPUs that other models leave.

    Args:
        node_gpus: GPUs per node, largest first; empty on a cluster without GPUs.
    """
    size, reward = config.engine.vllm_tensor_parallel_size or 1, config.reward
    ranks = (config.reward_ranks.reward_num_gpus_per_node or 1) if has_reward_model else 0
    settings = LayoutSettings(
        shapes={"reward": (1, ranks)} if has_reward_model else {},
        together=False,
        num_engines=config.engine.vllm_num_engines,
        engine_size=size,
        judge=(reward.judge_num_engines, reward.judge_tensor_parallel_size) if reward.starts_judge else None,
        engines_sleep=bool(node_gpus),
    )
    judges = 0 if settings.own_judge is None else prod(settings.own_judge)
    # Share GPUs only if the models do not fit beside the engines.
    is_full = bool(node_gpus) and sum(node_gpus) < ranks + size + judges
    given, shares = config.placement.colocate_all_models, has_reward_model or settings.judge is not None
    if shares and (is_full if given is None else given):
        return replace(settings, together=True)
    if settings.num_engines is None and node_gpus:
        # The reward model is placed on the first node, so fewer GPUs remain there.
        left = besides_judge(settings, [node_gpus[0] - ranks, *node_gpus[1:]])
        return replace(settings, num_engines=sum(count // size for count in left) or 1)
    return settings


def _splits(num_gpus: int) -> list[int]:
    """Return the numbers of GPUs to try for models that have separate ones."""
    if num_gpus <= _FEW_GPUS:
        return [*range(1, num_gpus)]
    return [num_gpus * part // _PARTS for part in range(1, _PARTS)]


def memory_share(given: float | None, *, shared: bool) -> float:
    """Return an engine's GPU memory fraction: as set, otherwise depending on whether other roles share the GPUs."""
    return given if given is not None else _SHARED_GPU_SHARE if shared else _OWN_GPU_SHARE


def idle_gpus(layout: Layout, node_gpus: Sequence[int]) -> str:
    """Describe the number of unused GPUs, such as "2 GPUs idle"; "" if there are none."""
    idle = sum(node_gpus) - layout.num_gpus
    return f"{_sum_in_words([idle])} idle" if idle else ""


def _sum_in_words(node_gpus: Sequence[int]) -> str:
    count = sum(node_gpus)
    return f"{count} GPU{'' if count == 1 else 's'}"


def _on_all_gpus(settings: LayoutSettings, node_gpus: list[int], needs: LayoutNeeds) -> tuple[LayoutSettings, str]:
    """Choose sizes that use as many GPUs as possible. Returns the settings and the reason."""
    roles = settings.shapes.keys()
    pairs = [pair for pair in settings.pairs if roles >= set(pair)]
    wants_turns = not needs.samples_ahead and needs.can_sleep and not pairs
    if settings.together or (settings.together is None and wants_turns):
        return _together(settings, node_gpus, needs), _TURNS
    if needs.samples_ahead and settings.together is None and not pairs:
        settings = replace(settings, pairs=_all_pairs(roles))
    apart = _apart(settings, node_gpus, needs)
    if apart is not None:
        return apart, _AHEAD if needs.samples_ahead else "" if needs.can_sleep else _NO_SLEEP
    if needs.samples_ahead:
        raise UsageError(
            f"--async_train samples while the models train, so engines require separate GPUs: "
            f"{_sum_in_words(node_gpus)} are not enough for {' + '.join(roles)} and an engine; remove --async_train"
        )
    # plan_layout then raises an error with the missing resources.
    if settings.together is False:
        return settings, ""
    return _together(settings, node_gpus, needs), _TURNS


def _together(settings: LayoutSettings, node_gpus: list[int], needs: LayoutNeeds) -> LayoutSettings:
    """Place all roles on the same GPUs, with engines that use all of them."""
    size = settings.engine_size or 1
    # On GPUs, engines sleep unless the user says otherwise.
    sleeps = settings.engines_sleep is not False
    gpus = besides_judge(replace(settings, together=True, engines_sleep=sleeps), node_gpus)
    shape = _largest_shape(gpus, at_most=sum(gpus), per_node=size, multiple=needs.multiple) or (1, 1)
    return _sized(settings, shape, num_engines=max(1, shape[0] * shape[1] // size), together=True)


def _apart(
    settings: LayoutSettings, node_gpus: list[int], needs: LayoutNeeds, *, models: int | None = None
) -> LayoutSettings | None:
    """Give each role the same number of GPUs, and the rest to the engines. Returns None if there are too few GPUs.

    Args:
        models: limit for the GPUs of all roles, by default such that engines get as many as a role.
    """
    roles = settings.shapes.keys()
    followers = {second for first, second in settings.pairs if roles >= {first, second}}
    num_pools = len(roles - followers)
    node_gpus = besides_judge(replace(settings, together=False), node_gpus)
    at_most = sum(node_gpus) // (num_pools + 1) if models is None else models // num_pools
    shape = _largest_shape(node_gpus, at_most=at_most, per_node=1, multiple=needs.multiple)
    if shape is None:
        return None
    left = _left(node_gpus, num_pools * shape[0], shape[1])
    if left is None:
        return None
    num_engines = sum(count // (settings.engine_size or 1) for count in left)
    return _sized(settings, shape, num_engines=num_engines, together=settings.together) if num_engines else None


def _left(node_gpus: Sequence[int], count: int, size: int) -> list[int] | None:
    """Return the GPUs per node, largest first, without `count` times `size` of them; None if there are too few."""
    left = sorted(node_gpus)
    # From the nodes with the fewest sufficient ones, as `plan_layout` does.
    for node, gpus in enumerate(left):
        taken = min(count, gpus // size)
        left[node] -= taken * size
        count -= taken
    return None if count else sorted(left, reverse=True)


def besides_judge(settings: LayoutSettings, node_gpus: Sequence[int]) -> list[int]:
    """Return the GPUs per node that a judge leaves to others; all if there are too few, which `plan_layout` reports."""
    left = None if settings.own_judge is None else _left(node_gpus, *settings.own_judge)
    return [gpus for gpus in left if gpus] if left else list(node_gpus)


def _all_pairs(roles: Set[str]) -> tuple[tuple[str, str], ...]:
    """Return all pairs of roles that can share GPUs while engines have separate ones."""
    pairs = ((role.partner, role.name) for role in ROLES.values() if role.switch)
    return tuple(pair for pair in pairs if roles >= set(pair))


def _sized(
    settings: LayoutSettings, shape: tuple[int, int], *, num_engines: int, together: bool | None
) -> LayoutSettings:
    """Return the settings with the same size for all roles."""
    shapes = dict.fromkeys(settings.shapes, shape)
    return replace(settings, shapes=shapes, num_engines=num_engines, together=together, is_open=False)


def _largest_shape(node_gpus: list[int], *, at_most: int, per_node: int, multiple: int) -> tuple[int, int] | None:
    """Return (nodes, GPUs per node) with the most GPUs, and as few nodes as possible. Returns None if nothing fits.

    Args:
        node_gpus: GPUs per node, largest first.
        at_most: limit for the total number of GPUs.
        per_node: must divide the GPUs per node.
        multiple: must divide the total number of GPUs.
    """
    shapes = []
    for gpus in range(per_node, max(node_gpus, default=0) + 1, per_node):
        step = multiple // gcd(multiple, gpus)
        nodes = min(sum(count >= gpus for count in node_gpus), at_most // gpus) // step * step
        shapes += [(nodes, gpus)] if nodes else []
    return max(shapes, key=lambda shape: (shape[0] * shape[1], -shape[0]), default=None)
