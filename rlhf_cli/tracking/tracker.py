"""The one place a trainer reports to: files, TensorBoard, Weights & Biases and the terminal.

Decides nothing about training. Only rank 0 has a `Tracker`; the others have a `SilentTracker`.
"""

import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import yaml
from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

from rlhf_cli.config.train import TrackingConfig
from rlhf_cli.tracking import memory
from rlhf_cli.tracking.figures import Reading, duration, interval, number, prominent, scaled, title
from rlhf_cli.tracking.sinks import (
    RUN_FILE,
    SETTINGS_FILE,
    SinkContext,
    plain_number,
    read_metrics,
    sinks_of,
)
from rlhf_cli.tracking.summary import Summary, summarise
from rlhf_cli.tracking.terminal.live_view import LiveView
from rlhf_cli.tracking.terminal.progress import Pace, PlainView, View
from rlhf_cli.tracking.thumbnails import Thumbnails

SECONDS_BETWEEN_MEMORY_READINGS = 2.0
LOGS = "logs"  # folder in the run directory
SUMMARY_METRICS = 4
SUMMARY_PHASES = 6


class Tracker:
    """Keeps and shows the reports of a run.

    Everything a step reports must be reported before its checkpoint is saved: a run that is resumed at `resume_step`
    keeps exactly the reports up to it. With None all files begin anew. `saved` is what `state()` returned when the
    checkpoint was made.

    Keys under time/, perf/ and memory/ are measured here and differ from run to run; all others are the trainer's,
    and a resumed run logs the same values as a run never stopped.
    """

    def __init__(
        self,
        config: TrackingConfig,
        output: Path,
        *,
        command: str,
        total_steps: int,
        console: Console,
        resume_step: int | None,
        unit: str = "step",
        saved: Mapping[str, object] | None = None,
    ) -> None:
        self._output = output
        self._console = console
        self._facts = {"command": command, "unit": unit, "total_steps": total_steps}
        self._unit = unit
        self._resume_step = resume_step
        self._thumbnails = Thumbnails(output)
        settings_file = output / SETTINGS_FILE
        settings = yaml.safe_load(settings_file.read_text(encoding="utf-8")) if settings_file.exists() else {}
        context = SinkContext(output, config, settings, resume_step, saved or {})
        self._sinks = [row.open(context) for row in sinks_of(config)]
        self._pace = Pace(total_steps, start_step=resume_step or 0)
        self._view: View = PlainView(console, self._pace, unit=unit, every=config.logging_steps)
        self._starting = True
        self._last_log = time.perf_counter()
        self._memory: dict[str, float] = {}
        self._memory_read = -math.inf
        self._flagged: set[str] = set()

    def _each(self, method: str) -> list[Callable[..., Any]]:
        """Return this method of every sink that has it."""
        return [getattr(sink, method) for sink in self._sinks if hasattr(sink, method)]

    def start(self, facts: Mapping[str, str], *, is_kept: bool = True) -> None:
        """Announce the run: `facts` are shown in their order, run directory and logs after them if it is kept.

        Without `is_kept` the run directory is gone afterwards, and its path would help nobody.
        """
        self._facts["facts"] = dict(facts)
        self._write_facts("running")
        logs = self._output / LOGS
        rows = dict(facts)
        if is_kept:
            rows |= {"Output": str(self._output)} | ({"Logs": str(logs)} if logs.is_dir() else {})
        if self._resume_step is not None:
            rows["Resumed"] = f"after {self._unit} {self._resume_step}"
        self._console.print(f"rlhf {self._facts['command']}", style="bold", markup=False)
        self._print_rows(rows)
        if self._console.is_terminal:
            history = read_metrics(self._output)
            self._view = LiveView(self._console, self._pace, unit=self._unit, history=history)
        self._last_log = time.perf_counter()

    def phase(self, name: str | None) -> None:
        """Show which phase is running, None between phases: `PhaseTimer(on_change=tracker.phase)`."""
        if self._starting:  # models loaded and workers started until now are no part of the first step
            self._starting = False
            self._last_log = time.perf_counter()
        self._view.phase(name)

    def log(self, step: int, metrics: Mapping[str, float], phases: Mapping[str, float]) -> None:
        """Record one step: the trainer's metrics, and the seconds of each of its phases."""
        now = time.perf_counter()
        measured = {f"time/{name}": seconds for name, seconds in phases.items()}
        measured["time/step"], self._last_log = now - self._last_log, now
        busy = sum(phases.values()) or measured["time/step"]
        if "num_tokens" in metrics:
            measured["perf/tokens_per_second"] = metrics["num_tokens"] / busy
        plain = {name: plain_number(value) for name, value in metrics.items()}
        full = plain | measured | self._read_memory(now) | {k: v for k, v in plain.items() if k.startswith("memory/")}
        for log in self._each("log"):
            log(step, full)
        self._flag(step, full)
        self._pace.reach(step)
        self._view.step(Reading(step, full))

    def evaluation(self, step: int, metrics: Mapping[str, float], phases: Mapping[str, float] | None = None) -> None:
        """Record an evaluation after a step; names get the prefix eval/ unless they have it.

        `phases` are the seconds it took, which are no part of the step's own.
        """
        named = {f"eval/{name.removeprefix('eval/')}": plain_number(value) for name, value in metrics.items()}
        measured = {f"time/{name}": seconds for name, seconds in (phases or {}).items()}
        for log in self._each("log"):
            log(step, named | measured)
        self._flag(step, named)
        names = [name for name in prominent(named) if not name.startswith("eval/num_")][:SUMMARY_METRICS]
        shown = "  ".join(f"{title(name[5:])} {number(named[name])}{interval(name, named)}" for name in names)
        self._view.message(f"Evaluation after {self._unit} {step}:  {shown}")
        self._last_log = time.perf_counter()

    def samples(self, step: int, rows: Sequence[Mapping[str, object]]) -> None:
        """Record the samples of a step: prompt, response, reward, label and whatever else the rows hold.

        `images` of a row are its pictures: small copies of those of the first rows are kept.
        """
        kept = self._thumbnails.rows(rows)
        for write in self._each("samples"):
            write(step, kept)

    def evaluation_samples(self, step: int, rows: Sequence[Mapping[str, object]]) -> None:
        """Record responses of an evaluation after a step, as `samples` does, in a file of their own."""
        kept = self._thumbnails.rows(rows)
        for write in self._each("evaluation_samples"):
            write(step, kept)

    def message(self, text: str) -> None:
        """Show a line that stays on the terminal."""
        self._view.message(text)

    def state(self) -> dict[str, object]:
        """Return the state of all sinks for a checkpoint."""
        return {name: value for state in self._each("state") for name, value in state().items()}

    def close(
        self, *, outcome: str = "finished", facts: Mapping[str, str] | None = None, has_course: bool = True
    ) -> None:
        """Close all files and sum up: how it ended, `facts` such as the model's folder, and the places of metrics.

        Without a course, when the steps are parts of one measurement, metrics are not compared from first to last.
        """
        self._view.close()
        for close in self._each("close"):
            close()
        self._write_facts(outcome)
        done = f"{self._pace.step}/{self._pace.total_steps} {self._unit}s in {duration(self._pace.elapsed)}"
        self._console.print()
        self._console.print(f"{outcome.capitalize()}: {done}", style="bold", markup=False)
        course = summary_rows(summarise(self._output)) if has_course else {}
        self._print_rows(course | dict(facts or {}))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if error is not None:
            self.close(outcome="interrupted" if isinstance(error, KeyboardInterrupt) else "failed")

    def _read_memory(self, now: float) -> dict[str, float]:
        """Return the memory as last read: reading it for many processes takes longer than a small step may."""
        if now - self._memory_read >= SECONDS_BETWEEN_MEMORY_READINGS:
            self._memory_read = now
            gpu = memory.gpu_gib()
            self._memory = {"memory/host_gib": memory.host_gib()} | ({} if gpu is None else {"memory/gpu_gib": gpu})
        return self._memory

    def _flag(self, step: int, metrics: Mapping[str, float]) -> None:
        """Warn once for each metric that it is no finite number."""
        broken = [name for name, value in metrics.items() if not math.isfinite(value)]
        for name in broken:
            if name not in self._flagged:
                self._flagged.add(name)
                self._view.message(f"Warning: {name} is {metrics[name]} in {self._unit} {step}", style="red")

    def _print_rows(self, rows: Mapping[str, str]) -> None:
        """Return the names and texts in two columns; long texts are wrapped within theirs on a terminal, kept whole
        elsewhere.
        """
        width = max((len(name) for name in rows), default=0)
        for name, text in rows.items():
            if self._console.is_terminal:
                row = Table.grid(Column(width=width + 4), Column(overflow="fold"))
                row.add_row(Text(f"  {name}", style="bright_black"), Text(text))
                self._console.print(row)
            else:
                self._console.print(Text(f"  {name:<{width}}  {text}"), soft_wrap=True)

    def _write_facts(self, outcome: str) -> None:
        text = json.dumps(self._facts | {"outcome": outcome}, indent=2)
        (self._output / RUN_FILE).write_text(text + "\n", encoding="utf-8")


def summary_rows(summary: Summary) -> dict[str, str]:
    """Return first and last values of the main metrics, the time by phase, and the mean speed."""
    rows = {
        title(name): f"{number(summary.first[name])} → {number(summary.last[name])}"
        for name in prominent(summary.last)[:SUMMARY_METRICS]
        if name != "lr"
    }
    total = sum(summary.phases.values())
    if total > 0:
        ranked = sorted(summary.phases.items(), key=lambda phase: -phase[1])[:SUMMARY_PHASES]
        rows["time"] = ", ".join(
            f"{name} {duration(seconds)} ({seconds / total:.0%})" for name, seconds in ranked[:SUMMARY_PHASES]
        )
    if summary.tokens_per_second is not None:
        rows["speed"] = f"{scaled(summary.tokens_per_second)} tokens/s"
    return rows


class SilentTracker:
    """The tracker of ranks other than 0: takes everything and keeps nothing."""

    def start(self, facts: Mapping[str, str]) -> None:
        """Do nothing."""

    def phase(self, name: str | None) -> None:
        """Do nothing."""

    def log(self, step: int, metrics: Mapping[str, float], phases: Mapping[str, float]) -> None:
        """Do nothing."""

    def evaluation(self, step: int, metrics: Mapping[str, float], phases: Mapping[str, float] | None = None) -> None:
        """Do nothing."""

    def evaluation_samples(self, step: int, rows: Sequence[Mapping[str, object]]) -> None:
        """Do nothing."""

    def samples(self, step: int, rows: Sequence[Mapping[str, object]]) -> None:
        """Do nothing."""

    def message(self, text: str) -> None:
        """Do nothing."""

    def state(self) -> dict[str, object]:
        """Do nothing: rank 0 saves it."""
        return {}

    def close(self, *, outcome: str = "finished", facts: Mapping[str, str] | None = None) -> None:
        """Do nothing."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        """Do nothing."""
