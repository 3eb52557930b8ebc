"""Implementation of `rlhf rerun`: runs a training run again and compares metrics, samples and model, bit for bit."""

import math
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import chdir, suppress
from dataclasses import dataclass
from pathlib import Path

from rlhf_cli.backends.process.output_lock import require_new
from rlhf_cli.backends.process.signals import INTERRUPTED, stops_forwarded
from rlhf_cli.command_table import TRAINING
from rlhf_cli.commands.rerun import RerunConfig
from rlhf_cli.config.base import CommandConfig
from rlhf_cli.errors import RunError, UsageError, listed
from rlhf_cli.options import to_yaml
from rlhf_cli.runs.early_checks import check_early
from rlhf_cli.runs.recorded_runs import RecordedRun, read_run
from rlhf_cli.runs.run_comparison import Difference, MetricsComparison, first_sample_difference, model_difference
from rlhf_cli.runs.run_directory import LOCK_FILE, recorded_config, run_directory
from rlhf_cli.runs.run_lock import CAUSES, VARIABLES, Start, lock_differences, read_lock
from rlhf_cli.tracking.sinks import WITHOUT_TRACKERS, last_metrics

_OF_A_RERUN: Mapping[str, object] = {
    "ckpt_path": None,
    "save_path": None,
    "save_steps": -1,
    "max_restarts": 0,
    "load_checkpoint": False,
    "overwrite": False,
    "on_event": None,
    **WITHOUT_TRACKERS,
}
"""Settings for the repetition: separate folders and no trackers. None changes results."""
_LOOK_SECONDS = 0.2
_SHOWN = 5


@dataclass(frozen=True)
class _Rerun:
    """A run, and folder and settings for the repetition up to step `until`. `model` is the folder with its model."""

    root: Path
    run: RecordedRun
    starts: Sequence[Start]
    folder: Path
    config: CommandConfig
    until: int
    model: Path

    @property
    def is_whole(self) -> bool:
        """Whether both runs end with a model."""
        return self.run.state == "finished" and self.until == self.run.step and self.model.is_dir()


def rerun(config: RerunConfig) -> None:
    """Run a training run again. Raises RunError with the first difference and the likely cause if it differs."""
    again = _checked(Path(config.rerun.run).expanduser(), config.rerun.output, config.rerun.until)
    print(f"rlhf {again.run.command} in {again.root} runs again in {again.folder}", flush=True)
    metrics = MetricsComparison(again.root, again.folder, until=again.until)
    difference = _run_again(again, metrics)
    until = difference.step if difference else again.until
    num_samples, of_samples = first_sample_difference(again.root, again.folder, until=until)
    found = [one for one in (difference, of_samples) if one is not None]
    if not found and again.is_whole and (tensor := model_difference(again.model, again.folder / "model")):
        found.append(Difference(again.until, tensor))
    if found:
        raise RunError("\n".join(_explained(again, found)))
    parts = [f"all metrics up to {again.run.unit} {again.until} ({metrics.num_values:,} values)"]
    parts += [f"{num_samples} samples"] if num_samples else []
    parts += ["the model"] if again.is_whole else []
    print(f"Equal, bit for bit: {listed(parts)}")


def _checked(root: Path, output: str | None, until: int | None) -> _Rerun:
    """Check that a run can be repeated. Raises UsageError if not."""
    run = read_run(root)
    if run.command not in TRAINING:
        raise UsageError(f"{root} is a run of rlhf {run.command}; only training runs again: {listed(TRAINING)}")
    if run.state == "running":
        raise UsageError(f"{root} is running: wait until it has ended")
    starts = read_lock(root)
    if not starts:
        raise UsageError(f"{root} has no {LOCK_FILE}: it was made by an earlier version")
    # A killed run may have written its last step only in part.
    last = run.step if run.state in ("finished", "stopped") else run.step - 1
    if last < 1:
        raise UsageError(f"{root} has no complete {run.unit}, so there is nothing to compare")
    folder = Path(output or f"{root.resolve()}.rerun").expanduser().absolute()
    require_new(folder)
    path = root.absolute()
    if run.started_in and not Path(run.started_in).is_dir():
        raise UsageError(f"{root} cannot run again: the folder {run.started_in}, in which it was started, is gone")
    with chdir(run.started_in or "."):
        try:
            own = recorded_config(path, TRAINING)
            config = own.updated({**_OF_A_RERUN, "output": str(folder)})
            check_early(config)
        except UsageError as error:
            raise UsageError(f"{root} cannot run again: {error}") from error
        model = run_directory(own.checkpoint).model.absolute()
    return _Rerun(root, run, starts, folder, config, min(last, until or last), model)


def _run_again(again: _Rerun, metrics: MetricsComparison) -> Difference | None:
    """Run the command in a new process until it ends, or a difference or the last step is reached.

    Raises:
        RunError: the command fails.
        SystemExit: it was interrupted.
    """
    with tempfile.NamedTemporaryFile("w", suffix=".yaml", encoding="utf-8") as file:
        file.write(to_yaml(again.config))
        file.flush()
        words = [sys.executable, "-m", "rlhf_cli", again.run.command, "--config", file.name]
        process = subprocess.Popen(words, cwd=again.run.started_in or None, env=_environment(again.starts[0]))
        with stops_forwarded(process) as is_interrupted:
            last = math.inf if again.is_whole else again.until
            difference, is_stopped = followed(process, again.folder, metrics, last=last)
    if is_interrupted():
        raise SystemExit(INTERRUPTED)
    if process.returncode and not is_stopped:
        raise RunError(f"the repetition in {again.folder} has failed with status {process.returncode}")
    return difference or metrics.first_difference()


def _environment(start: Start) -> dict[str, str]:
    """Return this environment, with the variables of the run that change results and are not set here."""
    recorded = {name: value for name in VARIABLES if isinstance(value := start.facts["machine"].get(name), str)}
    return {**recorded, **os.environ}


def followed(
    process: "subprocess.Popen[bytes]", folder: Path, metrics: MetricsComparison, *, last: float
) -> tuple[Difference | None, bool]:
    """Compare each step until the process ends, and stop it after a difference or step `last`.

    Returns the first difference, and whether the process was stopped.
    """
    difference, is_stopped, seen = None, False, 0
    while process.poll() is None:
        step = seen
        with suppress(ValueError):
            step, _ = last_metrics(folder)
        if step > seen and difference is None:
            # A later evaluation may add metrics to the last step.
            seen, difference = step, metrics.first_difference(before=step)
        # The run then saves a checkpoint and exits.
        if not is_stopped and (difference is not None or seen > last):
            is_stopped = True
            process.send_signal(signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            process.wait(_LOOK_SECONDS)
    return difference, is_stopped


def _explained(again: _Rerun, found: Sequence[Difference]) -> Iterator[str]:
    """Yield the first difference and the likely cause."""
    first = min(difference.step for difference in found)
    yield f"different from {again.run.unit} {first} on"
    yield from (difference.what for difference in found if difference.step == first)
    changed = lock_differences(again.starts, read_lock(again.folder)[0].facts)
    if not changed:
        yield f"both {LOCK_FILE} are equal: {_unexplained(again)}"
        return
    yield f"likely cause: {CAUSES[next(iter(changed))]}"
    for group, phrases in changed.items():
        more = f" and {len(phrases) - _SHOWN} more" if len(phrases) > _SHOWN else ""
        yield f"{group}: {', '.join(phrases[:_SHOWN])}{more}"


def _unexplained(again: _Rerun) -> str:
    """Return what may differ although all recorded facts are equal."""
    if again.starts[0].facts["machine"].get("GPUs"):
        return "GPUs add numbers in varying order, so that runs differ in the last digits"
    return "a reward, an environment or a service may depend on time or chance"
