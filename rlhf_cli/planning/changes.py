"""Changes of flags that make a command fit or faster: candidates are planned like the command, the best are kept."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from rlhf_cli.config.base import CommandConfig
from rlhf_cli.errors import UsageError
from rlhf_cli.flags import shown
from rlhf_cli.planning.planner import Plan

Values = dict[str, object]
Planned = Callable[[CommandConfig], Plan]
"""Plans a command with other settings on the same hardware."""
_MOST_SHOWN, _MOST_COMBINED = 3, 4
_LEAST_SAVED = 0.03
"""Fraction of a step's time that a change must save."""


@dataclass(frozen=True)
class Change:
    """Settings to change, and the plan with them."""

    values: Values
    plan: Plan

    @property
    def flags(self) -> str:
        """The change as flags to paste."""
        return " ".join(_flag(name, value) for name, value in self.values.items())


def _flag(name: str, value: object) -> str:
    if isinstance(value, bool):
        return f"--{name}" if value else f"--no_{name}"
    return f"--{name} {shown(value)}"


def with_values(config: CommandConfig, values: Values) -> CommandConfig | None:
    """Return the settings with other values, or None if the command rejects them."""
    try:
        changed = config.updated(values)
        groups = {
            group: settings.model_dump(by_alias=True, include=set(changed.supported(group)), exclude_unset=False)
            for group, settings in changed
            if changed.supported(group)
        }
        return type(config)(**groups)
    except (ValidationError, UsageError):
        return None


def best_changes(config: CommandConfig, plan: Plan, planned: Planned) -> list[Change]:
    """Return the best changes: those that make a command fit, otherwise those that make it faster."""
    singles = list(_tried(config, candidates(config, plan), planned))
    if plan.fits:
        faster = [one for one in singles if one.plan.fits and _saved(plan, one) > _LEAST_SAVED]
        return sorted(faster, key=lambda one: one.plan.seconds)[:_MOST_SHOWN]
    fitting = [one for one in singles if one.plan.fits]
    if fitting:
        return sorted(fitting, key=lambda one: (_changes_model(one.values), one.plan.seconds))[:_MOST_SHOWN]
    combined = _combined(config, plan, planned)
    return [] if combined is None else [combined]


def _saved(plan: Plan, change: Change) -> float:
    return 1 - change.plan.seconds / plan.seconds


def _changes_model(values: Values) -> bool:
    """Return whether another model is trained: an adapter instead of all weights."""
    return "lora_rank" in values


def _combined(config: CommandConfig, plan: Plan, planned: Planned) -> Change | None:
    """Return changes that together make the command fit, added one by one, or None."""
    values: Values = {}
    for _ in range(_MOST_COMBINED):
        here = with_values(config, values) or config
        tried = list(_tried(here, candidates(here, plan), planned))
        if not tried:
            return None
        best = min(tried, key=lambda one: (_changes_model(one.values), one.plan.excess, one.plan.seconds))
        if best.plan.excess >= plan.excess:
            best = min(tried, key=lambda one: (one.plan.excess, one.plan.seconds))
            if best.plan.excess >= plan.excess:
                return None
        values, plan = values | best.values, best.plan
        if plan.fits:
            return Change(values, plan)
    return None


def _tried(config: CommandConfig, several: Iterator[Values], planned: Planned) -> Iterator[Change]:
    for values in several:
        changed = with_values(config, values)
        if changed is None:
            continue
        try:
            yield Change(values, planned(changed))
        except UsageError:
            continue  # the hardware has too few GPUs for it


def candidates(config: Any, plan: Plan) -> Iterator[Values]:
    """Yield the changes that may help this command."""
    if plan.work.trained:
        yield from _of_training(config, plan)
    if plan.work.engine is not None:
        yield from _of_engines(config, plan)


def _of_training(config: Any, plan: Plan) -> Iterator[Values]:
    batching, deepspeed = plan.batching, config.deepspeed
    tokens = batching.max_tokens
    yield {"gradient_checkpointing": not batching.recomputes}
    for size in _sizes(tokens, plan.work.longest):
        yield {"train_max_tokens_per_gpu": size}
        yield {"gradient_checkpointing": False, "train_max_tokens_per_gpu": size}
    for stage in (2, 3):
        if stage != deepspeed.zero_stage:
            yield {"zero_stage": stage}
    if config.optim.optim == "adamw":
        yield {"adam_offload": not deepspeed.adam_offload}
        if config.model.param_dtype == "bf16":
            yield {"optim": "adamw_bf16"}
    if not deepspeed.param_offload:
        yield {"zero_stage": 3, "param_offload": True}
    if not config.model.activation_offload:
        yield {"gradient_checkpointing": True, "activation_offload": True}
    if not config.adapter.lora_rank:
        yield {"lora_rank": 16}
        yield {"lora_rank": 16, "load_in_4bit": True}
    largest = max(role.num_ranks for role in plan.work.roles.values())
    size = deepspeed.sequence_parallel_size * 2
    if largest % size == 0:
        yield {"sequence_parallel_size": size}
    reference = getattr(config, "reference", None)
    if reference is not None and not reference.ref_offload:
        yield {"ref_offload": True}
    if getattr(config, "command", "") in ("dpo", "kto"):
        yield {"precompute_ref_log_probs": True}


def _sizes(tokens: int, longest: int) -> Sequence[int]:
    """Return other tokens per micro-batch that hold the longest sequence."""
    return [size for size in (2 * tokens, tokens // 2, tokens // 4) if longest <= size <= 65_536]


def _of_engines(config: Any, plan: Plan) -> Iterator[Values]:
    engine = plan.work.engine
    assert engine is not None
    for share in (0.4, 0.5, 0.6, 0.7, 0.8, 0.9):
        if share != engine.share:
            yield {"vllm_gpu_memory_utilization": share}
    for size in (1, 2, 4, 8):
        if size != engine.size:
            yield {"vllm_tensor_parallel_size": size, **_fewer_engines(config, plan, size)}
    if engine.is_eager:
        yield {"enforce_eager": False}
    if plan.work.trained and not (plan.work.models_sleep and plan.work.engines_sleep):
        yield {"colocate_all_models": True, "vllm_enable_sleep": True, "deepspeed_enable_sleep": True}


def _fewer_engines(config: Any, plan: Plan, size: int) -> Values:
    """Return the number of engines of this size on the same GPUs, if their number is set."""
    given, engine = config.engine.vllm_num_engines, plan.work.engine
    if given is None or engine is None:
        return {}
    return {"vllm_num_engines": max(1, given * engine.size // size)}
