"""Checkpoints on disk: written aside, verified, renamed, and only then are older ones removed.

A checkpoint is a folder `step_000020` with whatever its writers put there and a manifest of all files, written
last. Its contents belong to the trainers and engines that write it.
"""

import json
import logging
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
STATE = "state.json"
ASIDE = ".writing"
REMOVED = ".removing"
PROBE_BYTES = 4 << 20  # checked at both ends of a file: whole files of a large model would take minutes
SHOWN_CHARACTERS = 30
"""Of a value in a message; hashes are longer, and no reader can use them."""
SHOWN_DIFFERENCES = 5

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint on disk."""

    path: Path
    step: int
    state: dict[str, Any]  # the contents of `state.json`, from the driver of the run


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
        """Return the steps of the complete checkpoints, oldest first."""
        names = [path.parent.name.removeprefix("step_") for path in self._root.glob(f"step_*/{MANIFEST}")]
        return sorted(int(name) for name in names if name.isdigit())

    def latest(self) -> Checkpoint | None:
        """Return the newest complete checkpoint, or None.

        Raises:
            UsageError: it is damaged.
        """
        steps = self.steps()
        if not steps:
            return None
        path = self.path(steps[-1])
        verify(path)
        return Checkpoint(path, steps[-1], json.loads((path / STATE).read_bytes()))

    def path(self, step: int) -> Path:
        """Return the folder of a step's checkpoint, which may not exist yet."""
        return self._root / f"step_{step:06d}"

    def check_space(self, needed_bytes: int) -> None:
        """Raise RunError if the disk has no room for a checkpoint of this size."""
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
            RunError: it could not be written, as on a full disk; earlier checkpoints are intact and nothing
                half-written is left.
        """
        aside = self._begin(step, needed_bytes)
        try:
            yield aside
            (aside / STATE).write_text(json.dumps(state))
            seal(aside)
            self._publish(aside, self.path(step))
        except (OSError, RuntimeError) as error:  # torch.save reports a full disk as RuntimeError
            raise self._failure(step, error) from error
        except BaseException:
            self._remove_left_over()
            raise
        for old in self.steps()[: -self._max_num]:
            try:
                self._drop(self.path(old))
            except OSError as error:
                logger.warning("the checkpoint of step %d could not be removed: %s", old, error)

    def clear(self) -> None:
        """Remove every checkpoint, and nothing else that may be in the folder."""
        for step in self.steps():
            self._drop(self.path(step))
        self._remove_left_over()

    def _begin(self, step: int, needed_bytes: int) -> Path:
        """Return a new folder with a name of its own: a rank that outlived a killed run may write into an older one."""
        self._remove_left_over()
        aside = self._root / f"{ASIDE}-{uuid4().hex[:8]}"
        try:
            self._root.mkdir(parents=True, exist_ok=True)
            self.check_space(needed_bytes)
            aside.mkdir()
        except OSError as error:
            raise self._failure(step, error) from error
        return aside

    def _remove_left_over(self) -> None:
        """Remove half-written and half-removed folders; the run holds the folder, so no other run is at work in it."""
        for pattern in (f"{ASIDE}*", f"{REMOVED}*"):
            for left_over in self._root.glob(pattern):
                shutil.rmtree(left_over, ignore_errors=True)

    def _failure(self, step: int, error: Exception) -> RunError:
        """Return a message about a checkpoint that could not be written, of which nothing stays."""
        free = f"{_size(self._free_bytes(self._root))} were free in" if self._root.is_dir() else "there is no"
        self._remove_left_over()
        return RunError(
            f"the checkpoint of step {step} could not be written: {error} ({free} {self._root}; {self._intact()})"
        )

    def _publish(self, aside: Path, path: Path) -> None:
        self._drop(path)  # a step is written twice only if a run went back to an older checkpoint
        aside.rename(path)
        _sync(self._root)

    def _drop(self, path: Path) -> None:
        """Remove a checkpoint; a kill in the middle never leaves a checkpoint that lacks files.

        Each removal has a name of its own: what cannot be unlinked, as in a folder of another user, stays under it and
        must not stand in the way of later removals.
        """
        if path.exists():
            removed = self._root / f"{REMOVED}-{uuid4().hex[:8]}"
            path.rename(removed)
            shutil.rmtree(removed, ignore_errors=True)

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
    for name, (size, probe) in _entries(directory).items():
        if problem := _problem(directory / name, size, probe):
            raise _damage(directory, name, problem)


def _damage(directory: Path, name: str, problem: str) -> UsageError:
    return UsageError(
        f"checkpoint {directory} is damaged: {name} {problem}; remove that folder to continue from an older one"
    )


def _entries(directory: Path) -> dict[str, tuple[int, int]]:
    """Size and checksum of each file as it was written."""
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
    return None if _probe(path) == probe else "has other contents than were written"


def check_same_run(checkpoint: Checkpoint, identity: Mapping[str, object], defaults: Mapping[str, object]) -> None:
    """Raise UsageError if the checkpoint was written by a run with another identity.

    A setting that the checkpoint does not record is younger than the checkpoint, which was written as if it had the
    setting's default. So a newer version of this program continues it with the default, or with a role or an adapter
    that neither has (None).

    Args:
        identity: the facts that must be equal for continuing to make sense, such as command, weights and batch size.
        defaults: the default of each setting by name, as JSON.
    """
    written = checkpoint.state.get("identity", {})
    younger = {name for name, value in identity.items() if name not in written and value in (None, defaults.get(name))}
    if found := differences(written, {name: value for name, value in identity.items() if name not in younger}):
        raise UsageError(
            f"checkpoint {checkpoint.path} belongs to another run: {found}; use another --output, or --overwrite to "
            "start again"
        )


def differences(written: Mapping[str, object], identity: Mapping[str, object]) -> str:
    """Return a clause for each of the first entries that differ, "" if none does; long values are not shown."""
    found = [_difference(name, written, value) for name, value in identity.items() if _differs(name, written, value)]
    more = [f"{len(found) - SHOWN_DIFFERENCES} further differences"] if len(found) > SHOWN_DIFFERENCES else []
    return "; ".join([*found[:SHOWN_DIFFERENCES], *more])


def _differs(name: str, written: Mapping[str, object], value: object) -> bool:
    return name not in written or written[name] != value


def _difference(name: str, written: Mapping[str, object], value: object) -> str:
    if name not in written:
        return f"it does not record {name}"
    then, now = repr(written[name]), repr(value)
    if max(len(then), len(now)) > SHOWN_CHARACTERS:
        return f"it differs in {name}"
    return f"its {name} is {then}, not {now}"


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
