"""Totals of a run, read back from the metrics file."""

from dataclasses import dataclass
from pathlib import Path

from rlhf_cli.tracking.figures import EVALUATION, Reading, is_measured
from rlhf_cli.tracking.sinks import read_metrics


@dataclass(frozen=True)
class Summary:
    """Totals over all starts of a run."""

    num_steps: int
    # In steps and evaluations, without the time between starts.
    seconds: float
    # Seconds by phase, "other" for the rest.
    phases: dict[str, float]
    # Over the time spent in training phases.
    tokens_per_second: float | None
    # First and last value of each metric, including evaluations.
    first: dict[str, float]
    last: dict[str, float]


def summarise(output: Path) -> Summary:
    """Compute the totals of the run in `output`; empty if it has no metrics."""
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
        # Step 0 holds an evaluation before training.
        num_steps=sum(step > 0 for step in by_step),
        seconds=sum(
            metrics.get("time/step", 0.0) + metrics.get(f"time/{EVALUATION}", 0.0) for metrics in by_step.values()
        ),
        phases=phases,
        tokens_per_second=tokens / busy if tokens and busy else None,
        first=first,
        last=last,
    )
