"""Runs as their folders record them: state, progress, metrics and the command that resumes them.

Imports nothing heavy, so that a list of many runs is fast.
"""

import json
import os
import shlex
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

import yaml

from rlhf_cli.backends.process.output_lock import lock_holder
from rlhf_cli.backends.training.checkpoint import CheckpointStore
from rlhf_cli.command_table import COMMANDS, TRAINING
from rlhf_cli.config.train import CheckpointConfig
from rlhf_cli.errors import UsageError
from rlhf_cli.runs.run_directory import CONFIG, LOGS, check_run_directory, run_directory
from rlhf_cli.tracking.figures import prominent
from rlhf_cli.tracking.sinks import RUN_FILE, json_number, last_metrics, read_alarms

State = Literal["running", "finished", "stopped", "failed", "killed", "unknown"]
_STATES: dict[str, State] = {"finished": "finished", "interrupted": "stopped", "failed": "failed"}
"""State by outcome in run.json. Until it ends, a run has the outcome "running"."""
_PARTS_OF_A_RUN = {"checkpoints", "model", "best", "ema", "tensorboard", LOGS}
_SILENT_SECONDS = 900.0
"""A run on a different host is assumed to be running if it has written a file within this time, or three steps."""
_TRAINING_METRICS, _EVALUATION_METRICS = 2, 1


@dataclass(frozen=True)
class RecordedRun:
    """A run in a folder.

    - `state`: `stopped` by Ctrl-C or SIGTERM with a checkpoint, `failed` with an error, `killed` without one; `unknown`
      if it runs on a different host and has been silent.
    - `step` of `total_steps`, in `unit`.
    - `metrics`: main metrics from the last step and the last evaluation.
    - `alarms`: messages of the alarms, in order.
    - `checkpoint`: step of the latest checkpoint.
    - `changed`: when the run has last written a file, in seconds since the epoch.
    - `started_in`: folder in which the command was started, to which its paths are relative; empty if unknown.
    - `resume`: command line that resumes or repeats the run; empty if it is finished or running.
    """

    folder: Path
    command: str
    model: str
    state: State
    step: int
    total_steps: int
    unit: str
    metrics: Mapping[str, float]
    alarms: list[str]
    checkpoint: int | None
    changed: float
    started_in: str
    resume: str

    def as_json(self) -> dict[str, object]:
        """Return the record as JSON values. NaN and infinities are strings."""
        metrics = {name: json_number(value) for name, value in self.metrics.items()}
        return asdict(self) | {"folder": str(self.folder), "metrics": metrics}


def find_runs(folder: Path) -> tuple[list[RecordedRun], list[str]]:
    """Return the runs in a folder and its subfolders, the newest first, and a sentence for each skipped folder.

    Raises:
        UsageError: the folder does not exist.
    """
    if not folder.is_dir():
        raise UsageError(f"{folder}: there is no such folder")
    runs, skipped = [], list[str]()
    for root in _run_folders(folder, skipped):
        try:
            runs.append(read_run(root))
        except UsageError as error:
            skipped.append(str(error))
    return sorted(runs, key=lambda run: -run.changed), skipped


def _run_folders(folder: Path, skipped: list[str]) -> Iterator[Path]:
    """Yield folders with run.json. Symbolic links are not followed, and unreadable folders are added to `skipped`."""

    def report(error: OSError) -> None:
        skipped.append(f"{error.filename}: {(error.strerror or str(error)).lower()}")

    for path, folders, files in os.walk(folder, onerror=report):
        is_run = RUN_FILE in files
        # Checkpoints have thousands of files, but no runs.
        folders[:] = sorted(name for name in folders if not (is_run and name in _PARTS_OF_A_RUN))
        if is_run:
            yield Path(path)


def read_run(root: Path) -> RecordedRun:
    """Read a run's record. Raises UsageError, which names the folder and the file, if it is broken."""
    facts, settings = _read(root / RUN_FILE, json.loads), _read(root / CONFIG, _from_yaml)
    command, outcome, unit = (str(facts.get(name)) for name in ("command", "outcome", "unit"))
    if command not in COMMANDS:
        raise UsageError(f"{root / RUN_FILE} was not written by rlhf")
    try:
        total_steps, (step, metrics) = int(str(facts["total_steps"])), last_metrics(root)
        alarms = read_alarms(root)
        changed = max(path.stat().st_mtime for path in _signs_of_life(root))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UsageError(f"{root} has broken files ({type(error).__name__}: {error})") from None
    state = _state(root, outcome, silent=time.time() - changed, step_seconds=metrics.get("time/step", 0.0))
    started_in = str(facts.get("folder") or "")
    is_over = state in ("running", "finished")
    return RecordedRun(
        folder=root,
        command=command,
        model=str(settings.get("pretrain") or ""),
        state=state,
        step=step,
        total_steps=total_steps,
        unit=unit,
        metrics=_main(metrics),
        alarms=alarms,
        checkpoint=_checkpoint(root, settings),
        changed=changed,
        started_in=started_in,
        resume="" if is_over else _resume(root, command, settings, started_in),
    )


def _read(path: Path, parse: Callable[[str], object]) -> dict[str, object]:
    """Read a file with an object. Raises UsageError if it is broken."""
    try:
        found = parse(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError, RecursionError) as error:
        reason = getattr(error, "strerror", None) or type(error).__name__
        raise UsageError(f"{path} cannot be read ({reason})") from None
    if not isinstance(found, dict):
        raise UsageError(f"{path} holds no settings")
    return found


def _from_yaml(text: str) -> object:
    # The loader in C is ten times faster.
    return yaml.load(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))


def _signs_of_life(root: Path) -> Iterator[Path]:
    """Yield the files that a run writes to."""
    yield root / RUN_FILE
    yield from root.glob("*.jsonl")
    yield from (root / LOGS).glob("*.log")


def _state(root: Path, outcome: str, *, silent: float, step_seconds: float) -> State:
    """Return the state. `silent`: seconds since the run last wrote a file."""
    holder = lock_holder(root)
    # Includes a run that replaces an earlier one and is starting.
    if holder is not None and holder.is_alive:
        return "running"
    if outcome in _STATES:
        return _STATES[outcome]
    if holder is None or holder.is_here:
        return "killed"
    return "running" if silent < max(_SILENT_SECONDS, 3 * step_seconds) else "unknown"


def _main(metrics: Mapping[str, float]) -> dict[str, float]:
    """Select the main training and evaluation metrics."""
    names = prominent(metrics)
    training = [name for name in names if not name.startswith("eval/")][:_TRAINING_METRICS]
    evaluation = [name for name in names if name.startswith("eval/") and not name.startswith("eval/num_")]
    return {name: metrics[name] for name in (*training, *evaluation[:_EVALUATION_METRICS])}


def _output_settings(root: Path, settings: Mapping[str, object]) -> CheckpointConfig:
    """Return a training command's folders, which may have been moved."""
    # Folders inside the run have moved with it.
    ckpt_path, save_path = (str(settings[name]) if settings.get(name) else None for name in ("ckpt_path", "save_path"))
    return CheckpointConfig(output=str(root), load_checkpoint=True, ckpt_path=ckpt_path, save_path=save_path)


def _checkpoint(root: Path, settings: Mapping[str, object]) -> int | None:
    folder = run_directory(_output_settings(root, settings)).checkpoints
    return next(reversed(CheckpointStore(folder, max_num=1).steps()), None)


def _resume(root: Path, command: str, settings: Mapping[str, object], started_in: str) -> str:
    """Return the command line that resumes a run, in the folder in which it was started."""
    folder = Path(started_in)
    is_here = not started_in or not folder.is_dir() or folder.samefile(Path.cwd())
    path = root if is_here else root.resolve()
    words = ["rlhf", command, "--config", str(path / CONFIG)]
    own = folder / str(settings.get("output"))
    # The run may have been moved since.
    if not own.exists() or not own.samefile(root):
        words += ["--output", str(path)]
    words += _flags(root, command, settings)
    return ("" if is_here else f"cd {shlex.quote(started_in)} && ") + shlex.join(words)


def _flags(root: Path, command: str, settings: Mapping[str, object]) -> list[str]:
    """Return the flags that resume a run. One that cannot be resumed is replaced."""
    try:
        if command in TRAINING:
            check_run_directory(_output_settings(root, settings))
    except UsageError:
        return ["--overwrite", *(["--no_load_checkpoint"] if settings.get("load_checkpoint") else [])]
    return ["--load_checkpoint", *(["--no_overwrite"] if settings.get("overwrite") else [])]
