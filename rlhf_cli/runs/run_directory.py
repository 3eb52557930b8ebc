"""Run directory: paths, checks of existing content, and cleanup."""

import itertools
import json
import os
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, chdir, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlhf_cli.backends.cluster.placement import ENGINE, JUDGE
from rlhf_cli.backends.process.output_lock import model_lock, output_lock
from rlhf_cli.backends.training.checkpoint import CheckpointStore
from rlhf_cli.command_table import COMMANDS
from rlhf_cli.config.roles import ROLES
from rlhf_cli.config.train import CheckpointConfig
from rlhf_cli.errors import UsageError, listed
from rlhf_cli.options import build_config
from rlhf_cli.settings_file import read_yaml
from rlhf_cli.tracking.sinks import INDEX_FILES, PLAN_FILE, RUN_FILE, SINKS, files_of

CONFIG, LOGS, REPORT, _BEST, _EMA = "config.yaml", "logs", "report.html", "best", "ema"
LOCK_FILE = "run.lock"
NOT_REPEATED = ("time/", "perf/", "memory/", "eval/")
"""Prefixes of metrics that a repeated step does not repeat: measurements, and evaluations, which it leaves out."""
# In `_BEST`: metric, value and iteration.
BEST_FILE = "best.json"
_ERRORS = ("error.log", "error_rank*.log")
_OF_A_RUN = (CONFIG, LOCK_FILE, RUN_FILE, PLAN_FILE, REPORT, _BEST, _EMA, *files_of(SINKS), *INDEX_FILES)
_OF_A_MODEL = ("config.json", "adapter_config.json")
_OWN_LOG = re.compile(rf"(driver|rank\d+|({'|'.join((*ROLES, ENGINE, JUDGE))})-\d+)\.log")
"""Names of the logs written by runs. Other programs may use the folder too, such as Slurm with `logs/slurm-%j.out`."""


@dataclass(frozen=True)
class RunDirectory:
    """Paths in a run."""

    root: Path
    checkpoints: Path
    model: Path

    @property
    def logs(self) -> Path:
        """Folder with the logs of all processes."""
        return self.root / LOGS

    @property
    def best(self) -> Path:
        """Folder with the best model by evaluation."""
        return self.root / _BEST

    @property
    def ema(self) -> Path:
        """Folder with the moving average of the weights."""
        return self.root / _EMA

    def log_of_rank(self, rank: int) -> Path:
        """Return a rank's log file."""
        return self.logs / f"rank{rank}.log"


def run_directory(settings: CheckpointConfig) -> RunDirectory:
    """Return the paths for these settings. Creates nothing."""
    root = Path(settings.output)
    return RunDirectory(
        root=root,
        checkpoints=Path(settings.ckpt_path) if settings.ckpt_path else root / "checkpoints",
        model=Path(settings.save_path) if settings.save_path else root / "model",
    )


def check_run_directory(settings: CheckpointConfig) -> None:
    """Raise UsageError if the run would mix with an earlier run or overwrite other files. Changes nothing.

    A folder that contains only logs does not count as an earlier run: ranks create logs as soon as they start, and a
    run that fails during startup leaves nothing else.
    """
    paths = run_directory(settings)
    for path in (paths.root, paths.checkpoints, paths.model):
        if path.exists() and not path.is_dir():
            raise UsageError(f"--output: {path} is a file, not a folder")
    # Saving replaces the folder, so it must not contain anything else.
    if _is_used(paths.model) and not any((paths.model / name).is_file() for name in _OF_A_MODEL):
        raise UsageError(
            f"the model cannot be saved in {paths.model}, which contains other files: choose another --save_path"
        )
    # A traceback of a failed start is not a run.
    left = [path for path in _leftovers(paths) if path not in _errors(paths)]
    existing = [*left, *_steps(paths), *([paths.model] if _is_used(paths.model) else [])]
    models = [*([paths.model] if _is_used(paths.model) else []), *([paths.best] if _is_trained(paths.best) else [])]
    if settings.load_checkpoint and models and not _steps(paths):
        raise UsageError(
            f"--load_checkpoint: {models[0]} contains a trained model, but there is no checkpoint in "
            f"{paths.checkpoints} to resume from; start again with --overwrite, or choose another --output"
        )
    inside = [path for path in existing if path.is_relative_to(paths.root)]
    # Protects a folder that is not a run, such as one with another program's config.yaml.
    if inside and settings.overwrite and not (paths.root / RUN_FILE).is_file():
        raise UsageError(
            f"--overwrite: {paths.root} contains {inside[0].name}, but no {RUN_FILE}, which every run has: "
            "choose another --output, or remove the folder manually"
        )
    if existing and not settings.load_checkpoint and not settings.overwrite:
        raise UsageError(
            f"--output {paths.root} contains an earlier run ({existing[0].name}): resume it with --load_checkpoint, "
            "replace it with --overwrite, or choose another folder"
        )


def recorded_command(root: Path, *, source: str) -> str:
    """Return the command of a run. Raises UsageError, which names `source`, if the folder is not a run directory."""
    return str(_recorded_facts(root, source=source)["command"])


def _recorded_facts(root: Path, *, source: str) -> dict[str, Any]:
    """Return run.json, which has a command."""
    try:
        facts: dict[str, Any] = json.loads((root / RUN_FILE).read_text(encoding="utf-8"))
        return {"command": facts["command"], **facts}
    except (OSError, ValueError, KeyError):
        raise UsageError(f"{source}: not a run directory, it has no readable {RUN_FILE}") from None


@contextmanager
def folder_of_start(root: Path) -> Iterator[Path]:
    """Work in the folder in which a run was started, if it still exists: the paths in its settings are relative to it.

    Yields the run directory as it is called from there. Raises UsageError if it is none.
    """
    folder = Path(_recorded_facts(root, source=str(root)).get("folder") or "")
    if not folder.is_dir() or folder.samefile("."):
        yield root
        return
    path = root.absolute()
    with chdir(folder):
        yield path


def recorded_settings(root: Path) -> dict[str, Any]:
    """Return config.yaml of a run or an evaluation by name, not validated. Raises UsageError if it is unreadable."""
    return read_yaml(root / CONFIG, named=str(root / CONFIG))


def recorded_config(root: Path, commands: Sequence[str], changes: Mapping[str, object] | None = None) -> Any:
    """Return the settings of a run of one of these commands, with changes. Raises UsageError if they are invalid."""
    command = recorded_command(root, source=str(root))
    if command not in commands:
        raise UsageError(f"{root} is a run of rlhf {command}, not of {listed(commands, 'or')}")
    values = {**recorded_settings(root), **(changes or {})}
    config = build_config(COMMANDS[command].config_class, values, spelled="{}")
    # The folder may have been moved since.
    return config.updated({"output": str(root)})


@contextmanager
def held_output(settings: CheckpointConfig) -> Iterator[None]:
    """Lock all folders of the run. Raises UsageError if another run uses one, or has left files there."""
    paths = run_directory(settings)
    with ExitStack() as stack:
        stack.enter_context(output_lock(paths.root))
        if not paths.checkpoints.resolve().is_relative_to(paths.root.resolve()):
            stack.enter_context(output_lock(paths.checkpoints, flag="--ckpt_path"))
        if not paths.model.resolve().is_relative_to(paths.root.resolve()):
            stack.enter_context(model_lock(paths.model, flag="--save_path"))
        # Check again, because another run may have started and finished before the locks were acquired.
        check_run_directory(settings)
        yield


def check_not_replaced(settings: CheckpointConfig, *models: str) -> None:
    """Raise UsageError if --overwrite would remove a model from which this run starts."""
    if not settings.overwrite:
        return
    paths = run_directory(settings)
    replaced = [path.resolve() for path in (*_leftovers(paths), paths.checkpoints)]
    for model in models:
        folder = Path(model).expanduser().resolve()
        if folder == paths.root.resolve() or any(folder.is_relative_to(path) for path in replaced):
            raise UsageError(f"--overwrite would remove {model!r}, from which this run starts: choose another --output")


def prepare_run_directory(
    settings: CheckpointConfig, config_yaml: str, *, keep: bool, num_ranks: int | None = None
) -> RunDirectory:
    """Prepare the run directory and write the settings. Call it in one process, after the models are built.

    Args:
        settings: checkpoint settings.
        config_yaml: settings to write.
        keep: whether to resume an earlier run; otherwise the earlier files are removed.
        num_ranks: number of ranks that are already writing logs, which are kept; None keeps all logs.
    """
    # Not before the models are built: a run that fails during startup must not delete an earlier run.
    paths = run_directory(settings)
    if not keep:
        old_logs = [] if num_ranks is None else _old_logs(paths, num_ranks)
        remove([*_leftovers(paths), *old_logs])
        CheckpointStore(paths.checkpoints, max_num=1).clear()
    paths.logs.mkdir(parents=True, exist_ok=True)
    (paths.root / CONFIG).write_text(config_yaml)
    return paths


def begin_log(paths: RunDirectory, rank: int, *, keep: bool) -> Path:
    """Return this rank's log file. Unless resuming, an earlier run's log is removed."""
    log = paths.log_of_rank(rank)
    if not keep:
        log.unlink(missing_ok=True)
    return log


def begin_logs(paths: RunDirectory, *, keep: bool) -> None:
    """Create the log folder. Unless resuming, an earlier run's logs are removed."""
    if not keep:
        remove(_old_logs(paths, num_ranks=0))
    paths.logs.mkdir(parents=True, exist_ok=True)


def set_later_best_aside(paths: RunDirectory, *, known: int | None) -> Path | None:
    """Rename the best model if it is newer than the checkpoint to resume. Returns the new path.

    A run that is killed between an evaluation and the next checkpoint leaves such a model. The resumed run compares
    with the checkpoint's best value, and could replace this model by a worse one.

    Args:
        paths: paths of the run.
        known: iteration of the best model according to the checkpoint.
    """
    iteration = _iteration_of(paths.best)
    if iteration is None or (known is not None and iteration <= known):
        return None
    endings = itertools.chain([""], (f".{number}" for number in itertools.count(2)))
    named = (paths.root / f"{_BEST}.after_{iteration}{ending}" for ending in endings)
    aside = next(path for path in named if not path.exists())
    paths.best.rename(aside)
    return aside


def _leftovers(paths: RunDirectory) -> list[Path]:
    """Return an earlier run's files, except logs and checkpoints. A model in another folder stays until replaced."""
    own_model = [paths.model] if paths.model.is_relative_to(paths.root) else []
    named = [
        *(paths.root / name for name in _OF_A_RUN),
        *paths.root.glob(f"{_BEST}.after_*"),
        *_errors(paths),
        *own_model,
    ]
    # `lexists` also finds broken links.
    return [path for path in named if os.path.lexists(path)]


def _errors(paths: RunDirectory) -> list[Path]:
    """Return files with tracebacks of unexpected errors."""
    return [path for pattern in _ERRORS for path in paths.root.glob(pattern)]


def _steps(paths: RunDirectory) -> list[Path]:
    store = CheckpointStore(paths.checkpoints, max_num=1)
    return [store.path(step) for step in store.steps()]


def _old_logs(paths: RunDirectory, num_ranks: int) -> list[Path]:
    in_use = {paths.log_of_rank(rank) for rank in range(num_ranks)}
    return [log for log in own_logs(paths.logs) if log not in in_use]


def own_logs(folder: Path) -> list[Path]:
    """Return the logs in the folder that were written by runs."""
    return [path for path in folder.glob("*.log") if _OWN_LOG.fullmatch(path.name)]


def remove(paths: Iterable[Path]) -> None:
    """Remove files, folders and symbolic links, but not link targets."""
    for path in paths:
        # Never follow links: their targets may belong to the user.
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)


def _is_trained(best: Path) -> bool:
    """Return whether there is a best model other than the initial model."""
    return (_iteration_of(best) or 0) > 0


def _iteration_of(best: Path) -> int | None:
    """Return the iteration of the best model; None if there is none."""
    record = best / BEST_FILE
    return int(json.loads(record.read_text())["iteration"]) if record.is_file() else None


def _is_used(path: Path) -> bool:
    return path.is_dir() and any(path.iterdir())
