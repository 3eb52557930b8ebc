"""A plan: placement, memory, time and price of a command on hardware, before anything is loaded."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cache

from rlhf_cli.backends.cluster.placement import Layout, describe
from rlhf_cli.commands.chat import ChatConfig
from rlhf_cli.commands.inference import InferenceConfig
from rlhf_cli.commands.offline import OfflineConfig
from rlhf_cli.commands.online import OnlineConfig
from rlhf_cli.commands.serve_rm import ServeRMConfig
from rlhf_cli.config.base import CommandConfig
from rlhf_cli.config.plan import PlanConfig
from rlhf_cli.planning.architectures import find_shape
from rlhf_cli.planning.hardware import Hardware
from rlhf_cli.planning.images import RowImages
from rlhf_cli.planning.inference import chat_work, inference_work, server_work
from rlhf_cli.planning.layouts import choose_layout, layout_of
from rlhf_cli.planning.memory import GIB, USABLE, total
from rlhf_cli.planning.offline import offline_work
from rlhf_cli.planning.online import online_work
from rlhf_cli.planning.phases import Batching, GpuMemory, batching_of, disk_bytes, gpu_memory, host_memory
from rlhf_cli.planning.shapes import ModelShape
from rlhf_cli.planning.shared_memory import shared_memory
from rlhf_cli.planning.times import PhaseTime, phase_times, step_seconds
from rlhf_cli.planning.workload import CPU_PLACES, Shapes, Workload

HOST = "host"
"""Name of host memory among the phases that have a limit."""
_HOUR = 3600


@dataclass(frozen=True)
class Plan:
    """Needs of a command, by GPU and phase. All times are forecasts of one step (online: one iteration).

    - `gpus`: equal GPUs together. `host`, `disk`: bytes by purpose, on the fullest node and in the run directory.
    - `price_per_gpu_hour`: None if unknown.
    - `limits`: bytes that a phase may use on a GPU, and `HOST` on a host, by default the memory of the hardware.
    - `num_calibrating`: number of earlier runs whose measured times scale `times`.
    """

    work: Workload
    batching: Batching
    gpus: list[GpuMemory]
    host: dict[str, float]
    disk: dict[str, float]
    times: dict[str, PhaseTime]
    price_per_gpu_hour: float | None = None
    limits: Mapping[str, float] = field(default_factory=dict)
    num_calibrating: int = 0

    @property
    def fits(self) -> bool:
        """Whether all phases fit in the GPUs, the engine holds a sequence, and the hosts have enough memory."""
        return self.excess == 0

    @property
    def excess(self) -> float:
        """How much memory is missing, as a fraction of what exists; 0 if the command fits."""
        found = sum(max(0.0, *self._excesses(gpu)) for gpu in self.gpus)
        # Host memory of other machines is unknown.
        host_memory = self.work.hardware.host_memory
        host_limit = self.limits.get(HOST, None if host_memory is None else USABLE * host_memory)
        if host_limit is not None:
            found += max(0.0, self.peak_in(HOST) / host_limit - 1)
        for engine in (self.work.engine, self.work.judge):
            if engine is not None and not engine.fits:
                found += 1 - engine.cache / (engine.max_len * engine.token_bytes)
        return found

    def _excesses(self, gpu: GpuMemory) -> list[float]:
        """Return what each phase misses on a GPU, as a fraction of its limit; negative if it fits."""
        limit = USABLE * self.work.hardware.memory
        return [total(parts) / self.limits.get(phase, limit) - 1 for phase, parts in gpu.phases.items()] or [0.0]

    @property
    def peak(self) -> float:
        """Bytes on the fullest GPU."""
        return max(gpu.peak for gpu in self.gpus)

    def peak_in(self, phase: str) -> float:
        """Return the bytes on the fullest GPU in a phase, or on the fullest host for `HOST`."""
        if phase == HOST:
            return sum(self.host.values())
        return max((total(gpu.phases[phase]) for gpu in self.gpus if phase in gpu.phases), default=0.0)

    @property
    def seconds(self) -> float:
        """Seconds of a step."""
        return step_seconds(self.work, self.times)

    @property
    def bottleneck(self) -> str:
        """The longest phase."""
        return max(self.times, key=lambda name: self.times[name].seconds)

    @property
    def tokens_per_second(self) -> float:
        """Tokens of prompts and responses per second, over all GPUs; in a chat, tokens of an answer after the first."""
        tokens = self.work.tokens
        if "decode" in self.times:
            return tokens.response / self.times["decode"].seconds
        return (tokens.trained or tokens.requests * (tokens.prompt + tokens.response)) / self.seconds

    @property
    def price(self) -> float | None:
        """Price of a step on all GPUs of the plan."""
        if self.price_per_gpu_hour is None:
            return None
        return self.price_per_gpu_hour * self.work.hardware.total_gpus * self.seconds / _HOUR

    def as_dict(self) -> dict[str, object]:
        """Return the plan as JSON values: memory in GiB, times in seconds. What a command does not have is left out."""
        engine, judge = self.work.engine, self.work.judge
        of_judge = {} if judge is None else {"judge": judge.shape.parameters}
        of_training: dict[str, object] = {
            "gradient_checkpointing": self.batching.recomputes,
            "train_max_tokens_per_gpu": self.batching.max_tokens,
            "disk_gib": _in_gib(self.disk),
        }
        of_run: dict[str, object] = {
            "shared_memory_gib": _in_gib(shared_memory(self.work)),
            "steps": self.work.steps,
        }
        return {
            "fits": self.fits,
            "hardware": self.work.hardware.title,
            "parameters": {name: role.shape.parameters for name, role in self.work.roles.items()} | of_judge,
            "placement": placement(self.work),
            **(of_training if self.work.trained else {}),
            **({} if self.work.serves else of_run),
            **({"images": _described(self.work.images)} if self.work.images.count else {}),
            "gpus": [
                {
                    "roles": list(gpu.roles),
                    "count": gpu.count,
                    "memory_gib": {
                        phase: {"total": round(total(parts) / GIB, 2), **_in_gib(parts)}
                        for phase, parts in gpu.phases.items()
                    },
                }
                for gpu in self.gpus
            ],
            "gpu_memory_gib": round(self.work.hardware.memory / GIB, 2),
            "engine": None
            if engine is None
            else {
                "cache_tokens": engine.cache_tokens,
                "sequences_at_once": engine.running(self.work.tokens.prompt + self.work.tokens.response),
            },
            **({} if judge is None else {"judge": {"cache_tokens": judge.cache_tokens}}),
            "host_memory_gib": _in_gib(self.host),
            "calibrated_by": self.num_calibrating,
            "seconds": {name: round(time.seconds, 3) for name, time in self.times.items()},
            "limits": {name: time.limit for name, time in self.times.items()},
            "bottleneck": self.bottleneck,
            "tokens_per_second": round(self.tokens_per_second, 1),
            "price_per_step": self.price,
        }


def _described(images: RowImages) -> dict[str, int]:
    return {"per_row": images.count, "tokens_per_image": images.tokens, "patches_per_image": images.patches}


def _in_gib(parts: Mapping[str, float]) -> dict[str, float]:
    return {name: round(size / GIB, 2) for name, size in parts.items() if size}


def placement(work: Workload) -> list[str]:
    """Describe the placement of roles and engines, one line per kind of node."""
    lines = describe(work.layout, unit="process" if work.hardware.is_cpu else "GPU")
    unused = 0 if work.hardware.is_cpu else work.hardware.total_gpus - work.layout.num_gpus
    idle = [f"{unused} GPU{'s' if unused > 1 else ''} unused"] if unused > 0 else []
    return [*lines, *filter(None, [work.reason]), *idle]


def workload_of(
    config: CommandConfig,
    plan: PlanConfig,
    hardware: Hardware,
    shapes: Shapes,
    *,
    has_critic: bool,
    layout: Layout | None = None,
) -> Workload:
    """Return the workload of a command.

    Args:
        config: the command's settings. With `layout`, sizes and sleep of an online run are filled in.
        layout: placement of an online run, by default chosen for the hardware.

    Raises:
        UsageError: the settings need more GPUs than the hardware has, or the command cannot be planned.
    """
    if isinstance(config, OfflineConfig):
        return offline_work(config, plan, hardware, shapes)
    if isinstance(config, OnlineConfig):
        if layout is None:
            return _placed_work(config, plan, hardware, shapes, has_critic=has_critic)
        return online_work(config, plan, hardware, shapes, has_critic=has_critic, layout=layout)
    if isinstance(config, ServeRMConfig):
        return server_work(config, plan, hardware, shapes)
    if isinstance(config, ChatConfig):
        return chat_work(config, plan, hardware, shapes)
    assert isinstance(config, InferenceConfig)
    return inference_work(config, plan, hardware, shapes)


def _placed_work(
    config: OnlineConfig, plan: PlanConfig, hardware: Hardware, shapes: Shapes, *, has_critic: bool
) -> Workload:
    """Return the workload of an online command on the layout that a run would choose."""
    node_gpus = [] if hardware.is_cpu else hardware.node_gpus
    settings, reason = choose_layout(config, hardware, shapes, has_critic=has_critic, node_gpus=node_gpus)
    config, layout = config.with_layout(settings), layout_of(settings, node_gpus or [CPU_PLACES])
    work = online_work(config, plan, hardware, shapes, has_critic=has_critic, layout=layout)
    return replace(work, reason=reason)


def make_plan(
    config: CommandConfig, plan: PlanConfig, hardware: Hardware, *, has_critic: bool, shapes: Shapes | None = None
) -> Plan:
    """Plan a command on hardware. `shapes` finds models, by default from their configurations.

    Raises:
        UsageError: a model is not found, or the settings need more GPUs than the hardware has.
    """
    work = workload_of(config, plan, hardware, shapes or shapes_of(config), has_critic=has_critic)
    batching = batching_of(work)
    gpus = gpu_memory(work, batching)
    return Plan(
        work=work,
        batching=batching,
        gpus=gpus,
        host=host_memory(work, gpus, batching),
        disk=disk_bytes(work),
        times=phase_times(work, batching),
        price_per_gpu_hour=plan.price_per_gpu_hour,
    )


def shapes_of(config: CommandConfig) -> Shapes:
    """Return a function that finds the shapes of a command's models, each once."""

    @cache
    def find(pretrain: str) -> ModelShape:
        return find_shape(pretrain, trust_remote_code=bool(config.setting("trust_remote_code")))

    return find
