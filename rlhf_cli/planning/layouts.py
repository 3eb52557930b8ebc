"""Layout of an online command without placement flags: the fastest candidate whose plan fits.

Runs and `rlhf plan` call `choose_layout`. It depends only on settings and hardware, so that a resumed run gets the
layout of its checkpoint: mean lengths are always half of their limits, and no measurement of an earlier run changes it.
"""

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

from rlhf_cli.backends.cluster.default_layout import LayoutNeeds, candidate_layouts, fill_layout, memory_share
from rlhf_cli.backends.cluster.placement import ENGINE, JUDGE, Layout, plan_layout
from rlhf_cli.commands.online import OnlineConfig
from rlhf_cli.config.placement import LayoutSettings
from rlhf_cli.config.plan import PlanConfig
from rlhf_cli.errors import UsageError
from rlhf_cli.planning.engines import EngineMemory
from rlhf_cli.planning.hardware import Hardware
from rlhf_cli.planning.online import layout_needs, on_layout, online_models, online_work
from rlhf_cli.planning.phases import Batching, GpuMemory, batching_of, gpu_memory, in_gpus, shortage
from rlhf_cli.planning.times import PhaseTime, phase_times, step_seconds
from rlhf_cli.planning.workload import Shapes, Workload

_LEAST_SAVED = 0.05
"""Fraction of the time that a layout without sleep or with larger engines must save: a forecast is not more accurate,
and such a layout leaves less memory or depends on links between GPUs."""
_RESERVE = 0.9
"""Fraction of GPU memory that models and engines may use together without sleep."""
_SIZES = (1, 2, 4, 8)
"""GPUs per engine to try."""
_FEW_SEQUENCES = 32
"""An engine that runs fewer sequences at once reads its weights for few tokens, so twice as many GPUs are tried."""


@dataclass(frozen=True)
class _Candidate:
    """A layout with its plan, and what of it does not fit."""

    settings: LayoutSettings
    work: Workload
    batching: Batching
    gpus: list[GpuMemory]
    lack: str

    @cached_property
    def times(self) -> dict[str, PhaseTime]:
        return phase_times(self.work, self.batching)

    @cached_property
    def seconds(self) -> float:
        return step_seconds(self.work, self.times)

    @property
    def is_apart(self) -> bool:
        return not self.settings.together

    @property
    def peak(self) -> float:
        return max(gpu.peak for gpu in self.gpus)

    @property
    def engine_fits(self) -> bool:
        return self.work.engine is not None and self.work.engine.fits

    @property
    def title(self) -> str:
        """Describe the layout, as in "31.0 s if ..."."""
        engine_gpus = sum(len(seat.gpus) for seat in self.work.layout.of(ENGINE))
        of_judge = sum(len(seat.gpus) for seat in self.work.layout.of(JUDGE) if not seat.shared)
        size = self.settings.engine_size or 1
        engines = f", {size} for each engine" if size > 1 else ""
        if self.is_apart:
            models = self.work.layout.num_gpus - engine_gpus - of_judge
            verb = "is" if models == 1 else "are"
            return f"{in_gpus(models)} {verb} for models and {engine_gpus} for engines{engines}"
        everywhere = f"on {in_gpus(self.work.layout.num_gpus - of_judge)}{engines}"
        if self.settings.models_sleep:
            return f"models and engines take turns {everywhere}"
        return f"models and engines stay {everywhere} without sleep"


def choose_layout(
    config: OnlineConfig,
    hardware: Hardware | None,
    shapes: Shapes,
    *,
    has_critic: bool,
    node_gpus: Sequence[int],
    can_sleep: bool = True,
) -> tuple[LayoutSettings, str]:
    """Fill in the layout of an online command. Returns it and the reason; "" if flags determine it.

    Args:
        hardware: the GPUs, None if their memory is unknown. Then, and with a placement flag, `fill_layout` decides.
        node_gpus: GPUs per node, largest first; empty on a cluster without GPUs.
        can_sleep: whether this machine has what sleeping models need.

    Raises:
        UsageError: there are too few GPUs for the settings.
    """
    models = list(online_models(config, has_critic=has_critic))
    settings = config.layout_settings([name for name in models if config.host_of(name) == name])
    needs = layout_needs(config, models)
    needs = replace(needs, can_sleep=needs.can_sleep and can_sleep)
    default, reason = fill_layout(settings, node_gpus=node_gpus, needs=needs)
    if hardware is None or not node_gpus or not settings.is_free:
        return default, reason
    layout = layout_of(default, node_gpus)
    placed = config.with_layout(default)
    work = online_work(placed, PlanConfig(), hardware, shapes, has_critic=has_critic, layout=layout)
    # Engines of several GPUs may leave none for models.
    tried = list(_candidates(settings, work, node_gpus, needs)) or [_planned(default, work)]
    fitting = [one for one in tried if not one.lack]
    if not fitting:
        return default, f"{reason}; no layout fits: {_closest(tried)}"
    best = min(fitting, key=_cost)
    return best.settings, _reason(best, tried) + hardware.assumption


def _cost(candidate: _Candidate) -> float:
    settings = candidate.settings
    doublings = (settings.engine_size or 1).bit_length() - 1
    return candidate.seconds * (1 + _LEAST_SAVED * (doublings + (not settings.models_sleep)))


def _candidates(
    settings: LayoutSettings, work: Workload, node_gpus: Sequence[int], needs: LayoutNeeds
) -> Iterator[_Candidate]:
    """Plan all layouts that the settings allow. Skips those that do not fit into the nodes."""
    assert isinstance(work.config, OnlineConfig)
    found = candidate_layouts(
        settings,
        node_gpus=node_gpus,
        needs=needs,
        shared_sizes=_engine_sizes(settings, work, most=max(node_gpus), shared=True),
        own_sizes=_engine_sizes(settings, work, most=max(node_gpus), shared=False),
    )
    # nccl and ipc work only between separate and shared GPUs.
    refused = {"nccl": True, "ipc": False}.get(work.config.engine.vllm_sync_backend)
    for one in found:
        if one.together is refused:
            continue
        with suppress(UsageError):
            yield _planned(one, on_layout(work, one, layout_of(one, node_gpus)))


# Changes of flags have the same layouts, each of which takes milliseconds on a thousand GPUs.
@lru_cache(maxsize=64)
def _layout(settings: LayoutSettings, node_gpus: tuple[int, ...]) -> Layout:
    return plan_layout(settings, node_gpus=list(node_gpus))


def layout_of(settings: LayoutSettings, node_gpus: Sequence[int]) -> Layout:
    """Assign roles and engines to GPUs. Raises UsageError if they do not fit into the nodes."""
    # Sleep of models does not matter for it.
    return _layout(replace(settings, models_sleep=None, is_open=False), tuple(node_gpus))


def _engine_sizes(settings: LayoutSettings, work: Workload, *, most: int, shared: bool) -> list[int]:
    """Return the GPUs per engine to try: as given, otherwise the fewest that hold the model, perhaps twice as many."""
    engine, config = work.engine, work.config
    assert engine is not None
    if settings.engine_size is not None or not engine.is_vllm:
        return [settings.engine_size or 1]
    share = memory_share(config.setting("vllm_gpu_memory_utilization"), shared=shared)
    # vLLM splits attention heads.
    sizes = [size for size in _SIZES if size <= most and engine.shape.key_heads % size == 0]
    fitting = [one for one in (replace(engine, share=share, size=size) for size in sizes) if one.fits]
    if not fitting:
        return [1]
    return [one.size for one in fitting[: 2 if _runs_few(fitting[0], work) else 1]]


def _runs_few(engine: EngineMemory, work: Workload) -> bool:
    return engine.running(work.tokens.prompt + work.tokens.response) < _FEW_SEQUENCES


def _planned(settings: LayoutSettings, work: Workload) -> _Candidate:
    batching = batching_of(work)
    gpus = gpu_memory(work, batching)
    # Sleep makes room for errors of the forecast.
    reserved = replace(work.hardware, memory=_RESERVE * work.hardware.memory)
    limited = replace(work, hardware=reserved) if settings.together and not settings.models_sleep else work
    return _Candidate(settings, work, batching, gpus, shortage(limited, gpus, batching))


def _closest(tried: Sequence[_Candidate]) -> str:
    """Describe the layout that lacks the least memory."""
    closest = min(tried, key=lambda one: (not one.engine_fits, one.peak))
    return f"if {closest.title}, {closest.lack}"


def _reason(best: _Candidate, tried: Sequence[_Candidate]) -> str:
    """Compare the chosen layout with the best one of the kind that it is not: on shared or on separate GPUs."""
    planned = f"{best.title}: {best.seconds:.1f} s per iteration planned"
    if best.work.samples_ahead:
        sampling = best.times["generate"].seconds
        training = sum(best.times[phase].seconds for phase in ("forward", "train") if phase in best.times)
        return f"{planned}, sampling {sampling:.1f} s during {training:.1f} s of training"
    kind = [one for one in tried if one.is_apart != best.is_apart]
    fitting = [one for one in kind if not one.lack]
    if fitting:
        second = min(fitting, key=_cost)
        return f"{planned}; {second.seconds:.1f} s if {second.title}"
    if kind:
        return f"{planned}; {_closest(kind)}"
    return planned
