"""Changes of flags that make a command fit or faster: candidates are planned like the command, the best are kept."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

from pydantic import ValidationError

from rlhf_cli.commands.offline import OfflineConfig
from rlhf_cli.config.base import CommandConfig
from rlhf_cli.errors import UsageError
from rlhf_cli.flags import shown
from rlhf_cli.planning.engines import EngineMemory
from rlhf_cli.planning.hardware import GPUS, Hardware
from rlhf_cli.planning.planner import Plan

Values = dict[str, object]
Planner = Callable[[CommandConfig, Hardware], Plan]
"""Plans a command with other settings or hardware. Raises UsageError if the hardware has too few GPUs."""
_MOST_SHOWN, _MOST_COMBINED = 3, 4
_LEAST_SAVED = 0.03
"""Fraction of a step's time that a change must save."""
_CHANGED = 2
"""How much a change affects the result if it trains other weights or other texts."""
_SHARES, _SIZES = (0.4, 0.5, 0.6, 0.7, 0.8, 0.9), (1, 2, 4, 8)
"""Fractions of GPU memory for an engine, and GPUs per engine."""
_CLUSTERS = ((2, 1), (4, 1), (8, 1), (8, 2), (8, 4), (8, 8), (8, 16))
"""GPUs per node and nodes that are tried if no flags make a command fit."""


@dataclass(frozen=True)
class Change:
    """Settings to change, and the plan with them. `gpus` are flags of the plan for other hardware."""

    values: Values
    plan: Plan
    gpus: str = ""

    @property
    def flags(self) -> str:
        """The change as flags to paste."""
        return " ".join([*filter(None, [self.gpus]), *(_flag(*one) for one in self.values.items())])


def _flag(name: str, value: object) -> str:
    if isinstance(value, bool):
        return f"--{name}" if value else f"--no_{name}"
    return f"--{name} {shown(value)}"


def with_values(config: CommandConfig, values: Mapping[str, object]) -> CommandConfig | None:
    """Return the settings with other values, or None if the command rejects them or has none of them."""
    changed = config.updated(values)
    if changed == config:
        return None
    groups = {
        group: settings.model_dump(by_alias=True, include=set(changed.supported(group)))
        for group, settings in changed
        if changed.supported(group)
    }
    try:
        return type(config)(**groups)
    except (ValidationError, UsageError):
        return None


def best_changes(config: CommandConfig, plan: Plan, planner: Planner) -> list[Change]:
    """Return the best changes: those that make a command fit, otherwise those that make it faster."""
    singles = list(_singles(config, plan, planner))
    most = (1 - _LEAST_SAVED) * plan.seconds if plan.fits else math.inf
    helping = [one for several in singles for one in several if one.plan.fits and one.plan.seconds < most]
    found = [_without_redundant(config, one, planner) for one in helping]
    if plan.fits:
        return _best(sorted(found, key=lambda one: one.plan.seconds))
    if all(_effect(one.values) == _CHANGED for one in found):
        # A combination that trains the same weights is better than an adapter.
        several = _combined(config, plan, planner, singles)
        found += [several] if several is not None and (not found or _effect(several.values) < _CHANGED) else []
    if found:
        return _best(sorted(found, key=_order))
    elsewhere = _on_more_gpus(config, plan, planner) or _on_larger_gpus(config, plan, planner)
    return [] if elsewhere is None else [elsewhere]


def _best(several: Sequence[Change]) -> list[Change]:
    """Return the first changes of different settings, of changes from best to worst."""
    # The last of equal keys stays in a dictionary, so the best must come last.
    by_settings = {tuple(one.values): one for one in reversed(several)}
    return [one for one in several if by_settings[tuple(one.values)] is one][:_MOST_SHOWN]


def _order(change: Change) -> tuple[int, float]:
    """Return a key that sorts changes from best to worst. Limits of texts stay in their order, the longest first."""
    return _effect(change.values), 0.0 if "max_len" in change.values else change.plan.seconds


def _effect(values: Values) -> int:
    """Return how much a change affects the result: 0 only by rounding, 1 other optimizer states, 2 more than that."""
    return _CHANGED if {"lora_rank", "max_len"} & values.keys() else int("optim" in values)


def _singles(config: CommandConfig, plan: Plan, planner: Planner) -> Iterator[list[Change]]:
    """Yield the possible changes in lists of equal effect on the result, least first. Makes the plans of a list."""
    for _, values_of in groupby(sorted(candidates(config, plan), key=_effect), key=_effect):
        yield list(_tried(config, values_of, plan.work.hardware, planner))


def _combined(
    config: CommandConfig, plan: Plan, planner: Planner, singles: Iterable[Sequence[Change]]
) -> Change | None:
    """Return changes that together make the command fit, added one by one to the best of `_singles`, or None."""
    values: Values = {}
    for _ in range(_MOST_COMBINED):
        # Another optimizer or an adapter only if nothing else helps.
        found = ([one for one in several if one.plan.excess < plan.excess] for several in singles)
        helping = next(filter(None, found), [])
        best = min(helping, key=lambda one: (one.plan.excess, one.plan.seconds), default=None)
        if best is None:
            return None
        values, plan = values | best.values, best.plan
        if plan.fits:
            return _needed(Change(values, plan), config, planner)
        singles = _singles(with_values(config, values) or config, plan, planner)
    return None


def _needed(change: Change, config: CommandConfig, planner: Planner) -> Change:
    """Return a combination that fits without the settings that later ones made unnecessary."""
    for name in list(change.values):
        values = {other: value for other, value in change.values.items() if other != name}
        fewer = _change(config, values, change.plan.work.hardware, planner)
        if fewer is not None and fewer.plan.fits:
            change = fewer
    return change


def _on_more_gpus(config: CommandConfig, plan: Plan, planner: Planner) -> Change | None:
    """Return the smallest number of GPUs on which the command fits, with flags, or None."""
    hardware, engine = plan.work.hardware, plan.work.engine
    for num_gpus, num_nodes in _CLUSTERS:
        if hardware.is_cpu or num_gpus * num_nodes <= plan.work.hardware.total_gpus:
            continue
        if engine is not None and not _holds_weights(engine, max(engine.share, *_SHARES), num_gpus):
            continue
        values: Values = {"num_processes": num_gpus} if isinstance(config, OfflineConfig) and num_nodes == 1 else {}
        changed, hardware = config.updated(values), replace(hardware, num_gpus=num_gpus, num_nodes=num_nodes)
        try:
            larger = planner(changed, hardware)
        except UsageError:
            continue
        singles = _singles(changed, larger, planner)
        found = Change({}, larger) if larger.fits else _combined(changed, larger, planner, singles)
        if found is not None:
            nodes = f" --num_nodes {num_nodes}" if num_nodes > 1 else ""
            return replace(found, values=values | found.values, gpus=f"--num_gpus {num_gpus}{nodes}")
    return None


def _on_larger_gpus(config: CommandConfig, plan: Plan, planner: Planner) -> Change | None:
    """Return the smallest kind of GPU in the table on which the command fits, if the planned one is in the table."""
    hardware = plan.work.hardware
    rows = sorted(GPUS.items(), key=lambda item: item[1].memory)
    if (hardware.name, hardware.memory) not in [(row.name, row.memory) for _, row in rows]:
        return None
    for kind, row in rows:
        if row.memory > hardware.memory:
            sized = replace(row, num_gpus=hardware.num_gpus, num_nodes=hardware.num_nodes)
            larger = planner(config, replace(sized, host_memory=hardware.host_memory))
            if larger.fits:
                return Change({}, larger, gpus=f"--gpu {kind}")
    return None


def first_fitting(
    config: CommandConfig, values_of: Iterable[Values], hardware: Hardware, planner: Planner
) -> Change | None:
    """Return the first change that the command accepts and that fits, None if there is none."""
    found = next((one for one in _tried(config, values_of, hardware, planner) if one.plan.fits), None)
    return None if found is None else _without_redundant(config, found, planner)


def _tried(
    config: CommandConfig, values_of: Iterable[Values], hardware: Hardware, planner: Planner
) -> Iterator[Change]:
    """Yield the changes that the command accepts, with their plans."""
    return filter(None, (_change(config, values, hardware, planner) for values in values_of))


def _change(config: CommandConfig, values: Values, hardware: Hardware, planner: Planner) -> Change | None:
    """Plan a change, None if it changes nothing, is rejected by the command, or needs more GPUs than there are."""
    changed = with_values(config, values)
    try:
        return None if changed is None else Change(values, planner(changed, hardware))
    except UsageError:
        return None


def _without_redundant(config: CommandConfig, change: Change, planner: Planner) -> Change:
    """Return the change without settings that do not affect its plan."""
    for name in change.values:
        rest = {other: value for other, value in change.values.items() if other != name}
        fewer = _change(config, rest, change.plan.work.hardware, planner) if rest else None
        if fewer is not None and _result(fewer.plan) == _result(change.plan):
            change = fewer
    return change


def _result(plan: Plan) -> tuple[bool, float, float, float]:
    return plan.fits, plan.peak, plan.seconds, sum(plan.host.values())


def candidates(config: CommandConfig, plan: Plan) -> Iterator[Values]:
    """Yield the changes that may help this command."""
    if plan.work.trained:
        yield from _of_batches(plan)
        yield from _of_states(config, plan)
        yield from _of_frozen_models(plan)
        yield from _of_ranks(config, plan)
        if not plan.fits:
            yield from _of_adapters(config)
    elif not plan.fits:
        yield from _of_inference(config)
    if plan.work.engine is not None:
        yield from _of_engines(config, plan)


def _of_batches(plan: Plan) -> Iterator[Values]:
    batching, fits = plan.batching, plan.fits
    # What needs more memory makes no command fit.
    if fits or not batching.recomputes:
        yield {"gradient_checkpointing": not batching.recomputes}
    for size in _sizes(batching.max_tokens, plan.work.longest):
        if fits or size < batching.max_tokens:
            yield {"train_max_tokens_per_gpu": size}
            yield {"gradient_checkpointing": False, "train_max_tokens_per_gpu": size}
    if not fits:
        yield {"gradient_checkpointing": True, "activation_offload": True}


def _of_inference(config: CommandConfig) -> Iterator[Values]:
    # Not to save time: where a CPU computes fast in bf16, it is the default.
    yield {"param_dtype": "bf16"}
    size, longest = config.setting("max_tokens_per_gpu"), config.setting("max_len")
    while size is not None and size > 1024:
        size //= 2
        # Longer texts get no score.
        yield {"max_tokens_per_gpu": size, "max_len": min(size, longest)}


def _sizes(tokens: int, longest: int) -> Sequence[int]:
    """Return other tokens per micro-batch that hold the longest sequence."""
    return [size for size in (2 * tokens, tokens // 2, tokens // 4) if longest <= size <= 65_536]


def _of_states(config: CommandConfig, plan: Plan) -> Iterator[Values]:
    # On a CPU, DeepSpeed keeps more copies of all weights at higher stages.
    for stage in ({0} if plan.work.hardware.is_cpu else {2, 3}) - {config.setting("zero_stage")}:
        yield {"zero_stage": stage}
    yield {"adam_offload": not config.setting("adam_offload")}
    if config.setting("optim") == "adamw":
        yield {"optim": "adamw_bf16"}
    if not plan.fits:
        yield {"zero_stage": 3, "param_offload": True}


def _of_adapters(config: CommandConfig) -> Iterator[Values]:
    if not config.setting("lora_rank"):
        yield {"lora_rank": 16}
        # ZeRO 3 cannot partition 4-bit weights.
        whole: Values = {"zero_stage": 2} if config.setting("zero_stage") == 3 else {}
        yield {"lora_rank": 16, "load_in_4bit": True, **whole}


def _of_ranks(config: CommandConfig, plan: Plan) -> Iterator[Values]:
    processes = config.setting("num_processes")
    if plan.work.hardware.is_cpu and not plan.fits and processes is not None and processes > 1:
        yield {"num_processes": processes // 2}
    size, roles = 2 * config.setting("sequence_parallel_size"), plan.work.roles.values()
    # Neither images nor recurrent states cross ranks.
    can_share = all(role.shape.vision is None and role.shape.attention_layers == role.shape.layers for role in roles)
    if can_share and all(role.num_ranks % size == 0 for role in roles):
        yield {"sequence_parallel_size": size}


def _of_frozen_models(plan: Plan) -> Iterator[Values]:
    # Commands without one of these settings ignore it.
    yield {"ref_offload": True}
    yield {"teacher_offload": True}
    if not plan.fits:
        # Not to save time: the same forward passes run before training.
        yield {"precompute_ref_log_probs": True}


def _holds_weights(engine: EngineMemory, share: float, size: int) -> bool:
    """Return whether an engine with this share and size has room for its weights, with whatever other change."""
    # One of them is bf16.
    return replace(engine, share=share, size=size, value_bytes=2).cache > 0


def _of_engines(config: CommandConfig, plan: Plan) -> Iterator[Values]:
    engine, given = plan.work.engine, config.setting("vllm_num_engines")
    assert engine is not None
    for share in _SHARES:
        if _holds_weights(engine, share, max(engine.size, *_SIZES)):
            yield {"vllm_gpu_memory_utilization": share}
    # On a CPU, all processes of an engine share its cores and memory.
    for size in () if plan.work.hardware.is_cpu else _SIZES:
        if _holds_weights(engine, max(engine.share, *_SHARES), size):
            # As many GPUs as before, if their number is set.
            number: Values = {} if given is None else {"vllm_num_engines": max(1, given * engine.size // size)}
            yield {"vllm_tensor_parallel_size": size, **number}
    judge = plan.work.judge
    if judge is not None and not plan.work.hardware.is_cpu:
        for count in _SIZES:
            if count * judge.size < plan.work.hardware.total_gpus:
                yield {"judge_num_engines": count}
    if config.setting("enforce_eager"):
        yield {"enforce_eager": False}
    if plan.work.trained and not (plan.work.models_sleep and plan.work.engines_sleep):
        yield {"colocate_all_models": True, "vllm_enable_sleep": True, "deepspeed_enable_sleep": True}
