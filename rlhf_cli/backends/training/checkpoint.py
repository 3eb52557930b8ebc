"""Atomic checkpoints: written to a temporary folder, verified, renamed, and only then are old ones removed.

A checkpoint is a folder such as `step_000020`. Trainers and engines define the content; a manifest of all files is
written last.
"""

import json
import logging
import math
import os
import shutil
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import uuid4

from rlhf_cli.errors import RunError, UsageError

MANIFEST = "manifest.json"
_STATE = "state.json"
_ASIDE = ".writing"
_REMOVED = ".removing"
# Checksum only this much at both ends of a file: complete files of a large model would take minutes.
_PROBE_BYTES = 4 << 20
# Longer values, such as hashes, are useless in an error message.
_SHOWN_CHARACTERS = 30
_SHOWN_DIFFERENCES = 5

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint on disk."""

    path: Path
    step: int
    # Content of `state.json`, written by the driver.
    state: dict[str, Any]


class CheckpointStore:
    """The checkpoints of a run. Only one process may write; all processes may read."""

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
        """List the steps of all complete checkpoints, oldest first."""
        # Complete means that there is a manifest, which is written last.
        names = [path.parent.name.removeprefix("step_") for path in self._root.glob(f"step_*/{MANIFEST}")]
        return sorted(int(name) for name in names if name.isdigit())

    def latest(self, *, at_most: float = math.inf) -> Checkpoint | None:
        """Return the latest complete checkpoint up to a step, or None.

        Raises:
            UsageError: the checkpoint is damaged.
        """
        steps = [step for step in self.steps() if step <= at_most]
        if not steps:
            return None
        path = self.path(steps[-1])
        verify(path)
        return Checkpoint(path, steps[-1], json.loads((path / _STATE).read_bytes()))

    def path(self, step: int) -> Path:
        """Return the checkpoint folder for a step, which may not exist."""
        return self._root / f"step_{step:06d}"

    def check_space(self, needed_bytes: int) -> None:
        """Raise RunError if the disk has less than `needed_bytes` free."""
        free = self._free_bytes(self._root)
        if free < needed_bytes:
            raise RunError(
                f"not enough disk space for a checkpoint in {self._root}: about {_size(needed_bytes)} needed, "
                f"{_size(free)} free; free some space and run the same command with --load_checkpoint "
                f"({self._intact()})"
            )

    @contextmanager
    def writing(self, step: int, state: dict[str, Any], *, needed_bytes: int) -> Iterator[Path]:
        """Yield a temporary folder to fill. When the block ends without an error, it becomes the checkpoint of `step`.

        Raises:
            RunError: writing failed, for example because the disk is full. Earlier checkpoints are intact, and the
                incomplete one is removed.
        """
        aside = self._begin(step, needed_bytes)
        try:
            yield aside
            (aside / _STATE).write_text(json.dumps(state))
            _seal(aside)
            self._publish(aside, self.path(step))
        # torch.save reports a full disk as RuntimeError.
        except (OSError, RuntimeError) as error:
            raise self._failure(step, error) from error
        except BaseException:
            self._remove_left_over()
            raise
        # Only after publishing: an error before this point must leave the earlier checkpoints.
        for old in self.steps()[: -self._max_num]:
            try:
                self._drop(self.path(old))
            except OSError as error:
                logger.warning("the checkpoint of step %d could not be removed: %s", old, error)

    def clear(self) -> None:
        """Remove all checkpoints, but no other files in the folder."""
        for step in self.steps():
            self._drop(self.path(step))
        self._remove_left_over()

    def _begin(self, step: int, needed_bytes: int) -> Path:
        """Create a temporary folder for a checkpoint."""
        self._remove_left_over()
        # A unique name: a surviving rank of a killed run may still write to an older temporary folder.
        aside = self._root / f"{_ASIDE}-{uuid4().hex[:8]}"
        try:
            self._root.mkdir(parents=True, exist_ok=True)
            self.check_space(needed_bytes)
            aside.mkdir()
        except OSError as error:
            raise self._failure(step, error) from error
        return aside

    def _remove_left_over(self) -> None:
        """Remove folders from interrupted writes and removals."""
        # Safe because the run holds the output lock, so no other run uses this folder.
        for pattern in (f"{_ASIDE}*", f"{_REMOVED}*"):
            for left_over in self._root.glob(pattern):
                shutil.rmtree(left_over, ignore_errors=True)

    def _failure(self, step: int, error: Exception) -> RunError:
        """Remove the incomplete checkpoint and return the error to raise."""
        # Measure free space before removing files: the removal would hide a full disk.
        free = f"{_size(self._free_bytes(self._root))} were free in" if self._root.is_dir() else "there is no"
        self._remove_left_over()
        return RunError(
            f"the checkpoint of step {step} could not be written: {error} ({free} {self._root}; {self._intact()})"
        )

    def _publish(self, aside: Path, path: Path) -> None:
        # The step already exists only if a run has resumed from an older checkpoint.
        self._drop(path)
        aside.rename(path)
        # Sync the parent folder too: otherwise, a power failure could undo the rename.
        _sync(self._root)

    def _drop(self, path: Path) -> None:
        """Remove a checkpoint."""
        # Rename first: if the process is killed during the removal, no checkpoint with missing files remains. The name
        # is unique, because files that cannot be removed, such as another user's, must not block later removals.
        if path.exists():
            removed = self._root / f"{_REMOVED}-{uuid4().hex[:8]}"
            path.rename(removed)
            shutil.rmtree(removed, ignore_errors=True)

    def _intact(self) -> str:
        steps = self.steps()
        return f"the checkpoint of step {steps[-1]} is intact" if steps else "there is no earlier checkpoint"


def _seal(directory: Path) -> None:
    """Write a manifest of all files in `directory` and sync everything to disk."""
    files = sorted(path for path in directory.rglob("*") if path.is_file())
    entries = {str(path.relative_to(directory)): [path.stat().st_size, _probe(path)] for path in files}
    (directory / MANIFEST).write_text(json.dumps(entries))
    for path in [*files, directory / MANIFEST, *(p for p in directory.rglob("*") if p.is_dir()), directory]:
        _sync(path)


def verify(directory: Path) -> None:
    """Raise UsageError for the first file that differs from the manifest."""
    for name, (size, probe) in _entries(directory).items():
        if problem := _problem(directory / name, size, probe):
            raise _damage(directory, name, problem)


def _damage(directory: Path, name: str, problem: str) -> UsageError:
    return UsageError(
        f"checkpoint {directory} is damaged: {name} {problem}; remove that folder to continue from an older one"
    )


def _entries(directory: Path) -> dict[str, tuple[int, int]]:
    """Read size and checksum of each file from the manifest."""
    try:
        entries = json.loads((directory / MANIFEST).read_bytes())
        return {name: (int(size), int(probe)) for name, (size, probe) in entries.items()}
    except (ValueError, TypeError, AttributeError) as error:
        raise _damage(directory, MANIFEST, "cannot be read") from error


def _problem(path: Path, size: int, probe: int) -> str | None:
    if not path.is_file():
        return "is missing"
    if path.stat().st_size != size:
        return f"has {path.stat().st_size} bytes instead of {size}"
    return None if _probe(path) == probe else "has changed since it was written"


def check_same_run(
    checkpoint: Checkpoint, identity: Mapping[str, object], defaults: Mapping[str, object], *, repeats: bool = False
) -> None:
    """Raise UsageError if the checkpoint belongs to a run with a different identity.

    Args:
        checkpoint: the checkpoint to resume.
        identity: values that must match for resuming, such as command, weights and batch size.
        defaults: default by setting name, as JSON values.
        repeats: whether steps of the run are repeated, with its own settings and output folder.
    """
    written = checkpoint.state.get("identity", {})
    # A setting that is missing in the checkpoint is newer than the checkpoint, which behaved like the default. The new
    # version can resume it if the setting has the default, or None for an unused role or adapter.
    newer = {name for name, value in identity.items() if name not in written and value in (None, defaults.get(name))}
    current = {name: value for name, value in identity.items() if name not in newer}
    if changes := differences(written, current):
        if repeats:
            raise UsageError(
                f"the run cannot be repeated from {checkpoint.path}: {changes}; restore what has changed since then"
            )
        settings = checkpoint.path.parent.parent / "config.yaml"
        # Defaults change between versions; the run directory records the old ones.
        are_settings = all(name in defaults for name, value in current.items() if _differs(name, written, value))
        way = f"continue with --config {settings}, or " if are_settings and settings.is_file() else ""
        raise UsageError(
            f"checkpoint {checkpoint.path} belongs to another run: {changes}; {way}use another --output, or "
            "--overwrite to start again"
        )


def differences(written: Mapping[str, object], identity: Mapping[str, object]) -> str:
    """Describe the first differing entries, without long values; "" if all entries match."""
    clauses = [_difference(name, written, value) for name, value in identity.items() if _differs(name, written, value)]
    more = [f"{len(clauses) - _SHOWN_DIFFERENCES} further differences"] if len(clauses) > _SHOWN_DIFFERENCES else []
    return "; ".join([*clauses[:_SHOWN_DIFFERENCES], *more])


def _differs(name: str, written: Mapping[str, object], value: object) -> bool:
    return name not in written or written[name] != value


def _difference(name: str, written: Mapping[str, object], value: object) -> str:
    if name not in written:
        return f"it does not record {name}"
    then, now = repr(written[name]), repr(value)
    if max(len(then), len(now)) > _SHOWN_CHARACTERS:
        return f"it differs in {name}"
    return f"its {name} is {then}, not {now}"


def _probe(path: Path) -> int:
    with path.open("rb") as file:
        checksum = zlib.crc32(file.read(_PROBE_BYTES))
        if path.stat().st_size > _PROBE_BYTES:
            file.seek(-_PROBE_BYTES, os.SEEK_END)
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
