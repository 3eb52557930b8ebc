"""`rlhf plan`: makes the plan of a command and prints it."""

import json
import sys
from typing import Any

from rlhf_cli.algorithms.estimators.table import ESTIMATORS
from rlhf_cli.commands.online import OnlineConfig
from rlhf_cli.commands.plan import PLANNED, PlanCommandConfig
from rlhf_cli.config.base import CommandConfig
from rlhf_cli.config.plan import PlanConfig
from rlhf_cli.errors import UsageError, listed
from rlhf_cli.planning.changes import Change, best_changes
from rlhf_cli.planning.hardware import hardware_of
from rlhf_cli.planning.memory import GIB, total
from rlhf_cli.planning.planner import Plan, make_plan, placement, shapes_of

DOES_NOT_FIT = 3
"""Exit status if a command does not fit the hardware."""
_PARTS = ("weights", "gradients", "optimizer", "activations", "logits", "buffers", "cache", "processes")


def run_plan(config: PlanCommandConfig) -> None:
    """Raise UsageError: `rlhf plan` needs a command."""
    del config
    raise UsageError(f"set the command to plan, with its flags: rlhf plan {listed(PLANNED, 'or')}")


def plan_command(config: CommandConfig) -> None:
    """Print the plan of a command, and changes that help. Exits with 3 if the command does not fit."""
    settings: PlanConfig = getattr(config, "plan")
    plan, changes = plan_with_changes(config, settings)
    if settings.as_json:
        found = [{"flags": one.flags, "fits": one.plan.fits, **_effect(plan, one)} for one in changes]
        print(json.dumps({"command": _name(config), **plan.as_dict(), "changes": found}, indent=1))
    else:
        print("\n".join(lines_of(config, plan, changes)))
    if not plan.fits:
        sys.exit(DOES_NOT_FIT)


def plan_with_changes(config: CommandConfig, settings: PlanConfig) -> tuple[Plan, list[Change]]:
    """Return the plan of a command, and the best changes of its flags."""
    hardware, shapes = hardware_of(settings), shapes_of(config)
    has_critic = isinstance(config, OnlineConfig) and ESTIMATORS[config.estimator].critic

    def planned(changed: CommandConfig) -> Plan:
        return make_plan(changed, settings, hardware, has_critic=has_critic, shapes=shapes)

    plan = planned(config)
    return plan, best_changes(config, plan, planned)


def _effect(plan: Plan, change: Change) -> dict[str, float]:
    return {
        "saved_gib": round((plan.peak - change.plan.peak) / GIB, 2),
        "saved_seconds": round(plan.seconds - change.plan.seconds, 3),
    }


def _name(config: CommandConfig) -> str:
    return config.command or type(config).__mro__[1].__name__.removesuffix("Config").lower()


def lines_of(config: CommandConfig, plan: Plan, changes: list[Change]) -> list[str]:
    """Return the plan as text."""
    work, model = plan.work, getattr(config, "model").pretrain
    shape = next(iter(work.roles.values())).shape if work.roles else work.engine.shape  # type: ignore[union-attr]
    return [
        f"rlhf {_name(config)} with {model} ({shape.parameters / 1e9:.2f}B parameters) on {work.hardware.title}",
        "",
        "Placement",
        *(f"  {line}" for line in placement(work)),
        "",
        *_memory_lines(plan),
        *_time_lines(plan),
        *_change_lines(plan, changes),
    ]


def _memory_lines(plan: Plan) -> list[str]:
    work = plan.work
    unit = "the machine" if work.hardware.is_cpu else "a GPU"
    lines = [f"Peak memory of {unit} in GiB, of {work.hardware.memory / GIB:.1f} (forecast)"]
    for gpu in plan.gpus:
        parts = [part for part in _PARTS if any(phase.get(part) for phase in gpu.phases.values())]
        lines.append(f"  {gpu.count} x {' + '.join(gpu.roles)}")
        lines.append("    " + "phase".ljust(10) + "total".rjust(8) + "".join(part.rjust(12) for part in parts))
        for phase, sizes in gpu.phases.items():
            cells = [f"{sizes.get(part, 0) / GIB:.1f}".rjust(12) for part in parts]
            lines.append("    " + phase.ljust(10) + f"{total(sizes) / GIB:.1f}".rjust(8) + "".join(cells))
    if work.engine is not None:
        running = work.engine.running(work.tokens.prompt + work.tokens.response)
        lines.append(
            f"  engine: KV cache for {work.engine.cache_tokens:,} tokens, {running:,} sequences of "
            f"{work.tokens.prompt + work.tokens.response:,.0f} tokens at once"
        )
    if plan.batching.reason:
        lines.append(f"  {plan.batching.reason}")
    lines += _sizes("Host memory per node", plan.host) + _sizes("Disk", plan.disk)
    return [*lines, ""]


def _sizes(title: str, sizes: dict[str, float]) -> list[str]:
    if not sizes:
        return []
    described = ", ".join(f"{name} {size / GIB:.1f}" for name, size in sizes.items())
    return [f"{title}: {sum(sizes.values()) / GIB:.1f} GiB ({described})"]


def _time_lines(plan: Plan) -> list[str]:
    unit = "iteration" if plan.work.engine is not None else "step"
    lines = [f"Time per {unit} (forecast)"]
    for name, time in plan.times.items():
        share = f"{100 * time.seconds / plan.seconds:.0f} %"
        lines.append(f"  {name.ljust(10)}{time.seconds:10.1f} s {share.rjust(6)}  {time.limit}")
    lines.append(f"  {'total'.ljust(10)}{plan.seconds:10.1f} s, {plan.tokens_per_second:,.0f} tokens/s")
    lines.append(f"Bottleneck: {plan.bottleneck} ({plan.times[plan.bottleneck].limit})")
    steps = plan.work.steps
    if steps is not None:
        lines.append(f"Run: {steps:,} {unit}s, {steps * plan.seconds / 3600:,.1f} hours")
    if plan.price is not None:
        whole = "" if steps is None else f", {steps * plan.price:,.2f} for the run"
        lines.append(f"Price: {plan.price:,.4g} per {unit}{whole}")
    return [*lines, ""]


def _change_lines(plan: Plan, changes: list[Change]) -> list[str]:
    if not plan.fits:
        head = "DOES NOT FIT" + (". Changes that make it fit:" if changes else ", and no change of flags was found")
    else:
        head = "Fits" + (". Changes that make it faster:" if changes else "; no faster flags were found")
    return [head, *(f"  {one.flags}: {_described(plan, one)}" for one in changes)]


def _described(plan: Plan, change: Change) -> str:
    effect: dict[str, Any] = _effect(plan, change)
    memory = f"{abs(effect['saved_gib']):.1f} GiB {'less' if effect['saved_gib'] >= 0 else 'more'}"
    seconds = effect["saved_seconds"]
    return f"{memory} on the fullest GPU, {abs(seconds):.1f} s {'faster' if seconds >= 0 else 'slower'}"
