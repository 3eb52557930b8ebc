"""The single place where trainers report: files, the trackers of `SINKS` and the terminal.

It never influences training. Only rank 0 has a `Tracker`; other ranks have a `SilentTracker`.
"""

import json
import math
import os
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import yaml
from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

from rlhf_cli.config.train import TrackingConfig
from rlhf_cli.tracking.alarms import WINDOW, alarms_of
from rlhf_cli.tracking.figures import (
    PACK_TOKENS,
    Reading,
    duration,
    interval,
    number,
    prominent,
    scaled,
    shown_names,
    title,
)
from rlhf_cli.tracking.host_memory import HostMemory, root_of_run
from rlhf_cli.tracking.sample_table import sample_table
from rlhf_cli.tracking.services import SinkContext
from rlhf_cli.tracking.sinks import (
    ALARMS_FILE,
    RUN_FILE,
    SETTINGS_FILE,
    plain_number,
    read_lines,
    read_metrics,
    sinks_of,
)
from rlhf_cli.tracking.summary import Summary, summarise
from rlhf_cli.tracking.terminal.live_view import LiveView
from rlhf_cli.tracking.terminal.printed_samples import sample_lines
from rlhf_cli.tracking.terminal.progress import Pace, PlainView, View
from rlhf_cli.tracking.thumbnails import Thumbnails

# Folder in the run directory.
_LOGS = "logs"
_PLAIN_CELLS = 500
"""Width of printed samples in log files."""
_TABLE_ROWS = 4
"""Samples of an iteration in trackers, without --print_samples."""
_SUMMARY_METRICS = 4
_SUMMARY_PHASES = 6


class Tracker:
    """Records and displays the reports of a run.

    Report everything about a step before saving its checkpoint: a run resumed at `resume_step` keeps exactly the
    reports up to that step. If `resume_step` is None, all files start empty. `saved` is the value that `state()`
    returned for the checkpoint.

    Metrics under time/, perf/ and memory/ are measured here and differ between runs. All other metrics come from the
    trainer, and a resumed run logs the same values as an uninterrupted run.
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
        self._facts = {"command": command, "unit": unit, "total_steps": total_steps, "folder": os.getcwd()}
        self._unit = unit
        self._num_printed = config.print_samples
        self._resume_step = resume_step
        self._thumbnails = Thumbnails(output)
        settings_file = output / SETTINGS_FILE
        settings = yaml.safe_load(settings_file.read_text(encoding="utf-8")) if settings_file.exists() else {}
        self._pace = Pace(total_steps, start_step=resume_step or 0)
        self._view: View = PlainView(console, self._pace, unit=unit, every=config.logging_steps)
        context = SinkContext(output, config, settings, resume_step, saved or {}, warn=self.message)
        self._sinks = [row.open(context) for row in sinks_of(config)]
        self._starting = True
        self._last_log = time.perf_counter()
        self._memory = HostMemory(root_of_run())
        self._flagged: set[str] = set()
        self._history = deque(filter(_is_trained, read_metrics(output).values()), maxlen=WINDOW)
        self._alarms = {line["alarm"] for line in read_lines(output / ALARMS_FILE)}
        self._on_alarm: Callable[[str], None] = lambda message: None
        self._pack_tokens: dict[str, float] = {}

    def _each(self, method: str) -> list[Callable[..., Any]]:
        """Return the method of each sink that has it."""
        return [getattr(sink, method) for sink in self._sinks if hasattr(sink, method)]

    def start(
        self,
        facts: Mapping[str, str],
        *,
        is_kept: bool = True,
        on_alarm: Callable[[str], None] = lambda message: None,
    ) -> None:
        """Announce the run: print `facts` in order, then the output folder and logs.

        If `is_kept` is False, the run directory is temporary and is not printed. `on_alarm` receives each
        alarm's message.
        """
        self._on_alarm = on_alarm
        self._facts["facts"] = dict(facts)
        self._write_facts("running")
        self._memory.start()
        logs = self._output / _LOGS
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
        """Show the running phase, None between phases: `PhaseTimer(on_change=tracker.phase)`."""
        # Model loading and worker startup are not part of the first step.
        if self._starting:
            self._starting = False
            self._last_log = time.perf_counter()
        self._view.phase(name)

    def log(self, step: int, metrics: Mapping[str, float], phases: Mapping[str, float]) -> None:
        """Record one step: the trainer's metrics, and seconds per phase."""
        now = time.perf_counter()
        measured = {f"time/{name}": seconds for name, seconds in phases.items()}
        measured["time/step"], self._last_log = now - self._last_log, now
        busy = sum(phases.values()) or measured["time/step"]
        if "num_tokens" in metrics:
            measured["perf/tokens_per_second"] = metrics["num_tokens"] / busy
        plain = {name: plain_number(value) for name, value in metrics.items()}
        # Memory metrics from the trainer (GPU workers) take precedence over measurements in this process.
        own = {k: v for k, v in plain.items() if k.startswith("memory/")}
        full = plain | measured | {"memory/host_gib": self._memory.peak()} | own
        for log in self._each("log"):
            log(step, full)
        self._flag(step, full)
        self._raise_alarms(step, full)
        self._report_splits(step, plain)
        self._pace.reach(step)
        self._view.step(Reading(step, full))

    def evaluation(self, step: int, metrics: Mapping[str, float], phases: Mapping[str, float] | None = None) -> None:
        """Record an evaluation after a step. Metric names get the prefix eval/ if missing.

        `phases` are the evaluation's seconds per phase, which do not count toward the step.
        """
        named = {f"eval/{name.removeprefix('eval/')}": plain_number(value) for name, value in metrics.items()}
        measured = {f"time/{name}": seconds for name, seconds in (phases or {}).items()}
        for log in self._each("log"):
            log(step, named | measured)
        self._flag(step, named)
        names = [name for name in prominent(named) if not name.startswith("eval/num_")][:_SUMMARY_METRICS]
        shown = "  ".join(f"{title(name[5:])} {number(named[name])}{interval(name, named)}" for name in names)
        self._view.message(f"Evaluation after {self._unit} {step}:  {shown}")
        # The next step's time starts after the evaluation.
        self._last_log = time.perf_counter()

    def samples(self, step: int, rows: Sequence[Mapping[str, object]]) -> None:
        """Record samples from a step: prompt, response, reward, label and any other fields in the rows.

        Images in `images` are stored as thumbnails, for the first rows only.
        """
        kept = self._thumbnails.rows(rows)
        for write in self._each("samples"):
            write(step, kept)
        if tables := self._each("sample_table"):
            table = sample_table(rows, self._num_printed or _TABLE_ROWS)
            for show in tables:
                show(step, table)
        cells = self._console.width - 1 if self._console.is_terminal else _PLAIN_CELLS
        for line in sample_lines(rows, self._num_printed, cells=cells):
            self._view.message(line)

    def evaluation_samples(self, step: int, rows: Sequence[Mapping[str, object]]) -> None:
        """Record evaluation responses, like `samples`, in a separate file."""
        kept = self._thumbnails.rows(rows)
        for write in self._each("evaluation_samples"):
            write(step, kept)

    def message(self, text: str) -> None:
        """Show a permanent line on the terminal."""
        self._view.message(text)

    def state(self) -> dict[str, object]:
        """Return the state of all sinks for the checkpoint."""
        return {name: value for state in self._each("state") for name, value in state().items()}

    def close(
        self, *, outcome: str = "finished", facts: Mapping[str, str] | None = None, has_course: bool = True
    ) -> None:
        """Close all files and print a summary: outcome, main metrics and `facts`, such as the model folder.

        If the steps are parts of one measurement, set `has_course` to False: first and last metrics are not compared.
        """
        # Stop redrawing first, so that the summary is printed below the view.
        self._view.close()
        self._memory.close()
        for end in self._each("outcome"):
            end(outcome)
        for close in self._each("close"):
            close()
        self._write_facts(outcome)
        done = f"{self._pace.step}/{self._pace.total_steps} {self._unit}s in {duration(self._pace.elapsed)}"
        self._console.print()
        self._console.print(f"{outcome.capitalize()}: {done}", style="bold", markup=False)
        course = _summary_rows(summarise(self._output)) if has_course else {}
        self._print_rows(course | dict(facts or {}))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if error is not None:
            self.close(outcome="interrupted" if isinstance(error, KeyboardInterrupt) else "failed")

    def _flag(self, step: int, metrics: Mapping[str, float]) -> None:
        """Warn once for each metric that is NaN or infinite."""
        broken = [name for name, value in metrics.items() if not math.isfinite(value)]
        for name in broken:
            if name not in self._flagged:
                self._flagged.add(name)
                self._view.message(f"Warning: {name} is {metrics[name]} in {self._unit} {step}", style="red")

    def _raise_alarms(self, step: int, metrics: Mapping[str, float]) -> None:
        """Report each alarm of a training step that has not been reported in the run."""
        if not _is_trained(metrics):
            return
        self._history.append(dict(metrics))
        for alarm, reason in alarms_of(self._history).items():
            if alarm.name not in self._alarms:
                self._alarms.add(alarm.name)
                message = f"{alarm.name} in {self._unit} {step}: {reason}; {alarm.fix} ({alarm.page})"
                for record in self._each("alarm"):
                    record(step, alarm.name, message)
                self._view.message(f"Alarm: {message}", style="red")
                self._on_alarm(message)

    def _report_splits(self, step: int, metrics: Mapping[str, float]) -> None:
        """Report each new limit of tokens per micro-batch after memory was full."""
        for name, tokens in metrics.items():
            if name.endswith(PACK_TOKENS) and self._pack_tokens.get(name) != tokens:
                self._pack_tokens[name] = tokens
                self._view.message(
                    f"{name.removesuffix(PACK_TOKENS)}memory was full by {self._unit} {step}: micro-batches of up to "
                    f"{tokens:.0f} tokens from here on, with the same update (--train_max_tokens_per_gpu {tokens:.0f})"
                )

    def _print_rows(self, rows: Mapping[str, str]) -> None:
        """Print names and values in two columns, wrapped on a terminal and unwrapped elsewhere."""
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


def _is_trained(metrics: Mapping[str, float]) -> bool:
    """Return whether the metrics are those of an optimizer step."""
    return "grad_norm" in metrics


def _summary_rows(summary: Summary) -> dict[str, str]:
    """Format first and last values of the main metrics, time per phase, and average speed."""
    rows = {
        title(name): f"{number(summary.first[name])} → {number(summary.last[name])}"
        for name in shown_names(summary.last)[:_SUMMARY_METRICS]
        if name != "lr"
    }
    total = sum(summary.phases.values())
    if total > 0:
        ranked = sorted(summary.phases.items(), key=lambda phase: -phase[1])[:_SUMMARY_PHASES]
        rows["time"] = ", ".join(
            f"{name} {duration(seconds)} ({seconds / total:.0%})" for name, seconds in ranked[:_SUMMARY_PHASES]
        )
    if summary.tokens_per_second is not None:
        rows["speed"] = f"{scaled(summary.tokens_per_second)} tokens/s"
    return rows


class SilentTracker:
    """Tracker for ranks other than 0. Discards all reports."""

    def start(self, facts: Mapping[str, str]) -> None:
        """No-op."""

    def phase(self, name: str | None) -> None:
        """No-op."""

    def log(self, step: int, metrics: Mapping[str, float], phases: Mapping[str, float]) -> None:
        """No-op."""

    def evaluation(self, step: int, metrics: Mapping[str, float], phases: Mapping[str, float] | None = None) -> None:
        """No-op."""

    def evaluation_samples(self, step: int, rows: Sequence[Mapping[str, object]]) -> None:
        """No-op."""

    def samples(self, step: int, rows: Sequence[Mapping[str, object]]) -> None:
        """No-op."""

    def message(self, text: str) -> None:
        """No-op."""

    def state(self) -> dict[str, object]:
        """Return nothing: rank 0 saves the state."""
        return {}

    def close(self, *, outcome: str = "finished", facts: Mapping[str, str] | None = None) -> None:
        """No-op."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        """No-op."""
