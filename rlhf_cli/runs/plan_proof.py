"""The plan of a run compared with the memory and times that it measured: at the end of the run, and with `--proof`."""

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from statistics import fmean, median
from typing import TYPE_CHECKING

from rlhf_cli.commands.plan import PLANNED, PlanCommandConfig, plan_settings, planned_class
from rlhf_cli.config.plan import PlanConfig
from rlhf_cli.errors import UsageError, listed, one_line
from rlhf_cli.options import build_config
from rlhf_cli.planning.calibration import append_run, calibration_file, key_of, seconds_of
from rlhf_cli.planning.hardware import hardware_of
from rlhf_cli.planning.memory import GIB, Parts, total
from rlhf_cli.planning.planner import Plan
from rlhf_cli.runs.plan import planner_of
from rlhf_cli.runs.run_directory import recorded_command
from rlhf_cli.settings_file import read_yaml
from rlhf_cli.tracking.sinks import PLAN_FILE, read_metrics

if TYPE_CHECKING:
    from rlhf_cli.backends.cluster.ray_cluster import Cluster
    from rlhf_cli.data.prompts import Prompt

Metrics = Mapping[int, Mapping[str, float]]
"""Metrics by step."""
_GPU, _HOST = "memory/gpu_gib_max", "memory/host_gib"
_LEAST_STEPS = 3
"""Steps of a run that calibrates plans."""
_MOST_PROMPTS = 1000
"""Prompts whose mean length is used."""


def run_plan(config: PlanCommandConfig) -> None:
    """Compare a run with its plan. Raises UsageError without a run, because a plan needs a command."""
    if config.proof.proof is None:
        raise UsageError(f"set the command to plan, with its flags: rlhf plan {listed(PLANNED, 'or')}")
    directory = Path(config.proof.proof).expanduser()
    if config.plan.as_json:
        print(json.dumps(_with_settings(directory, config.plan).as_dict(), indent=1))
    else:
        print("\n".join(lines_of_proof(directory, config.plan)))


def lines_of_proof(directory: Path, settings: PlanConfig) -> list[str]:
    """Return a table of planned and measured values of a run.

    Args:
        directory: run directory.
        settings: hardware of the run, by default this machine.

    Raises:
        UsageError: the folder is not a run of a command with a plan, or no step was completed.
    """
    proof = _with_settings(directory, settings)
    rows = [_row(name, *pair) for name, pair in proof.values.items()]
    return [proof.head, "", f"{'':24}{'plan':>12}{'measured':>12}{'difference':>12}", *rows]


def _with_settings(directory: Path, settings: PlanConfig) -> "_Proof":
    """Return the proof of a run with the settings that it recorded, unless others are given."""
    given = settings.model_dump(exclude_unset=True, by_alias=True)
    return _proof(directory, {**_recorded(directory), **given}, source=f"--proof {directory}")


@dataclass(frozen=True)
class _Proof:
    """A run's plan, planned and measured values by name, and the number of steps."""

    command: str
    directory: Path
    plan: Plan
    values: dict[str, tuple[float, float]]
    num_steps: int

    @property
    def assumed(self) -> str:
        """Describe the hardware and lengths of the plan."""
        work = self.plan.work
        return f"planned for {work.hardware.title} and {work.tokens.length:,.0f} tokens per sequence"

    @property
    def head(self) -> str:
        return f"rlhf {self.command} in {self.directory}, {self.num_steps} steps, {self.assumed}"

    def as_dict(self) -> dict[str, object]:
        """Return the comparison and the plan as JSON values."""
        return {"assumed": self.assumed, "values": self.values, "plan": self.plan.as_dict()}


def _proof(directory: Path, settings: Mapping[str, object], *, source: str) -> _Proof:
    """Plan a run from its config.yaml with these settings of a plan, without calibration."""
    command = _command(directory, source)
    metrics = {step: values for step, values in read_metrics(directory).items() if "time/step" in values}
    if not metrics:
        raise UsageError(f"{source}: the run has completed no step")
    file = read_yaml(directory / "config.yaml", named=source)
    config = build_config(planned_class(command), {**file, **_lengths(metrics), **settings, "calibration": False})
    own = plan_settings(config)
    plan = planner_of(config, own)(config, hardware_of(own))
    return _Proof(command, directory, plan, compared(plan, metrics), len(metrics))


def _recorded(directory: Path) -> dict[str, object]:
    """Return the settings of the plan that a run recorded at its end; none if it was stopped before."""
    file = directory / PLAN_FILE
    return dict(json.loads(file.read_text(encoding="utf-8"))["settings"]) if file.is_file() else {}


def record_plan(directory: Path, settings: Mapping[str, object]) -> None:
    """Compare a run that ends with its plan: in plan.json for its report, and in the calibration file.

    A plan that fails, or a folder that cannot be written, is only logged.

    Args:
        directory: run directory.
        settings: hardware and mean lengths of the run, as settings of a plan.
    """
    try:
        _record(directory, settings)
    except Exception as error:  # a run must not fail because of a forecast
        print(f"the plan of this run was not recorded: {one_line(error)}", file=sys.stderr, flush=True)


def _record(directory: Path, settings: Mapping[str, object]) -> None:
    proof = _proof(directory, settings, source=str(directory))
    hardware = proof.plan.work.hardware
    # The size of micro-batches depends on the memory, which may differ where the plan is read.
    machine = {"gpu": "cpu", "host_memory_gib": hardware.memory / GIB} if hardware.is_cpu else {}
    found = {"settings": {**settings, **machine}, **proof.as_dict()}
    (directory / PLAN_FILE).write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    # The first step compiles and allocates, so that a median needs others.
    if proof.num_steps >= _LEAST_STEPS:
        now = datetime.now(UTC).isoformat(timespec="seconds")
        append_run({"time": now, **key_of(proof.plan), "values": proof.values}, calibration_file())


def sampled_settings(prompts: "Sequence[Prompt]", cluster: "Cluster") -> dict[str, object]:
    """Return the mean length of a run's prompts and its GPUs, as settings of a plan."""
    first = prompts[:_MOST_PROMPTS]
    mean = fmean(len(prompt.prompt_ids) for prompt in first)
    return {"prompt_tokens": max(1, round(mean)), **(gpu_settings(cluster.node_gpus) if cluster.has_gpus else {})}


def gpu_settings(node_gpus: Sequence[int]) -> dict[str, object]:
    """Return the GPUs of a run as settings of a plan."""
    return {"num_gpus": max(node_gpus), "num_nodes": len(node_gpus)}


def _command(directory: Path, source: str) -> str:
    command = recorded_command(directory, source=source)
    if command not in PLANNED:
        raise UsageError(f"{source}: rlhf {command} has no plan")
    return command


def compared(plan: Plan, metrics: Metrics) -> dict[str, tuple[float, float]]:
    """Return (planned, measured) by name: GiB of the fullest GPU and of the host, and seconds of each phase.

    Phases are medians over the steps, because the first step compiles and allocates.
    """
    found = {"host memory, GiB": (sum(plan.host.values()) / GIB, _most(metrics, _HOST))}
    if not plan.work.hardware.is_cpu:
        found["training, GiB of a GPU"] = (_training_peak(plan) / GIB, _most(metrics, _GPU))
        found["tensors in training, GiB"] = (_training_peak(plan) / GIB, _most(metrics, "memory/train_gib_max"))
        found["tensors in forward, GiB"] = (_forward_peak(plan) / GIB, _most(metrics, "memory/forward_gib_max"))
    for phase, time in plan.times.items():
        found[seconds_of(phase)] = (time.seconds, _median(metrics, f"time/{phase}"))
    found["step, s"] = (plan.seconds, _median(metrics, "time/step"))
    return {name: pair for name, pair in found.items() if min(pair) > 0}


def _training_peak(plan: Plan) -> float:
    """Return the bytes in PyTorch's allocator of the fullest rank in training."""
    size, recomputes = plan.batching.max_tokens, plan.batching.recomputes
    roles = {name: plan.work.roles[name] for name in plan.work.trained}
    parts = {name: role.training(size, recomputes=recomputes) for name, role in roles.items()}
    return max((_allocated(plan, name, active) for name, active in parts.items()), default=0.0)


def _forward_peak(plan: Plan) -> float:
    """Return the bytes in PyTorch's allocator of the fullest rank with a trained model in forward passes."""
    work, size = plan.work, plan.batching.max_tokens
    names = [name for name in work.tokens.forward if work.host(name) in work.trained]
    return max((_allocated(plan, name, work.roles[name].forward(size)) for name in names), default=0.0)


def _allocated(plan: Plan, name: str, active: Parts) -> float:
    """Return the bytes of a model's rank with the models that it hosts, without the process."""
    work = plan.work
    others = [role for other, role in work.roles.items() if other != name and work.host(other) == work.host(name)]
    return sum(total(parts) - parts["processes"] for parts in (active, *(role.resident() for role in others)))


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
