"""Checkpoints on disk: written aside, verified, renamed, and only then are older ones removed.

A checkpoint is a folder `step_000020` with whatever its writers put there and a manifest of all files, written
last. Leaves out what is in it: that belongs to the trainers and engines that write it.
"""

import json
import os
import shutil
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlhf_cli.errors import RunError, UsageError

MANIFEST = "manifest.json"
STATE = "state.json"
ASIDE = ".writing"
PROBE_BYTES = 4 << 20  # checked at both ends of a file: whole files of a large model would take minutes


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint on disk."""

    path: Path
    step: int
    state: dict[str, Any]  # what the driver of the run put into `state.json`


class CheckpointStore:
    """The checkpoints of one run. One process of the run writes; all may read."""

    def __init__(
        self,
        root: Path,
        *,
        max_num: int,
        free_bytes: Callable[[Path], int] = lambda path: shutil.disk_usage(path).free,
    ) -> None:
        self._root = root
        self._max_num = max_num
        self._free_bytes = free_bytes

    def steps(self) -> list[int]:
        """Steps of the complete checkpoints, oldest first."""
        manifests = self._root.glob(f"step_*/{MANIFEST}")
        return sorted(int(path.parent.name.removeprefix("step_")) for path in manifests)

    def latest(self) -> Checkpoint | None:
        """The newest complete checkpoint, or None.

        Raises:
            UsageError: it is damaged.
        """
        steps = self.steps()
        if not steps:
            return None
        path = self.path(steps[-1])
        verify(path)
        return Checkpoint(path, steps[-1], json.loads((path / STATE).read_text()))

    def path(self, step: int) -> Path:
        """Where the checkpoint of a step is, or will be."""
        return self._root / f"step_{step:06d}"

    def aside(self) -> Path:
        """Where a checkpoint is while it is being written."""
        return self._root / ASIDE

    def check_space(self, needed_bytes: int) -> None:
        """Raise RunError if the disk has no room for a checkpoint of this size."""
        self._root.mkdir(parents=True, exist_ok=True)
        free = self._free_bytes(self._root)
        if free < needed_bytes:
            raise RunError(
                f"no room for a checkpoint in {self._root}: it takes about {_size(needed_bytes)} and "
                f"{_size(free)} are free; free some space and run the same command with --load_checkpoint "
                f"({self._intact()})"
            )

    @contextmanager
    def writing(self, step: int, state: dict[str, Any], *, needed_bytes: int) -> Iterator[Path]:
        """Fill the folder that is yielded; it becomes the checkpoint of `step` when the block ends well.

        Raises:
            RunError: the disk is full; earlier checkpoints are intact and nothing half-written is left.
        """
        aside = self.aside()
        shutil.rmtree(aside, ignore_errors=True)
        self.check_space(needed_bytes)
        try:
            aside.mkdir(parents=True)
            yield aside
            (aside / STATE).write_text(json.dumps(state))
            seal(aside)
            self._publish(aside, self.path(step))
        except OSError as error:
            shutil.rmtree(aside, ignore_errors=True)
            raise RunError(f"the checkpoint of step {step} could not be written: {error} ({self._intact()})") from error
        except BaseException:
            shutil.rmtree(aside, ignore_errors=True)
            raise
        for old in self.steps()[: -self._max_num]:
            shutil.rmtree(self.path(old))

    def clear(self) -> None:
        """Remove every checkpoint."""
        shutil.rmtree(self._root, ignore_errors=True)

    def _publish(self, aside: Path, path: Path) -> None:
        shutil.rmtree(path, ignore_errors=True)  # a step is written twice only after an incomplete one
        aside.rename(path)
        _sync(self._root)

    def _intact(self) -> str:
        steps = self.steps()
        return f"the checkpoint of step {steps[-1]} is intact" if steps else "there is no earlier checkpoint"


def seal(directory: Path) -> None:
    """Write the manifest of every file below `directory` and force all of it to disk."""
    files = sorted(path for path in directory.rglob("*") if path.is_file())
    entries = {str(path.relative_to(directory)): [path.stat().st_size, _probe(path)] for path in files}
    (directory / MANIFEST).write_text(json.dumps(entries))
    for path in [*files, directory / MANIFEST, *(p for p in directory.rglob("*") if p.is_dir()), directory]:
        _sync(path)


def verify(directory: Path) -> None:
    """Raise UsageError naming the first file that is not as it was written."""
    entries = json.loads((directory / MANIFEST).read_text())
    for name, (size, probe) in entries.items():
        path = directory / name
        if not path.is_file():
            problem = "is missing"
        elif path.stat().st_size != size:
            problem = f"has {path.stat().st_size} bytes instead of {size}"
        elif _probe(path) != probe:
            problem = "has other contents than were written"
        else:
            continue
        raise UsageError(
            f"checkpoint {directory} is damaged: {name} {problem}; remove that folder to continue from an older one"
        )


def check_same_run(checkpoint: Checkpoint, identity: dict[str, Any]) -> None:
    """Raise UsageError if the checkpoint was written by a run with another identity.

    Args:
        identity: what must be equal for continuing to make sense, such as command, model and number of ranks.
    """
    written = checkpoint.state["identity"]
    for name, value in identity.items():
        if written.get(name) != value:
            raise UsageError(
                f"checkpoint {checkpoint.path} belongs to another run: its {name} is {written.get(name)!r}, "
                f"not {value!r}; use another --output, or --overwrite to start again"
            )


def _probe(path: Path) -> int:
    with path.open("rb") as file:
        checksum = zlib.crc32(file.read(PROBE_BYTES))
        if path.stat().st_size > PROBE_BYTES:
            file.seek(-PROBE_BYTES, os.SEEK_END)
            checksum = zlib.crc32(file.read(), checksum)
    return checksum


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:.2f} GB" if num_bytes >= 1e7 else f"{num_bytes / 1e6:.2f} MB"
