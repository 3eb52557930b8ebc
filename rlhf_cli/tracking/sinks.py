"""Sinks for metrics and samples: JSON lines files, trackers of other packages and user code. `SINKS` lists them.

terminal/progress.py writes to the terminal, and view/ shows the files as a page.
"""

import json
import math
import mmap
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from rlhf_cli.config.plugins import load_target
from rlhf_cli.config.train import TrackingConfig
from rlhf_cli.tracking.services import (
    TENSORBOARD,
    MlflowSink,
    Service,
    SinkContext,
    SwanlabSink,
    TensorBoardSink,
    TrackioSink,
    WandbSink,
    check_swanlab,
    check_wandb,
    require_package,
)
from rlhf_cli.tracking.thumbnails import FOLDER as THUMBNAILS

METRICS_FILE = "metrics.jsonl"
SAMPLES_FILE = "samples.jsonl"
EVAL_SAMPLES_FILE = "eval_samples.jsonl"
ALARMS_FILE = "alarms.jsonl"
INDEX_ENDING = ".index"
"""Ending of the index of a samples file, which `rlhf view` writes."""
INDEX_FILES = (f"{SAMPLES_FILE}{INDEX_ENDING}", f"{EVAL_SAMPLES_FILE}{INDEX_ENDING}")
RUN_FILE = "run.json"
PLAN_FILE = "plan.json"
SETTINGS_FILE = "config.yaml"

_NON_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


def plain_number(value: Any) -> float | int | bool:
    """Convert a number, NumPy scalar or one-element tensor to a Python number."""
    if isinstance(value, (bool, int, float)):
        return value
    return value.item()


def json_number(value: float | int | bool) -> float | int | bool | str:
    """Encode for JSON, which has no NaN and infinities: they become the strings "NaN", "Infinity" and "-Infinity"."""
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else ("Infinity" if value > 0 else "-Infinity")
    return value


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the objects in a JSON lines file, if it exists. A last line torn by a kill is skipped."""
    if not path.exists():
        return
    with path.open("rb") as lines:
        for line in lines:
            if not line.endswith(b"\n"):
                return
            yield json.loads(line)


# Keys that earlier versions of `rlhf generate` and `rlhf eval` wrote, before all commands shared one schema.
_EARLIER_KEYS = {"prompt_index": "group", "sample_index": "sample", "num_tokens": "length", "score": "reward"}


def present_row(line: Mapping[str, Any]) -> dict[str, Any]:
    """Return a row of samples.jsonl with current key names."""
    row = {_EARLIER_KEYS.get(name, name): value for name, value in line.items()}
    return row | {f"reward/{name}": value for name, value in row.pop("scores", {}).items()}


def read_samples(path: Path) -> Iterator[dict[str, Any]]:
    """Yield rows of samples.jsonl or eval_samples.jsonl with current key names, also from earlier versions."""
    return map(present_row, read_lines(path))


def read_metrics(output: Path) -> dict[int, dict[str, float]]:
    """Read all metrics by step, in order. Lines with the same step are merged."""
    by_step: dict[int, dict[str, float]] = {}
    for record in read_lines(output / METRICS_FILE):
        metrics = by_step.setdefault(record.pop("step"), {})
        metrics |= {key: _NON_FINITE[value] if isinstance(value, str) else value for key, value in record.items()}
    return dict(sorted(by_step.items()))


def read_alarms(output: Path) -> list[str]:
    """Read the messages of all alarms, in order."""
    return [str(line["message"]) for line in read_lines(output / ALARMS_FILE)]


def last_metrics(output: Path) -> tuple[int, dict[str, float]]:
    """Return the last step, with its metrics and those of the last evaluation. Reads only the end of the file."""
    path = output / METRICS_FILE
    if not path.is_file() or not path.stat().st_size:
        return 0, {}
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as lines:
        records = [_last_line(lines, mark) for mark in (b'"eval/', b'"time/step"')]
    step = max(record.pop("step", 0) for record in records)
    return step, {name: _NON_FINITE.get(value, value) for record in records for name, value in record.items()}


def _last_line(lines: mmap.mmap, mark: bytes) -> dict[str, Any]:
    """Return the last complete line with a mark; {} if there is none."""
    place = lines.rfind(mark, 0, lines.rfind(b"\n") + 1)
    return json.loads(lines[lines.rfind(b"\n", 0, place) + 1 : lines.find(b"\n", place)]) if place >= 0 else {}


def _without_non_finite(value: Any) -> Any:
    """Replace every NaN and infinity in a structure with None, because JSON has neither."""
    if isinstance(value, Mapping):
        return {key: _without_non_finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_without_non_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


class JsonLines:
    """An append-only JSON lines file. Each object has a "step" and is written to the OS immediately.

    On opening, lines after `resume_step` are removed (all lines if None), so that a resumed run ends with the same file
    as an uninterrupted run. The replacement is atomic.
    """

    def __init__(self, path: Path, *, resume_step: int | None) -> None:
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        truncate_after(path, resume_step)
        # Unbuffered: one write call per line.
        self._file = path.open("ab", buffering=0)

    def write(self, step: int, fields: Mapping[str, object]) -> None:
        """Append {"step": step, **fields} in one system call, so that a kill can tear only the last line."""
        record = {"step": step, **fields}
        self._file.write(json.dumps(record, ensure_ascii=False, allow_nan=False).encode(errors="replace") + b"\n")

    def sync(self) -> None:
        """Block until everything is on disk."""
        os.fsync(self._file.fileno())

    def close(self) -> None:
        self._file.close()


def truncate_after(path: Path, step: int | None) -> None:
    """Remove lines with a larger step (all lines if None) and a torn last line from a JSON lines file."""
    if not path.exists():
        return
    temporary = path.with_name(path.name + ".tmp")
    with path.open("rb") as lines, temporary.open("wb") as kept:
        if step is not None:
            kept.writelines(line for line in lines if line.endswith(b"\n") and json.loads(line)["step"] <= step)
        # The data must be on disk before the rename, or a power failure could leave an empty file.
        kept.flush()
        os.fsync(kept.fileno())
    os.replace(temporary, path)


class MetricsFile:
    """metrics.jsonl"""

    def __init__(self, output: Path, *, resume_step: int | None) -> None:
        self._lines = JsonLines(output / METRICS_FILE, resume_step=resume_step)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._lines.write(step, {name: json_number(value) for name, value in metrics.items()})

    def close(self) -> None:
        self._lines.close()


class SamplesFile:
    """samples.jsonl: one generated sample per line. eval_samples.jsonl has the same format for evaluations."""

    def __init__(self, output: Path, *, resume_step: int | None, name: str = SAMPLES_FILE) -> None:
        self._lines = JsonLines(output / name, resume_step=resume_step)

    def write(self, step: int, samples: Iterable[Mapping[str, object]]) -> None:
        """Append samples from a step and sync them to disk."""
        for sample in samples:
            try:
                self._lines.write(step, sample)
            # Replace numbers only then: a walk through each row takes longer than writing it.
            except ValueError:
                self._lines.write(step, _without_non_finite(sample))
        # A checkpoint may follow, and a run resumed from it expects all samples on disk.
        self._lines.sync()

    def close(self) -> None:
        self._lines.close()


class _SampleFiles:
    """samples.jsonl, and eval_samples.jsonl from the first evaluation on."""

    def __init__(self, output: Path, *, resume_step: int | None) -> None:
        self._training = SamplesFile(output, resume_step=resume_step)
        self._evaluation: SamplesFile | None = None
        self._open_evaluation = lambda: SamplesFile(output, resume_step=resume_step, name=EVAL_SAMPLES_FILE)

    def samples(self, step: int, rows: Sequence[Mapping[str, object]]) -> None:
        self._training.write(step, rows)

    def evaluation_samples(self, step: int, rows: Sequence[Mapping[str, object]]) -> None:
        self._evaluation = self._evaluation or self._open_evaluation()
        self._evaluation.write(step, rows)

    def close(self) -> None:
        self._training.close()
        if self._evaluation is not None:
            self._evaluation.close()


class _AlarmsFile:
    """alarms.jsonl: one alarm per line. The file exists from the first alarm on."""

    def __init__(self, output: Path, *, resume_step: int | None) -> None:
        self._path = output / ALARMS_FILE
        truncate_after(self._path, resume_step)

    def alarm(self, step: int, name: str, message: str) -> None:
        lines = JsonLines(self._path, resume_step=step)
        lines.write(step, {"alarm": name, "message": message})
        lines.sync()
        lines.close()


def _open_own(run: SinkContext) -> Any:
    """Create the tracker from --tracker, and restore its state if it has `load_state`."""
    tracker = load_target(run.config.tracker)(run.output, run.settings, run.resume_step)  # type: ignore[arg-type]
    if run.resume_step is not None and hasattr(tracker, "load_state"):
        tracker.load_state(run.saved)
    return tracker


@dataclass(frozen=True)
class _SinkRow:
    """A sink. `setting` is the field of `TrackingConfig` that enables it; empty means always enabled.

    `files` are the names in the run directory that the sink writes; --overwrite removes them. `check` raises UsageError
    if the sink cannot run. The opened object has any of the methods `log(step, metrics)`, `samples(step, rows)`,
    `evaluation_samples(step, rows)`, `sample_table(step, table)`, `alarm(step, name, message)`, `state()`,
    `outcome(name)`, `close()`. A table has a few of the rows (`sample_table.py`). Values returned by `state()` must be
    JSON; they are saved in the checkpoint. An outcome is finished, interrupted or failed.

    One thread makes all calls. `log` is called again for the `eval/` metrics of the same step, so `step` is not unique.
    Values may be NaN or infinite. Data must be on disk when a call returns, because a checkpoint may follow.
    """

    setting: str
    open: Callable[[SinkContext], Any]
    files: tuple[str, ...] = ()
    check: Callable[[], object] = lambda: None


def _service(name: str, title: str, sink: type, check: Callable[[], object]) -> _SinkRow:
    """Return the row of --use_NAME. --overwrite keeps offline runs, which may not be uploaded yet."""
    return _SinkRow(f"use_{name}", partial(Service, title, f"{name}_run_id", sink), check=check)


# In order of writing: the run's own files come first, so that a failing service loses no metrics.
SINKS = (
    _SinkRow("", lambda run: MetricsFile(run.output, resume_step=run.resume_step), (METRICS_FILE,)),
    _SinkRow(
        "",
        lambda run: _SampleFiles(run.output, resume_step=run.resume_step),
        # The tracker stores the images of the rows, for all sinks.
        (SAMPLES_FILE, EVAL_SAMPLES_FILE, THUMBNAILS),
    ),
    _SinkRow("", lambda run: _AlarmsFile(run.output, resume_step=run.resume_step), (ALARMS_FILE,)),
    _SinkRow("use_tensorboard", lambda run: TensorBoardSink(run.output, resume_step=run.resume_step), (TENSORBOARD,)),
    _SinkRow("tracker", _open_own),
    _service("wandb", "Weights & Biases", WandbSink, check_wandb),
    _service("mlflow", "MLflow", MlflowSink, partial(require_package, "mlflow")),
    _service("trackio", "Trackio", TrackioSink, partial(require_package, "trackio")),
    _service("swanlab", "SwanLab", SwanlabSink, check_swanlab),
)

WITHOUT_TRACKERS: Mapping[str, object] = {
    row.setting: None if row.setting == "tracker" else False for row in SINKS if row.setting
}
"""Settings of a run whose metrics only its own files have."""


def sinks_of(config: TrackingConfig) -> list[_SinkRow]:
    """Return the enabled sinks."""
    return [row for row in SINKS if not row.setting or getattr(config, row.setting)]


def files_of(rows: Iterable[_SinkRow]) -> tuple[str, ...]:
    """Return the names in the run directory that these sinks write."""
    return tuple(name for row in rows for name in row.files)


def check_tracking(config: TrackingConfig) -> None:
    """Raise UsageError if an enabled sink cannot run. Call it before anything starts."""
    for row in sinks_of(config):
        row.check()
