"""Implementation of `rlhf runs`: prints the runs in a folder."""

import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from rlhf_cli.commands.runs import RunsConfig
from rlhf_cli.runs.recorded_runs import RecordedRun, find_runs
from rlhf_cli.tracking.figures import number, title
from rlhf_cli.tracking.terminal.evaluation_table import print_table

_STYLES = {"running": "green", "failed": "red", "killed": "red", "stopped": "yellow", "unknown": "yellow"}
_UNITS = (("d", 86_400), ("h", 3600), ("min", 60), ("s", 1))


def list_runs(config: RunsConfig) -> None:
    """Print the runs as a table, or as JSON."""
    runs, skipped = find_runs(Path(config.runs.folder).expanduser())
    if config.runs.as_json:
        print(json.dumps({"runs": [run.as_json() for run in runs], "skipped": skipped}, indent=1))
        return
    console = Console(highlight=False)
    if runs:
        print_table(console, _table(runs, now=time.time()))
    for run in runs:
        for message in run.alarms:
            console.print(f"{run.folder}: alarm {message}", markup=False, soft_wrap=True)
        if run.resume:
            console.print(f"{run.folder}: {run.resume}", markup=False, soft_wrap=True)
    if not runs:
        console.print(f"no runs in {config.runs.folder}", markup=False, soft_wrap=True)
    for sentence in skipped:
        print(f"skipped: {sentence}", file=sys.stderr)


def _table(runs: Sequence[RecordedRun], *, now: float) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for heading in ("run", "command", "model"):
        table.add_column(heading, overflow="fold")
    for heading in ("state", "progress", "age"):
        table.add_column(heading, no_wrap=True)
    table.add_column("last metrics", overflow="fold")
    for run in runs:
        metrics = ", ".join(f"{title(name)} {number(value)}" for name, value in run.metrics.items())
        table.add_row(
            Text(str(run.folder)),
            run.command,
            Text(", ".join(_short(model) for model in run.model.split(","))),
            Text(run.state, style=_STYLES.get(run.state, "")),
            f"{run.unit} {run.step}/{run.total_steps}",
            age(now - run.changed),
            Text(metrics),
        )
    return table


def _short(model: str) -> str:
    """Shorten a model's path or name to two parts."""
    return "/".join(Path(model).parts[-2:])


def age(seconds: float) -> str:
    """Format seconds in the largest unit: 3 d, 5 h, 12 min, 8 s."""
    unit, size = next(((unit, size) for unit, size in _UNITS if seconds >= size), _UNITS[-1])
    return f"{max(0, seconds) // size:.0f} {unit}"
