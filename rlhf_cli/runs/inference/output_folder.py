"""The folder of a generation or an evaluation: its allowed contents, its identity, and the finished rows in it."""

import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from rlhf_cli.backends.training.checkpoint import differences
from rlhf_cli.config.generate import AnswersOutputConfig
from rlhf_cli.errors import UsageError
from rlhf_cli.runs.run_directory import CONFIG, LOGS, own_logs, remove

SAMPLES, SELECTED, FIGURES, IDENTITY = "samples.jsonl", "selected.jsonl", "eval.json", "generation.json"
WHOLE_MODEL = ".whole_model"
"""Folder of a model that is there only while engines need it."""
LEFTOVERS = (SAMPLES, SELECTED, FIGURES, "metrics.jsonl", "run.json", CONFIG, "error.log", IDENTITY)
BLOCK = 1 << 20


@dataclass(frozen=True)
class Chunks:
    """Prompts in chunks of the same size, the last one smaller, each with some samples per prompt."""

    num_prompts: int
    size: int
    num_samples: int

    def __len__(self) -> int:
        return -(-self.num_prompts // self.size)

    def bounds(self, number: int) -> tuple[int, int]:
        """Return the first prompt of chunk `number`, from 0, and the one after its last."""
        return number * self.size, min((number + 1) * self.size, self.num_prompts)

    def whole(self, num_rows: int) -> int:
        """Return the chunks whose rows are all among the first `num_rows`."""
        if num_rows >= self.num_prompts * self.num_samples:
            return len(self)
        return num_rows // (self.size * self.num_samples)


@contextmanager
def answers_folder(output: str | None) -> Iterator[Path]:
    """Yield the folder of that name; without a name, a folder that is gone after the block."""
    if output is not None:
        yield Path(output)
        return
    root, is_needed = Path(tempfile.mkdtemp(prefix="rlhf-")), False
    try:
        yield root
    except Exception as error:
        is_needed = not isinstance(error, UsageError)
        raise
    finally:
        if not is_needed:
            shutil.rmtree(root)


def check_folder(root: Path, out: AnswersOutputConfig) -> None:
    """Raise UsageError if the responses would mix with something else in their folder; nothing is touched."""
    if root.exists() and not root.is_dir():
        raise UsageError(f"--output: {root} is a file, a folder is needed")
    if not (root / IDENTITY).exists():
        found = next((name for name in (CONFIG, SAMPLES, SELECTED) if (root / name).exists()), None)
        if found is not None:
            raise UsageError(f"--output {root} holds other things ({found}): choose a folder of its own")
    elif not out.load_checkpoint and not out.overwrite:
        raise UsageError(
            f"--output {root} holds earlier responses: continue them with --load_checkpoint, replace them with "
            "--overwrite, or choose another folder"
        )


def rows_done(root: Path, out: AnswersOutputConfig, identity: Mapping[str, object]) -> int | None:
    """Return the number of responses in the folder; None if no run is continued.

    Raises:
        UsageError: the responses were made with other settings; the message names the differences.
    """
    file = root / IDENTITY
    if not out.load_checkpoint or not file.exists():
        return None
    if found := differences(json.loads(file.read_text(encoding="utf-8")), identity):
        raise UsageError(
            f"--output {root} holds responses of other settings: {found}; use another --output, or --overwrite to "
            "start again"
        )
    return num_lines(root / SAMPLES)


def num_lines(path: Path) -> int:
    """Return the number of complete lines of a file, 0 if it does not exist. A torn last line does not count."""
    if not path.exists():
        return 0
    with path.open("rb") as file:
        return sum(block.count(b"\n") for block in iter(lambda: file.read(BLOCK), b""))


def prepare_folder(root: Path, config_yaml: str, identity: Mapping[str, object], *, keep: bool) -> None:
    """Make the folder, write the settings and the identity, and remove earlier contents unless they are kept.

    A whole model that a killed run has left for its engines is always removed.
    """
    if (root / WHOLE_MODEL).exists():
        shutil.rmtree(root / WHOLE_MODEL)
    if not keep:
        remove([*(root / name for name in LEFTOVERS), *own_logs(root / LOGS)])
    (root / LOGS).mkdir(parents=True, exist_ok=True)
    temporary = root / f"{IDENTITY}.tmp"
    temporary.write_text(json.dumps(identity, indent=2) + "\n", encoding="utf-8")
    os.replace(temporary, root / IDENTITY)
    (root / CONFIG).write_text(config_yaml, encoding="utf-8")
