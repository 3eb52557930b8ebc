"""The folder of a run: its allowed contents and the paths of its parts."""

import itertools
import json
import os
import re
import shutil
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from rlhf_cli.backends.cluster.placement import ENGINE
from rlhf_cli.backends.process.output_lock import model_lock, output_lock
from rlhf_cli.backends.training.checkpoint import CheckpointStore
from rlhf_cli.config.roles import ROLES
from rlhf_cli.config.train import CheckpointConfig
from rlhf_cli.errors import UsageError

CONFIG, LOGS, REPORT, BEST, EMA = "config.yaml", "logs", "report.html", "best", "ema"
BEST_FILE = "best.json"  # in `BEST`: the metric, its value, and after which iteration
ERRORS = ("error.log", "error_rank*.log")
RUN_FILE = "run.json"
OF_A_RUN = (
    CONFIG,
    RUN_FILE,
    "metrics.jsonl",
    "samples.jsonl",
    "eval_samples.jsonl",
    "sample_images",
    REPORT,
    BEST,
    EMA,
    "tensorboard",
)
OF_A_MODEL = ("config.json", "adapter_config.json")
OWN_LOG = re.compile(rf"(driver|rank\d+|({'|'.join((*ROLES, ENGINE))})-\d+)\.log")
"""Names of the logs that runs write. Other programs may write into the folder too: Slurm's `logs/slurm-%j.out`."""


@dataclass(frozen=True)
class RunDirectory:
    """Paths of a run."""

    root: Path
    checkpoints: Path
    model: Path

    @property
    def logs(self) -> Path:
        """The folder for the output of every process."""
        return self.root / LOGS

    @property
    def best(self) -> Path:
        """The folder of the best model by evaluation."""
        return self.root / BEST

    @property
    def ema(self) -> Path:
        """The folder of the moving average of the weights."""
        return self.root / EMA

    def log_of_rank(self, rank: int) -> Path:
        """Return the file for the output of one rank."""
        return self.logs / f"rank{rank}.log"


def run_directory(settings: CheckpointConfig) -> RunDirectory:
    """Return the paths these settings ask for; nothing is touched."""
    root = Path(settings.output)
    return RunDirectory(
        root=root,
        checkpoints=Path(settings.ckpt_path) if settings.ckpt_path else root / "checkpoints",
        model=Path(settings.save_path) if settings.save_path else root / "model",
    )


def check_run_directory(settings: CheckpointConfig) -> None:
    """Raise UsageError if the run would mix with an earlier one or destroy something; nothing is touched.

    Logs alone are no earlier run: the ranks of this one write theirs as soon as they start, and one that could not be
    built leaves nothing else.
    """
    paths = run_directory(settings)
    for path in (paths.root, paths.checkpoints, paths.model):
        if path.exists() and not path.is_dir():
            raise UsageError(f"--output: {path} is a file, a folder is needed")
    if _is_used(paths.model) and not any((paths.model / name).is_file() for name in OF_A_MODEL):
        raise UsageError(
            f"{paths.model} cannot take the model, because it holds other things: choose another --save_path"
        )
    left = [path for path in _leftovers(paths) if path not in _errors(paths)]
    found = [*left, *_steps(paths), *([paths.model] if _is_used(paths.model) else [])]
    models = [*([paths.model] if _is_used(paths.model) else []), *([paths.best] if _is_trained(paths.best) else [])]
    if settings.load_checkpoint and models and not _steps(paths):
        raise UsageError(
            f"--load_checkpoint: {models[0]} holds a trained model and there is no checkpoint in "
            f"{paths.checkpoints} to continue from; train anew with --overwrite, or choose another --output"
        )
    inside = [path for path in found if path.is_relative_to(paths.root)]
    if inside and settings.overwrite and not (paths.root / RUN_FILE).is_file():
        raise UsageError(
            f"--overwrite: {paths.root} holds {inside[0].name}, but no {RUN_FILE}, which every run has: "
            "choose another --output, or remove it by hand"
        )
    if found and not settings.load_checkpoint and not settings.overwrite:
        raise UsageError(
            f"--output {paths.root} holds an earlier run ({found[0].name}): continue it with --load_checkpoint, "
            "replace it with --overwrite, or choose another folder"
        )


@contextmanager
def held_output(settings: CheckpointConfig) -> Iterator[None]:
    """Hold the run's folders for this run alone. Raise UsageError if another run has one, or has left its files there.

    They are checked again once they are held: another run may have begun and ended since the first check.
    """
    paths = run_directory(settings)
    with ExitStack() as stack:
        stack.enter_context(output_lock(paths.root))
        if not paths.checkpoints.resolve().is_relative_to(paths.root.resolve()):
            stack.enter_context(output_lock(paths.checkpoints, flag="--ckpt_path"))
        if not paths.model.resolve().is_relative_to(paths.root.resolve()):
            stack.enter_context(model_lock(paths.model, flag="--save_path"))
        check_run_directory(settings)
        yield


def check_not_replaced(settings: CheckpointConfig, *models: str) -> None:
    """Raise UsageError for a model to start from that lies in the earlier run which this one is to replace."""
    if not settings.overwrite:
        return
    paths = run_directory(settings)
    replaced = [path.resolve() for path in (*_leftovers(paths), paths.checkpoints)]
    for model in models:
        folder = Path(model).expanduser().resolve()
        if folder == paths.root.resolve() or any(folder.is_relative_to(path) for path in replaced):
            raise UsageError(f"--overwrite would remove {model!r}, which this run starts from: choose another --output")


def prepare_run_directory(
    settings: CheckpointConfig, config_yaml: str, *, keep: bool, num_ranks: int | None = None
) -> RunDirectory:
    """Return the run's folder with its settings written. One process of the run calls it once the models are built.

    It is not called earlier: a run that cannot be built must not cost an earlier run.

    Args:
        keep: whether an earlier run is continued; otherwise its files are removed.
        num_ranks: ranks that are already writing their logs, which stay; None if all logs are this run's.
    """
    paths = run_directory(settings)
    if not keep:
        old_logs = [] if num_ranks is None else _old_logs(paths, num_ranks)
        remove([*_leftovers(paths), *old_logs])
        CheckpointStore(paths.checkpoints, max_num=1).clear()
    paths.logs.mkdir(parents=True, exist_ok=True)
    (paths.root / CONFIG).write_text(config_yaml)
    return paths


def begin_log(paths: RunDirectory, rank: int, *, keep: bool) -> Path:
    """Return this rank's log file, without the lines of an earlier run unless that run is continued."""
    log = paths.log_of_rank(rank)
    if not keep:
        log.unlink(missing_ok=True)
    return log


def begin_logs(paths: RunDirectory, *, keep: bool) -> None:
    """Make room for the logs of all processes: remove an earlier run's unless that run is continued."""
    if not keep:
        remove(_old_logs(paths, num_ranks=0))
    paths.logs.mkdir(parents=True, exist_ok=True)


def set_later_best_aside(paths: RunDirectory, *, known: int | None) -> Path | None:
    """Rename the best model if the checkpoint that is continued does not know it yet; return its new path.

    A run that was killed between an evaluation and its checkpoint leaves such a model. The continued run compares with
    the best value of the checkpoint, and may never be as good as that model.

    Args:
        known: the iteration of the best model that the checkpoint knows.
    """
    iteration = _iteration_of(paths.best)
    if iteration is None or (known is not None and iteration <= known):
        return None
    endings = itertools.chain([""], (f".{number}" for number in itertools.count(2)))
    named = (paths.root / f"{BEST}.after_{iteration}{ending}" for ending in endings)
    aside = next(path for path in named if not path.exists())
    paths.best.rename(aside)
    return aside


def _leftovers(paths: RunDirectory) -> list[Path]:
    """Return the files of an earlier run besides logs and checkpoints. A model elsewhere stays until replaced."""
    own_model = [paths.model] if paths.model.is_relative_to(paths.root) else []
    named = [
        *(paths.root / name for name in OF_A_RUN),
        *paths.root.glob(f"{BEST}.after_*"),
        *_errors(paths),
        *own_model,
    ]
    return [path for path in named if os.path.lexists(path)]


def _errors(paths: RunDirectory) -> list[Path]:
    """Return the traces of unexpected errors."""
    return [path for pattern in ERRORS for path in paths.root.glob(pattern)]


def _steps(paths: RunDirectory) -> list[Path]:
    store = CheckpointStore(paths.checkpoints, max_num=1)
    return [store.path(step) for step in store.steps()]


def _old_logs(paths: RunDirectory, num_ranks: int) -> list[Path]:
    in_use = {paths.log_of_rank(rank) for rank in range(num_ranks)}
    return [log for log in own_logs(paths.logs) if log not in in_use]


def own_logs(folder: Path) -> list[Path]:
    """Return the logs in the folder that a run of this program wrote."""
    return [path for path in folder.glob("*.log") if OWN_LOG.fullmatch(path.name)]


def remove(paths: Iterable[Path]) -> None:
    """Remove files, folders and symbolic links; the target of a link stays."""
    for path in paths:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)


def _is_trained(best: Path) -> bool:
    """Return whether the best model is there, and is not the model that training began with."""
    return (_iteration_of(best) or 0) > 0


def _iteration_of(best: Path) -> int | None:
    """Return the iteration after which the best model was saved; None if there is no best model."""
    record = best / BEST_FILE
    return int(json.loads(record.read_text())["iteration"]) if record.is_file() else None


def _is_used(path: Path) -> bool:
    return path.is_dir() and any(path.iterdir())
