"""`rlhf plan --proof RUN`: the plan of a run beside the memory and times that the run measured."""

import json
from collections.abc import Mapping
from pathlib import Path
from statistics import fmean, median

from rlhf_cli.commands.plan import PLANNED, PlanCommandConfig, plan_settings, planned_class
from rlhf_cli.config.plan import PlanConfig
from rlhf_cli.errors import UsageError, listed
from rlhf_cli.options import build_config
from rlhf_cli.planning.hardware import hardware_of
from rlhf_cli.planning.memory import GIB
from rlhf_cli.planning.planner import Plan
from rlhf_cli.runs.plan import planner_of
from rlhf_cli.settings_file import read_yaml
from rlhf_cli.tracking.sinks import RUN_FILE, read_metrics

Metrics = Mapping[int, Mapping[str, float]]
"""Metrics by step."""
_GPU, _HOST = "memory/gpu_gib_max", "memory/host_gib"


def run_plan(config: PlanCommandConfig) -> None:
    """Compare a run with its plan. Raises UsageError without a run, because a plan needs a command."""
    if config.proof.proof is None:
        raise UsageError(f"set the command to plan, with its flags: rlhf plan {listed(PLANNED, 'or')}")
    print("\n".join(lines_of_proof(Path(config.proof.proof).expanduser(), config.plan)))


def lines_of_proof(directory: Path, settings: PlanConfig) -> list[str]:
    """Return a table of planned and measured values of a run.

    Args:
        directory: run directory.
        settings: hardware of the run, by default this machine.

    Raises:
        UsageError: the folder is not a run of a command with a plan, or no step was completed.
    """
    command = _command(directory)
    metrics = {step: values for step, values in read_metrics(directory).items() if "time/step" in values}
    if not metrics:
        raise UsageError(f"--proof {directory}: the run has completed no step")
    given = settings.model_dump(exclude_unset=True, by_alias=True)
    values = {**read_yaml(directory / "config.yaml", named=f"--proof {directory}"), **_lengths(metrics), **given}
    config = build_config(planned_class(command), values)
    own = plan_settings(config)
    plan = planner_of(config, own)(config, hardware_of(own))
    rows = [(name, *pair) for name, pair in compared(plan, metrics).items()]
    head = (
        f"rlhf {command} in {directory}, {len(metrics)} steps, planned for {plan.work.hardware.title} "
        f"and {plan.work.tokens.length:,.0f} tokens per sequence"
    )
    return [head, "", f"{'':24}{'plan':>12}{'measured':>12}{'difference':>12}", *(_row(*row) for row in rows)]


def _command(directory: Path) -> str:
    try:
        command = str(json.loads((directory / RUN_FILE).read_text(encoding="utf-8"))["command"])
    except (OSError, ValueError, KeyError):
        raise UsageError(f"--proof {directory}: not a run directory, it has no readable {RUN_FILE}") from None
    if command not in PLANNED:
        raise UsageError(f"--proof {directory}: rlhf {command} has no plan")
    return command


def compared(plan: Plan, metrics: Metrics) -> dict[str, tuple[float, float]]:
    """Return (planned, measured) by name: GiB of the fullest GPU and of the host, and seconds of each phase.

    Phases are medians over the steps, because the first step compiles and allocates.
    """
    found = {"host memory, GiB": (sum(plan.host.values()) / GIB, _most(metrics, _HOST))}
    if not plan.work.hardware.is_cpu:
        found["training, GiB of a GPU"] = (_trainer_peak(plan) / GIB, _most(metrics, _GPU))
    for phase, time in plan.times.items():
        found[f"{phase}, s"] = (time.seconds, _median(metrics, f"time/{phase}"))
    found["step, s"] = (plan.seconds, _median(metrics, "time/step"))
    return {name: pair for name, pair in found.items() if pair[1] > 0}


def _trainer_peak(plan: Plan) -> float:
    """Return the bytes that PyTorch's allocator of the largest trained role holds, without other processes."""
    batching = plan.batching
    peaks = [
        plan.work.roles[name].training(batching.max_tokens, recomputes=batching.recomputes)
        for name in plan.work.trained
    ]
    return max((sum(parts.values()) - parts["processes"] for parts in peaks), default=0.0)


def _most(metrics: Metrics, name: str) -> float:
    return max((values[name] for values in metrics.values() if name in values), default=0.0)


def _median(metrics: Metrics, name: str) -> float:
    found = [values[name] for values in metrics.values() if name in values]
    return median(found) if found else 0.0


def _lengths(metrics: Metrics) -> dict[str, object]:
    """Return the mean length of a run's responses, as a setting of a plan."""
    responses = [values["response_length"] for values in metrics.values() if "response_length" in values]
    return {"response_tokens": max(1, round(fmean(responses)))} if responses else {}


def _row(name: str, planned: float, measured: float) -> str:
    return f"{name:24}{planned:12.2f}{measured:12.2f}{100 * (planned / measured - 1):+11.0f} %"
