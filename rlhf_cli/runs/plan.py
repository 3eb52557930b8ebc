"""`rlhf plan`: makes the plan of a command and prints it."""

import json
import sys

from rlhf_cli.algorithms.estimators.table import ESTIMATORS
from rlhf_cli.commands.online import OnlineConfig
from rlhf_cli.commands.plan import plan_settings
from rlhf_cli.config.base import CommandConfig
from rlhf_cli.config.plan import PlanConfig
from rlhf_cli.config.train import DEFAULT_TOKENS
from rlhf_cli.errors import UsageError, listed
from rlhf_cli.planning.calibration import calibrated, calibration_file, read_runs
from rlhf_cli.planning.changes import Change, Planner, best_changes
from rlhf_cli.planning.engines import EngineMemory
from rlhf_cli.planning.hardware import Hardware, hardware_of
from rlhf_cli.planning.images import RowImages
from rlhf_cli.planning.memory import GIB, USABLE, total
from rlhf_cli.planning.phases import GpuMemory
from rlhf_cli.planning.planner import Plan, make_plan, placement, shapes_of
from rlhf_cli.planning.shared_memory import shared_memory
from rlhf_cli.planning.workload import Workload
from rlhf_cli.runs.online.checks import check_settings
from rlhf_cli.runs.online.estimator import estimator_of

_UNKNOWN_TIMES = ("reward_funcs", "reward_func", "remote_rm_url", "judge", "environment", "agent_command")
"""Settings of rewards and environments, which a plan does not run. A reward model is part of the phase `forward`, and
`reward` is the time of a judge model."""
_SHORT_STEP = 2.0
"""Seconds below which fixed costs dominate a step on a CPU (docs/benchmarks.md)."""
_SHORT_STEPS = (
    "Steps this short last up to four times as long on a CPU: Python, Ray and DeepSpeed have fixed costs that are not "
    "planned. A run of three steps calibrates later plans"
)
DOES_NOT_FIT = 3
"""Exit status if a command does not fit the hardware."""
_PARTS = ("weights", "gradients", "optimizer", "activations", "logits", "buffers", "cache", "processes")


def plan_command(config: CommandConfig) -> None:
    """Print the plan of a command, and changes that help. Exits with 3 if the command does not fit."""
    settings = plan_settings(config)
    _check_lengths(config, settings)
    if isinstance(config, OnlineConfig):
        check_settings(config, estimator_of(config))
    plan, changes = plan_with_changes(config, settings)
    if settings.as_json:
        found = [{"flags": one.flags, "fits": one.plan.fits, **_result(one)} for one in changes]
        print(json.dumps({"command": config.command, **plan.as_dict(), "changes": found}, indent=1))
    else:
        print("\n".join(lines_of(config, plan, changes)))
    if not plan.fits:
        sys.exit(DOES_NOT_FIT)


def _check_lengths(config: CommandConfig, settings: PlanConfig) -> None:
    """Raise UsageError if a mean length is more than the longest sequence."""
    longest = config.setting("max_len")
    for name in ("row_tokens", "prompt_tokens", "response_tokens"):
        mean = getattr(settings, name)
        if longest is not None and mean is not None and mean > longest:
            raise UsageError(
                f"--{name} {mean} is more than --max_len {longest}, the longest sequence: lower the former or raise "
                "the latter"
            )


def _check_plan(config: CommandConfig, work: Workload) -> None:
    """Raise UsageError if a run rejects settings that do not fit the models or their ranks."""
    for name, role in work.roles.items():
        settings, ranks = role.settings, role.num_ranks
        flag = "tensor_parallel_size" if settings.tensor_parallel_size > 1 else "sequence_parallel_size"
        if ranks % settings.ranks_per_pack:
            raise UsageError(f"--{flag} {settings.ranks_per_pack} does not divide the {ranks} ranks of {name}")
    targets = config.setting("target_modules")
    if config.setting("optim") and not work.trained:
        known = dict.fromkeys(linear[0] for role in work.roles.values() for linear in role.shape.linears)
        raise UsageError(f"--target_modules {','.join(targets)} selects none of all-linear, {', '.join(known)}")
    engine, judge = work.engine, work.judge
    if judge is not None and judge.shape.positions is not None and judge.max_len > judge.shape.positions:
        raise UsageError(f"--judge_max_len {judge.max_len}: the judge has {judge.shape.positions} positions")
    if engine is None or work.serves or not engine.is_vllm or engine.shape.positions is None:
        return
    if engine.max_len > engine.shape.positions:
        raise UsageError(
            f"--max_len {engine.max_len}: the model has {engine.shape.positions} positions, which is the limit in vLLM"
        )


def plan_with_changes(config: CommandConfig, settings: PlanConfig) -> tuple[Plan, list[Change]]:
    """Return the plan of a command, and the best changes of its flags. Raises UsageError if a run rejects its flags."""
    planner = planner_of(config, settings)
    plan = planner(config, hardware_of(settings))
    _check_plan(config, plan.work)
    return plan, best_changes(config, plan, planner)


def planner_of(config: CommandConfig, settings: PlanConfig) -> Planner:
    """Return a function that plans this command with other settings or hardware. Each file is read once."""
    shapes = shapes_of(config)
    runs = read_runs(calibration_file()) if settings.calibration else []
    has_critic = isinstance(config, OnlineConfig) and ESTIMATORS[config.estimator].critic

    def planner(changed: CommandConfig, hardware: Hardware) -> Plan:
        plan = make_plan(changed, settings, hardware, has_critic=has_critic, shapes=shapes)
        return calibrated(plan, runs)

    return planner


def _result(change: Change) -> dict[str, float]:
    return {"gpu_peak_gib": round(change.plan.peak / GIB, 2), "seconds": round(change.plan.seconds, 3)}


def lines_of(config: CommandConfig, plan: Plan, changes: list[Change]) -> list[str]:
    """Return the plan as text."""
    work = plan.work
    model = config.setting("pretrain") or config.setting("reward_pretrain")
    shape = work.engine.shape if work.engine is not None else next(iter(work.roles.values())).shape
    return [
        f"rlhf {config.command} with {model} ({shape.parameters / 1e9:.2f}B parameters) on {work.hardware.title}",
        *_image_lines(work.images),
        "",
        "Placement",
        *(f"  {line}" for line in placement(work)),
        "",
        *_memory_lines(plan),
        *(_time_lines(plan) if plan.fits else []),
        *_change_lines(plan, changes),
    ]


def _image_lines(images: RowImages) -> list[str]:
    if not images.count:
        return []
    return [f"Images per row: {images.count}, each with up to {images.tokens:,} tokens and {images.patches:,} patches"]


def _memory_lines(plan: Plan) -> list[str]:
    work = plan.work
    unit = "the machine" if work.hardware.is_cpu else "a GPU"
    lines = [f"Peak memory of {unit} in GiB, {USABLE * work.hardware.memory / GIB:.1f} usable (forecast)"]
    for gpu in plan.gpus:
        lines += [f"  {gpu.count} x {' + '.join(gpu.roles)}", *_phase_table(gpu)]
    if work.engine is not None:
        lines.append(f"  engine: {_cache(work.engine, work.tokens.prompt + work.tokens.response)}")
    if work.judge is not None:
        lines.append(f"  judge: {_cache(work.judge, work.questions.length)}")
    lines += [f"  {plan.batching.reason}"] if plan.batching.reason else []
    lines += [f"  {warning}"] if (warning := _long_rows(work, plan.batching.max_tokens)) else []
    lines += _sizes("Host memory per node", plan.host)
    lines += _sizes("/dev/shm per node", shared_memory(plan.work))
    return [*lines, *_sizes("Disk", plan.disk), ""]


def _long_rows(work: Workload, max_tokens: int) -> str:
    """Warn that a run stops if its data has rows as long as the settings allow; "" if they fit a micro-batch."""
    # On a CPU, micro-batches of a plan are those of mean rows.
    limit = max(max_tokens, work.config.setting("train_max_tokens_per_gpu") or DEFAULT_TOKENS)
    if not work.trained or work.longest <= limit:
        return ""
    return (
        f"rows that need more than {limit:,} tokens of a GPU stop the run: set --train_max_tokens_per_gpu "
        f"{work.longest} to plan for the longest, or lower --max_len"
    )


def _phase_table(gpu: GpuMemory) -> list[str]:
    parts = [part for part in _PARTS if any(phase.get(part) for phase in gpu.phases.values())]
    head = "    " + "phase".ljust(10) + "total".rjust(8) + "".join(part.rjust(12) for part in parts)
    rows = []
    for phase, sizes in gpu.phases.items():
        cells = "".join(f"{sizes.get(part, 0) / GIB:.1f}".rjust(12) for part in parts)
        rows.append("    " + phase.ljust(10) + f"{total(sizes) / GIB:.1f}".rjust(8) + cells)
    return [head, *rows]


def _cache(engine: EngineMemory, length: float) -> str:
    if engine.fits:
        running = engine.running(length)
        count = f"{running:,} sequence{'s' if running != 1 else ''}"
        return f"KV cache for {engine.cache_tokens:,} tokens, {count} of {length:,.0f} tokens at once"
    weights, room = engine.weights / GIB, engine.share * engine.gpu_bytes / GIB
    return f"no room for a sequence of {engine.max_len:,} tokens: weights {weights:.1f} of {room:.1f} GiB"


def _sizes(title: str, sizes: dict[str, float]) -> list[str]:
    if not sizes:
        return []
    described = ", ".join(f"{name} {size / GIB:.1f}" for name, size in sizes.items())
    return [f"{title}: {sum(sizes.values()) / GIB:.1f} GiB ({described})"]


def _time_lines(plan: Plan) -> list[str]:
    unit = _unit(plan)
    lines = [f"Time per {unit} ({_how(plan)})"]
    for name, time in plan.times.items():
        share = f"{100 * time.seconds / plan.seconds:.0f} %"
        lines.append(f"  {name.ljust(10)}{time.seconds:10.1f} s {share.rjust(6)}  {time.limit}")
    after = " after the first token" if "decode" in plan.times else ""
    overlap = ", sampling during training" if plan.work.samples_ahead else ""
    lines.append(f"  {'total'.ljust(10)}{plan.seconds:10.1f} s{overlap}, {plan.tokens_per_second:,.0f} tokens/s{after}")
    is_planned = {"judge": plan.work.judge is not None}
    unknown = [name for name in _UNKNOWN_TIMES if plan.work.config.setting(name) and not is_planned.get(name)]
    lines += [f"Not included, because their duration is unknown: {listed(unknown)}"] if unknown else []
    if plan.work.hardware.is_cpu and not plan.num_calibrating and plan.seconds < _SHORT_STEP:
        lines.append(_SHORT_STEPS)
    lines.append(f"Bottleneck: {plan.bottleneck} ({plan.times[plan.bottleneck].limit})")
    steps = plan.work.steps
    if steps is not None:
        lines.append(f"Run: {steps:,} {unit}s, {steps * plan.seconds / 3600:,.1f} hours")
    if plan.price is not None:
        whole = "" if steps is None else f", {steps * plan.price:,.2f} for the run"
        lines.append(f"Price: {plan.price:,.4g} per {unit}{whole}")
    return [*lines, ""]


def _unit(plan: Plan) -> str:
    """Return what times are for."""
    work = plan.work
    if work.serves:
        return f"batch of {work.tokens.requests} texts" if work.engine is None else "response"
    return "step" if work.engine is None else "iteration"


def _how(plan: Plan) -> str:
    """Describe how the times were forecast."""
    count = plan.num_calibrating
    runs = f", calibrated by {count} run{'s' if count > 1 else ''} on this machine" if count else ""
    return f"forecast{plan.work.hardware.assumption}{runs}"


def _change_lines(plan: Plan, changes: list[Change]) -> list[str]:
    if plan.fits:
        head = "Fits. Changes that make it faster:" if changes else "Fits; no faster flags were found"
    else:
        head = "DOES NOT FIT. It fits with:" if changes else "DOES NOT FIT, and no change of flags was found"
    return [head, *(f"  {one.flags}: {_described(plan, one)}" for one in changes)]


def _described(plan: Plan, change: Change) -> str:
    peak = f"{change.plan.peak / GIB:.1f} GiB on the fullest GPU"
    if not plan.fits:
        return f"{peak}, {change.plan.seconds:.1f} s"
    saved = plan.seconds - change.plan.seconds
    return f"{saved:.1f} s less ({100 * saved / plan.seconds:.0f} %), {peak}"
