"""Fix of an out-of-memory error: the cheapest change of flags that saves enough according to the plan."""

import re
from collections.abc import Iterator
from dataclasses import replace
from math import ceil, floor

from rlhf_cli.backends.cluster.placement import ENGINE, JUDGE
from rlhf_cli.config.base import CommandConfig
from rlhf_cli.errors import Shortage, listed
from rlhf_cli.planning.changes import Planner, Values, best_changes, first_fitting, with_values
from rlhf_cli.planning.hardware import Hardware
from rlhf_cli.planning.memory import GIB, USABLE
from rlhf_cli.planning.phases import neighbors
from rlhf_cli.planning.planner import HOST, Plan
from rlhf_cli.planning.shared_memory import shared_memory

_UNITS = {"bytes": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}
_SIZE = r"([\d.]+) (bytes|KiB|MiB|GiB)"
_TRIED, _FREE, _OTHERS = rf"tried to allocate {_SIZE}", rf"of which {_SIZE} is free", rf"Process \d+ has {_SIZE}"
"""Parts of PyTorch's messages, with any case of letters."""
_STARTUP = r"\(([\d.]+)/([\d.]+) GiB\) on startup is less than desired"
_CACHE = r"\(([\d.]+) GiB KV cache is needed, which is larger than the available KV cache memory \(([\d.]+) GiB\)"
_LENGTH = r"estimated maximum model length is (\d+)"
"""Parts of vLLM's messages: free memory and size of the GPU; KV cache of a sequence and what there is; tokens that
fit."""
_PHASES = {"training": "train", "optimizer step": "train", "forward pass": "forward", "evaluating": "forward"}
"""Phases of a plan by words in the place of a shortage."""
_MOST_SHARE = 0.95
_SHARE_STEP = 0.1
"""Fraction of GPU memory by which an engine that ran out of memory is made smaller."""


def explained(
    shortage: Shortage, config: CommandConfig, hardware: Hardware, planner: Planner
) -> tuple[str, str | None]:
    """Return the place of a shortage with what else uses the memory, and flags that help; None if none were found.

    Raises:
        UsageError: the command cannot be planned for this hardware.
    """
    plan = planner(config, hardware)
    if shortage.kind == "space in /dev/shm":
        return shortage.where, _larger_shm(plan)
    if shortage.kind == "host memory":
        return shortage.where, _shorter(shortage, config) or _fix(shortage, config, plan, planner)
    if hardware.is_cpu:
        return shortage.where, None
    where = shortage.where + _beside(plan, shortage)
    if shortage.role == JUDGE:
        return where, None
    if shortage.role == ENGINE:
        return where, _engine_fix(shortage, config, plan, planner)
    return where, _fix(shortage, config, plan, planner)


def _shorter(shortage: Shortage, config: CommandConfig) -> str | None:
    """Return the length of sequences for which vLLM's KV cache on a CPU has room, if it was too small for one."""
    needed, fitting = re.search(_CACHE, shortage.detail), re.search(_LENGTH, shortage.detail)
    name = "judge_max_len" if shortage.role == JUDGE else "max_len"
    if needed is None or fitting is None or with_values(config, {name: int(fitting[1])}) is None:
        return None
    return f"set --{name} {fitting[1]} (a sequence needs {needed[1]} GiB of KV cache, which has {needed[2]} GiB)"


def _fix(shortage: Shortage, config: CommandConfig, plan: Plan, planner: Planner) -> str | None:
    """Return the best change that saves the missing memory."""
    # With the values that were chosen for the memory, so that they can be lowered.
    batching, chosen = plan.batching, dict[str, object]()
    if plan.work.trained:
        chosen = {"gradient_checkpointing": batching.recomputes, "train_max_tokens_per_gpu": batching.max_tokens}
    # A pack as short as one sequence does not get smaller with fewer tokens per micro-batch.
    one_sequence = 0 < shortage.tokens <= plan.work.longest
    failed = {"train_max_tokens_per_gpu": shortage.tokens} if one_sequence else {}
    filled = with_values(config, chosen | failed) or config
    plan = planner(filled, plan.work.hardware)
    limits = _limits(shortage, plan)

    def limited(changed: CommandConfig, hardware: Hardware) -> Plan:
        return replace(planner(changed, hardware), limits=limits)

    change = next(iter(best_changes(filled, limited(filled, plan.work.hardware), limited)), None)
    if change is None:
        return None
    if change.gpus:
        flags = f" with {replace(change, gpus='').flags}" if change.values else ""
        return f"no flag saves enough here; it fits {change.plan.work.hardware.title}{flags}"
    # The next run would fill the memory that a change frees, unless it is given the same values.
    both = [] if one_sequence else [change.values, chosen | change.values]
    change = first_fitting(config, both, plan.work.hardware, limited) or change
    fullest = max(limits, key=plan.peak_in)
    before, after = plan.peak_in(fullest) / GIB, change.plan.peak_in(fullest) / GIB
    return f"set {change.flags} ({after:.1f} instead of {before:.1f} GiB planned)"


def _limits(shortage: Shortage, plan: Plan) -> dict[str, float]:
    """Return the bytes that the phases of a shortage may use.

    The plan may have found enough memory where there was too little, so the missing memory must be saved.
    """
    missing = max(0.0, size_in(shortage.detail, _TRIED) - size_in(shortage.detail, _FREE))
    hardware = plan.work.hardware
    if shortage.kind == "host memory":
        phases, size = [HOST], hardware.host_memory or plan.peak_in(HOST)
    else:
        named = next((phase for words, phase in _PHASES.items() if words in shortage.where), None)
        # In an unknown phase, such as loading: trained and frozen models, without engines.
        own = [phase for phase in plan.gpus[0].phases if phase in _PHASES.values()] or [*plan.gpus[0].phases]
        phases, size = [named] if named else own, USABLE * hardware.memory
    peaks = {phase: plan.peak_in(phase) for phase in phases}
    return {phase: max(1.0, min(size, USABLE * peak, peak - missing)) for phase, peak in peaks.items()}


def size_in(text: str, pattern: str) -> float:
    """Return the sum of bytes that a library's message names with this pattern."""
    return sum(float(number) * _UNITS[unit] for number, unit in re.findall(pattern, text, re.IGNORECASE))


def _beside(plan: Plan, shortage: Shortage) -> str:
    """Describe what else is on the GPU of a role."""
    # The model of an offline command has another name in messages.
    name = shortage.role if plan.work.layout.of(shortage.role) else next(iter(plan.work.trained), "")
    others = neighbors(plan.work, plan.batching, name) if name else {}
    found = [f"{other} ({size / GIB:.1f} GiB planned)" for other, size in others.items() if size]
    used = size_in(shortage.detail, _OTHERS)
    found += [f"processes that use {used / GIB:.1f} GiB"] if used > sum(others.values()) + GIB else []
    return f"{shortage.where and ','} sharing the GPU with {listed(found)}".lstrip() if found else ""


def _engine_fix(shortage: Shortage, config: CommandConfig, plan: Plan, planner: Planner) -> str | None:
    """Return the first of the engine's settings that fits."""
    change = first_fitting(config, _engine_values(shortage.detail, plan), plan.work.hardware, planner)
    if change is None or change.plan.work.engine is None:
        return None
    return f"set {change.flags} (KV cache for {change.plan.work.engine.cache_tokens:,} tokens planned)"


def _engine_values(detail: str, plan: Plan) -> Iterator[Values]:
    """Yield settings that leave the engine enough memory, according to vLLM's message."""
    engine = plan.work.engine
    assert engine is not None, "an engine failed that is not in the plan"
    share, memory = engine.share, engine.gpu_bytes
    shortest: Values = {}
    if match := re.search(_STARTUP, detail):
        free, size = map(float, match.groups())
        # Rounded down, with room for processes that grow.
        yield {"vllm_gpu_memory_utilization": floor(100 * (free / size - 0.01)) / 100}
    elif match := re.search(_CACHE, detail):
        needed, available = map(float, match.groups())
        share += (needed - available) * GIB / memory + 0.01
        if tokens := re.search(_LENGTH, detail):
            shortest = {"max_len": int(tokens[1])}
    elif "memory for the cache blocks" in detail:
        # The plan saw a cache where there was none.
        share += (max(0.0, engine.cache) + engine.max_len * engine.token_bytes) / memory
    else:
        yield {"vllm_gpu_memory_utilization": round(share - _SHARE_STEP, 2)}
    if engine.share < share <= _MOST_SHARE:
        yield {"vllm_gpu_memory_utilization": min(_MOST_SHARE, ceil(100 * share) / 100)}
    yield {"vllm_tensor_parallel_size": 2 * engine.size}
    if shortest:
        yield shortest


def _larger_shm(plan: Plan) -> str | None:
    """Return the size of /dev/shm that a container needs."""
    sizes = shared_memory(plan.work)
    if not sizes:
        return None
    # A quarter more, for needs outside the plan.
    gib = max(1, ceil(1.25 * sum(sizes.values()) / GIB))
    parts = listed(f"{name} {size / GIB:.1f} GiB" for name, size in sizes.items())
    return f"start the container with --shm-size {gib}g ({parts} planned), or remove files that earlier runs left there"
