"""Summary of a finished or running run, read back from its metrics."""

from dataclasses import dataclass
from pathlib import Path

from rlhf_cli.tracking.figures import EVALUATION, Reading, is_measured
from rlhf_cli.tracking.sinks import read_metrics


@dataclass(frozen=True)
class Summary:
    """Totals of a run over all its starts."""

    num_steps: int
    seconds: float  # of all steps and evaluations; time between starts is not in it
    phases: dict[str, float]  # seconds by phase, "other" for the rest
    tokens_per_second: float | None  # over all time spent in phases of training
    first: dict[str, float]  # the first value of each metric, evaluations included
    last: dict[str, float]


def summarise(output: Path) -> Summary:
    """Return the totals of the run in `output`; empty if it has logged nothing."""
    by_step = read_metrics(output)
    first: dict[str, float] = {}
    last: dict[str, float] = {}
    phases: dict[str, float] = {}
    tokens = 0.0
    for step, metrics in by_step.items():
        plain = {name: value for name, value in metrics.items() if not is_measured(name)}
        first = plain | first
        last |= plain
        tokens += metrics.get("num_tokens", 0.0)
        for name, seconds in Reading(step, metrics).phases.items():
            phases[name] = phases.get(name, 0.0) + seconds
    busy = sum(seconds for name, seconds in phases.items() if name not in ("other", EVALUATION))
    return Summary(
        num_steps=sum(step > 0 for step in by_step),  # before the first there may be an evaluation
        seconds=sum(
            metrics.get("time/step", 0.0) + metrics.get(f"time/{EVALUATION}", 0.0) for metrics in by_step.values()
        ),
        phases=phases,
        tokens_per_second=tokens / busy if tokens and busy else None,
        first=first,
        last=last,
    )
