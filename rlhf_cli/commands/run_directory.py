"""The folder of a run: what may already be in it, and where its parts are."""

import shutil
from dataclasses import dataclass
from pathlib import Path

from rlhf_cli.config.train import CheckpointConfig
from rlhf_cli.errors import UsageError

CONFIG, LOGS, REPORT = "config.yaml", "logs", "report.html"
OF_A_RUN = (CONFIG, "metrics.jsonl", "samples.jsonl", REPORT, LOGS, "tensorboard")


@dataclass(frozen=True)
class RunDirectory:
    """Paths of a run."""

    root: Path
    checkpoints: Path
    model: Path

    @property
    def logs(self) -> Path:
        """Where the output of every process goes."""
        return self.root / LOGS


def run_directory(settings: CheckpointConfig) -> RunDirectory:
    """The paths these settings ask for; nothing is touched."""
    root = Path(settings.output)
    return RunDirectory(
        root=root,
        checkpoints=Path(settings.ckpt_path) if settings.ckpt_path else root / "checkpoints",
        model=Path(settings.save_path) if settings.save_path else root / "model",
    )


def check_run_directory(settings: CheckpointConfig) -> None:
    """Raise UsageError if the run would mix with an earlier one or cannot be written; nothing is touched."""
    paths = run_directory(settings)
    for path in (paths.root, paths.checkpoints, paths.model):
        if path.exists() and not path.is_dir():
            raise UsageError(f"--output: {path} is a file, a folder is needed")
    is_fresh = not settings.load_checkpoint and not settings.overwrite
    if is_fresh and (leftover := _leftovers(paths)):
        raise UsageError(
            f"--output {paths.root} holds an earlier run ({leftover[0].name}): continue it with --load_checkpoint, "
            "replace it with --overwrite, or choose another folder"
        )


def prepare_run_directory(settings: CheckpointConfig, config_yaml: str, *, keep: bool) -> RunDirectory:
    """The run's folder with its settings written down.

    Args:
        keep: whether an earlier run is continued; otherwise what it left is removed.
    """
    paths = run_directory(settings)
    if not keep:
        for path in _leftovers(paths):
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    paths.logs.mkdir(parents=True, exist_ok=True)
    (paths.root / CONFIG).write_text(config_yaml)
    return paths


def _leftovers(paths: RunDirectory) -> list[Path]:
    """What a run has left inside its own folder; folders the user placed elsewhere are never removed."""
    inside = [path for path in (paths.checkpoints, paths.model) if path.is_relative_to(paths.root)]
    return [path for path in [*(paths.root / name for name in OF_A_RUN), *inside] if path.exists()]
