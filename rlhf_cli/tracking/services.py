"""Trackers from other packages: TensorBoard, Weights & Biases, MLflow, Trackio and SwanLab.

Each has metrics, a small table of samples, and alarms. A server that does not answer never stops a run (`Service`).
"""

import importlib
import importlib.util
import os
import re
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import uuid4

from rlhf_cli.config.train import TrackingConfig
from rlhf_cli.errors import UsageError
from rlhf_cli.tracking.sample_table import COLUMNS, markdown

Table = Sequence[Sequence[str | float | None]]

TENSORBOARD = "tensorboard"
_SAMPLES = "samples"
"""Name of the table in each tracker."""
_ALARMS = "alarms"
"""Name of the texts in trackers without alerts."""
_WANDB_KEYS = ("WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE")
_LIMITS = {
    # By default, wandb uploads without a limit at the end of a run, and MLflow repeats a request for 4 minutes.
    "WANDB_FINISH_TIMEOUT": "600",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "20",
}
_PAUSE = 10
"""Pause after a failed call, as a multiple of the time of that call: a dead server slows a run by at most a tenth."""
_LONGEST_REASON = 200
_NO_NAME = re.compile(r"[^\w\-. :/]")
"""Characters that MLflow refuses in names of metrics."""
_BATCH = 100
"""Parameters in one request to MLflow."""
_LONGEST_VALUE = 500
"""Characters of a parameter that every version of the MLflow server accepts."""
_STEPS_PER_FILE = 100
"""Iterations in one MLflow table. It is sent again as a whole for each, and MLflow lists at most 150 tables."""


@dataclass(frozen=True)
class SinkContext:
    """The run that a sink is opened for.

    - `resume_step`: step to resume after, None for a new run.
    - `saved`: merged `state()` of all sinks, from the checkpoint.
    - `warn`: shows a line on the terminal.
    """

    output: Path
    config: TrackingConfig
    settings: Mapping[str, object]
    resume_step: int | None
    saved: Mapping[str, object]
    warn: Callable[[str], None]

    @property
    def name(self) -> str:
        """Name of the run in trackers."""
        return self.config.wandb_run_name or self.output.resolve().name


class TensorBoardSink:
    """Event files in <output>/tensorboard. A resumed run hides old events after the resume step."""

    def __init__(self, output: Path, *, resume_step: int | None) -> None:
        # Imported late: it needs torch and tensorboard.
        from torch.utils.tensorboard import SummaryWriter

        folder = output / TENSORBOARD
        # A new run: TensorBoard would mix events from all files in the folder.
        if resume_step is None:
            for stale in folder.glob("events.out.tfevents.*"):
                stale.unlink()
        # Written to the new file; TensorBoard then discards older events from this step on.
        purge_step = None if resume_step is None else resume_step + 1
        self._writer = SummaryWriter(str(folder), purge_step=purge_step, flush_secs=10)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(name, float(value), step)

    def sample_table(self, step: int, table: Table) -> None:
        self._writer.add_text(_SAMPLES, markdown(table), step)

    def alarm(self, step: int, name: str, message: str) -> None:
        self._writer.add_text(_ALARMS, message, step)

    def close(self) -> None:
        self._writer.close()


class WandbSink:
    """A Weights & Biases run: the one with `run_id`, or a new one if None."""

    def __init__(self, run: SinkContext, run_id: str | None) -> None:
        self._wandb = importlib.import_module("wandb")
        options = {
            "project": run.config.wandb_project,
            "entity": run.config.wandb_org,
            "group": run.config.wandb_group,
            "name": run.name,
            "id": run_id,
            "resume": "allow",
            "dir": str(run.output),
            "config": dict(run.settings),
            "save_code": False,
            # Output already goes to a log file, and wandb's console capture would redirect descriptors 1 and 2 again.
            "settings": self._wandb.Settings(console="off"),
        }
        try:
            self._run = self._wandb.init(**options)
        except Exception as error:
            _warn_offline(run, "Weights & Biases", error, "wandb sync")
            # The failed run would still hold the ID.
            self._wandb.teardown()
            self._run = self._wandb.init(**options, mode="offline")
        # wandb drops values for steps below its own counter, but a resumed run logs some steps a second time.
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")
        self.run_id = str(self._run.id)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log({"step": step, **metrics})

    def sample_table(self, step: int, table: Table) -> None:
        self._run.log({"step": step, _SAMPLES: self._wandb.Table(columns=list(COLUMNS), data=table)})

    def alarm(self, step: int, name: str, message: str) -> None:
        self._run.alert(title=name, text=message)

    def close(self, outcome: str) -> None:
        self._run.finish(exit_code=int(outcome == "failed"))


class MlflowSink:
    """An MLflow run, at MLFLOW_TRACKING_URI or in ./mlflow.db."""

    def __init__(self, run: SinkContext, run_id: str | None) -> None:
        self._mlflow = importlib.import_module("mlflow")
        self._client = self._mlflow.MlflowClient()
        self.run_id = run_id or self._new_run(run)
        self._client.update_run(self.run_id, status="RUNNING")

    def _new_run(self, run: SinkContext) -> str:
        """Create a run with the settings as parameters, and the experiment if there is none. Returns the ID."""
        name = run.config.wandb_project
        known = self._client.get_experiment_by_name(name)
        experiment = known.experiment_id if known else self._client.create_experiment(name)
        run_id = self._client.create_run(experiment, run_name=run.name).info.run_id
        parameters = [
            self._mlflow.entities.Param(name, str(value)[:_LONGEST_VALUE]) for name, value in run.settings.items()
        ]
        for start in range(0, len(parameters), _BATCH):
            self._client.log_batch(run_id, params=parameters[start : start + _BATCH])
        return run_id

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        now = int(time.time() * 1000)
        values = [
            self._mlflow.entities.Metric(_NO_NAME.sub("_", name), float(value), now, step)
            for name, value in metrics.items()
        ]
        self._client.log_batch(self.run_id, metrics=values)

    def sample_table(self, step: int, table: Table) -> None:
        columns = {name: list(column) for name, column in zip(COLUMNS, zip(*table, strict=True), strict=True)}
        first = step // _STEPS_PER_FILE * _STEPS_PER_FILE
        file = f"{_SAMPLES}/{first:06d}-{first + _STEPS_PER_FILE - 1:06d}.json"
        self._client.log_table(self.run_id, {"step": [step] * len(table), **columns}, file)

    def alarm(self, step: int, name: str, message: str) -> None:
        self._client.set_tag(self.run_id, f"alarm.{name}", message)

    def close(self, outcome: str) -> None:
        self._client.set_terminated(self.run_id, {"interrupted": "KILLED"}.get(outcome, outcome.upper()))


class TrackioSink:
    """A Trackio run: on this machine, in the Space of TRACKIO_SPACE_ID or at TRACKIO_SERVER_URL.

    Trackio finds runs by name, so the name ends with a random part and serves as the ID.
    """

    def __init__(self, run: SinkContext, run_id: str | None) -> None:
        self._trackio = importlib.import_module("trackio")
        self.run_id = run_id or f"{run.name}-{uuid4().hex[:8]}"
        self._run = self._trackio.init(
            project=run.config.wandb_project,
            name=self.run_id,
            group=run.config.wandb_group,
            config=dict(run.settings),
            resume="allow",
            embed=False,
        )

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log(dict(metrics), step=step)

    def sample_table(self, step: int, table: Table) -> None:
        self._run.log({_SAMPLES: self._trackio.Table(columns=list(COLUMNS), data=table)}, step=step)

    def alarm(self, step: int, name: str, message: str) -> None:
        self._run.alert(name, message, step=step)

    def close(self, outcome: str) -> None:
        self._run.finish()


class SwanlabSink:
    """A SwanLab run, in the mode of SWANLAB_MODE."""

    def __init__(self, run: SinkContext, run_id: str | None) -> None:
        self._swanlab = importlib.import_module("swanlab")
        options = {
            "project": run.config.wandb_project,
            "group": run.config.wandb_group,
            "name": run.name,
            "id": run_id,
            "resume": "allow",
            "log_dir": str(run.output / "swanlog"),
            "config": dict(run.settings),
            "settings": self._swanlab.Settings(interactive=False),
        }
        # SwanLab ends its run at Ctrl-C, but metrics of the last step follow.
        on_interrupt = signal.getsignal(signal.SIGINT)
        try:
            self._run = self._swanlab.init(**options)
        except Exception as error:
            _warn_offline(run, "SwanLab", error, "swanlab sync")
            self._run = self._swanlab.init(**options, mode="offline")
        finally:
            signal.signal(signal.SIGINT, on_interrupt)
        self.run_id = str(self._run.id)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log(dict(metrics), step=step)

    def sample_table(self, step: int, table: Table) -> None:
        shown = self._swanlab.echarts.Table()
        shown.add(list(COLUMNS), [list(row) for row in table])
        self._run.log({_SAMPLES: shown}, step=step)

    def alarm(self, step: int, name: str, message: str) -> None:
        self._run.log({_ALARMS: self._swanlab.Text(message)}, step=step)

    def close(self, outcome: str) -> None:
        states = {"interrupted": ("aborted", None), "failed": ("crashed", "the run failed")}
        state, error = states.get(outcome, ("success", None))
        self._run.finish(state=state, error=error)


class Service:
    """A tracker that may fail without ending the run: the first error is shown, and later calls try again.

    `key` is the name of its run ID in the checkpoint, with which a resumed run continues the same run.
    """

    def __init__(self, title: str, key: str, open_sink: Callable[[SinkContext, str | None], Any], run: SinkContext):
        self._title, self._key, self._run = title, key, run
        self._saved_id = str(run.saved[key]) if run.saved.get(key) else None
        self._open_sink = open_sink
        self._sink: Any = None
        self._outcome = "finished"
        self._has_failed = False
        self._next_try = 0.0
        for name, limit in _LIMITS.items():
            os.environ.setdefault(name, limit)
        self._attempt(lambda sink: None)

    def _attempt(self, call: Callable[[Any], object]) -> None:
        """Open the sink if necessary, and call it. After an error, pause."""
        start = time.monotonic()
        if start < self._next_try:
            return
        try:
            self._sink = self._sink or self._open_sink(self._run, self._saved_id)
            call(self._sink)
            self._has_failed = False
        except Exception as error:
            now = time.monotonic()
            self._next_try = now + _PAUSE * (now - start)
            if not self._has_failed:
                self._run.warn(
                    f"Warning: {self._title} fails ({_reason(error)}). The run continues, and metrics.jsonl has points "
                    "missing there"
                )
            self._has_failed = True

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._attempt(lambda sink: sink.log(step, metrics))

    def sample_table(self, step: int, table: Table) -> None:
        self._attempt(lambda sink: sink.sample_table(step, table))

    def alarm(self, step: int, name: str, message: str) -> None:
        self._attempt(lambda sink: sink.alarm(step, name, message))

    def state(self) -> dict[str, object]:
        run_id = self._sink.run_id if self._sink else self._saved_id
        return {self._key: run_id} if run_id else {}

    def outcome(self, name: str) -> None:
        self._outcome = name

    def close(self) -> None:
        if self._sink:
            self._attempt(lambda sink: sink.close(self._outcome))


def _reason(error: Exception) -> str:
    """Return the beginning of an error's first line."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:_LONGEST_REASON]


def _warn_offline(run: SinkContext, title: str, error: Exception, command: str) -> None:
    run.warn(
        f"Warning: {title} cannot be used ({_reason(error)}). The run is recorded offline; upload it with `{command}`"
    )


def require_package(name: str) -> None:
    """Raise UsageError if a tracker's package, which has the name of its extra, is not installed."""
    found = importlib.util.find_spec(name)
    # A folder of that name, such as ./wandb with offline runs, is found as a package without a file.
    if found is None or found.origin is None:
        raise UsageError(f"--use_{name} requires the {name} package: pip install 'rlhf-cli[{name}]'")


def check_wandb() -> None:
    """Raise UsageError if the wandb package or an API key is missing: wandb would prompt on the terminal."""
    require_package("wandb")
    check_wandb_key(os.environ, netrc=Path.home() / ".netrc")


def check_wandb_key(environment: Mapping[str, str], *, netrc: Path) -> None:
    """Raise UsageError if wandb would prompt for a key."""
    offline = environment.get("WANDB_MODE") in ("offline", "disabled")
    has_key = any(environment.get(key) for key in _WANDB_KEYS)
    if not offline and not has_key and not netrc.exists():
        raise UsageError("--use_wandb requires an API key: set WANDB_API_KEY (or WANDB_MODE=offline)")


def check_swanlab() -> None:
    """Raise UsageError if the swanlab package or an API key is missing."""
    require_package("swanlab")
    settings = importlib.import_module("swanlab").Settings()
    if settings.mode == "online" and not settings.api_key:
        raise UsageError("--use_swanlab requires an API key: set SWANLAB_API_KEY (or SWANLAB_MODE=offline)")
