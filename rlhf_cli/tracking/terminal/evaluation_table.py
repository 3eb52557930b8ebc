"""Evaluation results as a terminal table and as JSON, one row per model and dataset."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from rlhf_cli.rewards.evaluation import Evaluation, Figure
from rlhf_cli.tracking.figures import number

_SHARES = ("accuracy", "pass@", "maj@", "prm_", "truncated", "invalid")
# Line width without a terminal, so that log files keep each row on one line.
_WIDTH_OF_A_FILE = 250
_LAST = {"reward": "reward", "response_length": "tokens", "truncated": "truncated", "invalid": "no answer"}
"""Column headings for metrics that follow the correctness metrics."""


@dataclass(frozen=True)
class EvaluatedModel:
    """Results for a model on a dataset. `num_samples` is the number of responses per prompt."""

    pretrain: str
    source: str
    num_samples: int
    evaluation: Evaluation

    def as_json(self) -> dict[str, Any]:
        """Return all metrics; `low` and `high` bound the 95% interval."""
        figures = {}
        for name, figure in self.evaluation.figures.items():
            low, high = figure.interval or (None, None)
            figures[name] = {"value": figure.value, "low": low, "high": high, "num_prompts": figure.num_prompts}
        named = {"pretrain": self.pretrain, "source": self.source, "num_samples": self.num_samples}
        return {**named, "figures": figures, **self.evaluation.counts}


def evaluation_table(results: Sequence[EvaluatedModel]) -> Table:
    """Build one row per result, with 95% intervals below the quality metrics.

    Redundant metrics appear only in the JSON: pass@1 and maj@1, which equal the mean, and a reward that is 1 for
    correct responses and 0 otherwise.
    """
    shown = [_columns(result) for result in results]
    names = list(dict.fromkeys(name for figures in shown for name in figures))
    names = [name for name in names if name not in _LAST] + [name for name in _LAST if name in names]
    table = Table(
        box=None, pad_edge=False, padding=(0, 2, 1, 0), caption="95% intervals over prompts are below the values"
    )
    table.caption_justify = "left"
    samples = max((result.num_samples for result in results), default=1)
    table.add_column("model", overflow="fold", min_width=8)
    table.add_column("data", overflow="fold", min_width=8)
    table.add_column("prompts", justify="right")
    for name in names:
        table.add_column(_heading(name, samples), justify="right", no_wrap=True)
    some_failed = any(result.evaluation.counts["num_failed"] for result in results)
    if some_failed:
        table.add_column("failed", justify="right", no_wrap=True)
    for result, figures in zip(results, shown, strict=True):
        counts = result.evaluation.counts
        cells = [_cell(name, figures, counts) for name in names]
        failed = [f"{counts['num_failed']:.0f} of {counts['num_responses']:.0f}"] if some_failed else []
        source = Text(Path(result.source).name)
        table.add_row(Text(result.pretrain), source, f"{counts['num_prompts']:.0f}", *cells, *failed)
    return table


def print_table(console: Console, table: Table) -> None:
    """Print the table. Without a terminal, lines may be long."""
    if not console.is_terminal:
        console = Console(file=console.file, width=_WIDTH_OF_A_FILE, color_system=None)
    console.print(table)


def is_share(metric: str) -> bool:
    """Return whether a metric is a fraction, which is shown in percent."""
    return metric.startswith(_SHARES)


def _columns(result: EvaluatedModel) -> dict[str, Figure]:
    """Select the metrics to show, without redundant ones."""
    figures = result.evaluation.figures
    redundant = {"pass@1", "maj@1"}
    if "accuracy" in figures and figures["reward"].value == figures["accuracy"].value:
        redundant.add("reward")
    return {name: figure for name, figure in figures.items() if name not in redundant}


def _heading(name: str, num_samples: int) -> str:
    if name == "accuracy":
        return f"avg@{num_samples}" if num_samples > 1 else name
    return _LAST.get(name, name)


def _cell(name: str, figures: Mapping[str, Figure], counts: Mapping[str, float]) -> Text:
    """Format a value, fractions in percent, with the interval below for quality metrics."""

    def written(value: float) -> str:
        return f"{100 * value:.1f}" if is_share(name) else number(value)

    if name not in figures:
        return Text("")
    figure = figures[name]
    value, below = written(figure.value) + ("%" if is_share(name) else ""), ""
    if name == "response_length":
        below = f"max {counts['response_length_max']:.0f}"
    elif figure.interval is not None and (name == "reward" or name not in _LAST):
        below = " to ".join(map(written, figure.interval))
    return Text.assemble((value, "" if name in _LAST else "bold"), "\n" if below else "", (below, "bright_black"))
