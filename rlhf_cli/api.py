"""Python interface: commands as functions, and run directories as objects.

docs/python.md describes it. Names in `__all__` and of settings keep their meaning within a minor version.
"""

import inspect
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import yaml
from pydantic_core import PydanticUndefined, to_jsonable_python

from rlhf_cli.backends.process.signals import INTERRUPTED, stops_forwarded
from rlhf_cli.command_table import COMMANDS, FUNCTIONS
from rlhf_cli.errors import RunError, UsageError
from rlhf_cli.flags import Flag, describe, flags_of
from rlhf_cli.options import build_config
from rlhf_cli.runs.inference.output_folder import FIGURES
from rlhf_cli.runs.recorded_runs import RecordedRun, read_run
from rlhf_cli.runs.run_directory import recorded_settings
from rlhf_cli.tracking.sinks import EVAL_SAMPLES_FILE, SAMPLES_FILE, read_alarms, read_metrics, read_samples

__all__ = ["Run", "RunError", "UsageError", *FUNCTIONS]


class Run:
    """A run directory, of a run that has ended or is running. Each property reads the files again.

    Raises:
        UsageError: the folder is not a run directory, or its files are broken.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self.status()

    def __repr__(self) -> str:
        run = self.status()
        return f"<{run.command} run {str(self.folder)!r}: {run.state}, {run.unit} {run.step}/{run.total_steps}>"

    def status(self) -> RecordedRun:
        """Return state, progress, last metrics and the command that resumes the run."""
        return read_run(self.folder)

    @property
    def settings(self) -> dict[str, Any]:
        """All settings by name, as in config.yaml."""
        return recorded_settings(self.folder)

    @property
    def metrics(self) -> list[dict[str, float]]:
        """A row per step with the metrics by name and `step`. Evaluations are in the row of their step."""
        return [{"step": step, **found} for step, found in read_metrics(self.folder).items()]

    @property
    def alarms(self) -> list[str]:
        """Messages of the alarms, in order."""
        return read_alarms(self.folder)

    @property
    def model(self) -> Path:
        """Folder of the trained model in Hugging Face format, or of the adapter."""
        save_path = self.settings.get("save_path")
        return Path(self.status().started_in) / save_path if save_path else self.folder / "model"

    @property
    def results(self) -> list[dict[str, Any]]:
        """Results of `eval` per model and dataset, as in eval.json. Raises UsageError for other runs."""
        path = self.folder / FIGURES
        if not path.is_file():
            raise UsageError(f"{path} does not exist: only runs of rlhf eval have results")
        found: list[dict[str, Any]] = json.loads(path.read_text(encoding="utf-8"))["results"]
        return found

    def samples(self) -> Iterator[dict[str, Any]]:
        """Yield the rows of samples.jsonl: responses of online commands, `generate` and `eval`."""
        return read_samples(self.folder / SAMPLES_FILE)

    def eval_samples(self) -> Iterator[dict[str, Any]]:
        """Yield the rows of eval_samples.jsonl: responses of evaluations during training."""
        return read_samples(self.folder / EVAL_SAMPLES_FILE)


def _function(name: str, command: str) -> Callable[..., Run]:
    """Return a function that runs a command with its settings as keyword arguments."""

    def function(**settings: Any) -> Run:
        settings = to_jsonable_python(settings)
        # Before the process starts, so that mistakes are found at once.
        config = build_config(COMMANDS[command].config_class, settings, spelled="{}")
        _run(command, settings)
        return Run(next(group.output for _, group in config if hasattr(group, "output")))

    flags = flags_of(COMMANDS[command].config_class)
    function.__name__ = function.__qualname__ = name
    function.__doc__ = _documentation(command, flags)
    function.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [_parameter(flag) for flag in sorted(flags.values(), key=lambda flag: not flag.required)],
        return_annotation=Run,
    )
    return function


def _parameter(flag: Flag) -> inspect.Parameter:
    default = inspect.Parameter.empty if flag.default is PydanticUndefined else flag.default
    kind: Any = flag.annotation
    annotation = kind | None if flag.optional else kind
    return inspect.Parameter(flag.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def _documentation(command: str, flags: dict[str, Flag]) -> str:
    summary = COMMANDS[command].summary
    lines = [f"    {flag.name}: {flag.help} ({describe(flag)})" for flag in flags.values()]
    return "\n".join(
        [
            f"{summary} Runs `rlhf {command}` in a new process, prints its output, and returns the run.",
            "",
            "Args:",
            *lines,
            "",
            "Raises:",
            "    UsageError: a setting is invalid.",
            "    RunError: the command failed. The message is its last line.",
            "    KeyboardInterrupt: it was interrupted, after it has saved a checkpoint.",
        ]
    )


def _run(command: str, settings: dict[str, Any]) -> None:
    """Run a command in a new process, which releases memory and GPUs when it ends."""
    with tempfile.NamedTemporaryFile("w", suffix=".yaml", encoding="utf-8") as file:
        yaml.safe_dump(settings, file, allow_unicode=True)
        file.flush()
        process = subprocess.Popen(
            [sys.executable, "-m", "rlhf_cli", command, "--config", file.name],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        )
        last = ""
        with stops_forwarded(process):
            assert process.stdout is not None
            # Line by line: a notebook shows what this process prints, not what its children print.
            for line in process.stdout:
                print(line, end="", flush=True)
                last = line.strip() or last
            status = process.wait()
    if status == INTERRUPTED:
        raise KeyboardInterrupt
    if status:
        raise (UsageError if status == 2 else RunError)(last.removeprefix(f"rlhf {command}: "))


globals().update({name: _function(name, command) for name, command in FUNCTIONS.items()})
