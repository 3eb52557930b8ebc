"""Run directories of the view: their files, read while the runs go on."""

import json
import os
import re
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from rlhf_cli.command_table import ONLINE_TRAINING
from rlhf_cli.errors import UsageError
from rlhf_cli.tracking.figures import prominent, title
from rlhf_cli.tracking.sinks import (
    ALARMS_FILE,
    EVAL_SAMPLES_FILE,
    METRICS_FILE,
    PLAN_FILE,
    RUN_FILE,
    SAMPLES_FILE,
    SETTINGS_FILE,
    read_alarms,
)
from rlhf_cli.tracking.thumbnails import FOLDER
from rlhf_cli.tracking.view.index import SampleIndex

SAMPLE_FILES = (SAMPLES_FILE, EVAL_SAMPLES_FILE)
_THUMBNAIL = re.compile(rf"{FOLDER}/[\w-]+\.png", re.ASCII)
"""Names come from files: no other path is read."""
_METRICS_BYTES = 2 << 20
"""Maximum bytes of metrics per response. The page requests the rest."""


@dataclass
class ViewedRun:
    """A run directory. Files are read from it only by name, and never from outside it.

    - `number`: its name in addresses.
    - `state`: function that returns the state of a run that has not written its end, such as "killed".
    """

    number: int
    path: Path
    state: Callable[[Path], str]
    _indexes: dict[str, SampleIndex] = field(default_factory=dict)
    _names: dict[str, None] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def file(self, name: str) -> Path:
        """Return the path of a file. Raises KeyError if it does not exist, or is a link that leaves the directory."""
        path = (self.path / name).resolve()
        if not path.is_file() or not path.is_relative_to(self.path):
            raise KeyError(name)
        return path

    def description(self) -> dict[str, Any]:
        """Return name, path, command, outcome, messages of alarms, plan, and the sample files with samples."""
        run = {"command": f"damaged {RUN_FILE}", "unit": "step", "outcome": "unknown"} | self._object(RUN_FILE)
        plan, outcome = self._object(PLAN_FILE), run["outcome"]
        return {
            **{name: run.get(name) for name in ("command", "unit", "total_steps", "facts")},
            "outcome": self.state(self.path) if outcome == "running" else outcome,
            "alarms": read_alarms(self.path) if self._has(ALARMS_FILE) else [],
            "plan": {name: plan[name] for name in ("assumed", "values") if name in plan},
            "number": self.number,
            "name": self.path.name,
            "is_explained": self.is_explained,
            "path": str(self.path),
            "files": [name for name in SAMPLE_FILES if self._has(name) and self.file(name).stat().st_size],
        }

    @property
    def is_explained(self) -> bool:
        """Whether `rlhf why` explains its samples."""
        return self._object(RUN_FILE).get("command") in ONLINE_TRAINING

    def settings(self) -> dict[str, Any]:
        """Return the settings by group."""
        return read_settings(self.file(SETTINGS_FILE)) if self._has(SETTINGS_FILE) else {}

    def metrics(self, cursor: str) -> dict[str, Any]:
        """Return the metrics logged since an earlier response.

        Returns:
            - `records`: lines of metrics.jsonl; NaN and infinities are strings.
            - `cursor`: to pass next time; `is_first`: whether earlier records are void, because the file was replaced.
            - `has_more`: whether more is there already.
            - `titles`: title by metric; `prominent`: important metrics, most important first.
        """
        if not self._has(METRICS_FILE):
            return {"records": [], "cursor": "", "is_first": True, "has_more": False, **described([])}
        with self.file(METRICS_FILE).open("rb") as lines:
            # A resumed run replaces the file, which the inode shows.
            inode = str(os.fstat(lines.fileno()).st_ino)
            before, _, offset = cursor.partition("-")
            start = int(offset) if before == inode and offset.isdigit() else 0
            lines.seek(start)
            text = lines.read(_METRICS_BYTES)
            if b"\n" not in text and len(text) == _METRICS_BYTES:
                text += lines.readline()
            whole = text[: text.rfind(b"\n") + 1]
            has_more = len(text) == _METRICS_BYTES
        records = list(_objects(whole.splitlines()))
        with self._lock:
            self._names |= {name: None for record in records for name in record}
            names = [name for name in self._names if name != "step"]
        return {
            "records": records,
            "cursor": f"{inode}-{start + len(whole)}",
            "is_first": start == 0,
            "has_more": has_more,
            **described(names),
        }

    def samples(self, name: str) -> SampleIndex:
        """Return the index of a samples file. Raises KeyError if the file does not exist."""
        if name not in SAMPLE_FILES:
            raise KeyError(name)
        with self._lock:
            if name not in self._indexes:
                self._indexes[name] = SampleIndex(self.file(name))
            return self._indexes[name]

    def image(self, name: str) -> bytes:
        """Return a thumbnail that samples name. Raises KeyError if it does not exist."""
        if not _THUMBNAIL.fullmatch(name):
            raise KeyError(name)
        return self.file(name).read_bytes()

    def close(self) -> None:
        """Close the indexes."""
        for index in self._indexes.values():
            index.close()

    def _object(self, name: str) -> dict[str, Any]:
        """Return the object in a JSON file; empty if it does not exist or is damaged: other runs stay visible."""
        try:
            return dict(json.loads(self.file(name).read_text(encoding="utf-8")))
        except (KeyError, ValueError, TypeError):
            return {}

    def _has(self, name: str) -> bool:
        try:
            return bool(self.file(name))
        except KeyError:
            return False


class ViewedRuns:
    """All runs of a view: run directories, and folders with run directories, where new runs may appear."""

    def __init__(self, folders: Sequence[Path], state: Callable[[Path], str] = lambda run: "running") -> None:
        self._folders, self._state = folders, state
        self._runs: dict[Path, ViewedRun] = {}

    def current(self) -> list[ViewedRun]:
        """Return the runs, also those that appeared since the last call."""
        for path in run_directories(self._folders):
            self._runs.setdefault(path, ViewedRun(len(self._runs), path, self._state))
        return [run for run in self._runs.values() if (run.path / RUN_FILE).is_file()]

    def __getitem__(self, number: int) -> ViewedRun:
        """Return a run by number. Raises KeyError for an unknown number."""
        return {run.number: run for run in self._runs.values()}[number]

    def close(self) -> None:
        """Close all runs."""
        for run in self._runs.values():
            run.close()


def run_directories(folders: Sequence[Path]) -> list[Path]:
    """Return the run directories among the folders and directly inside them."""
    found: dict[Path, None] = {}
    for folder in folders:
        inside = [folder, *sorted(path for path in folder.iterdir() if path.is_dir())]
        found |= {path.resolve(): None for path in inside if (path / RUN_FILE).is_file()}
    return list(found)


def checked_folders(words: Sequence[str]) -> list[Path]:
    """Return the folders to view. Raises UsageError if one has no run."""
    folders = [Path(word).expanduser() for word in words]
    for folder in folders:
        if not folder.is_dir():
            raise UsageError(f"{folder}: there is no such folder; pass run directories, or folders that contain them")
        if not run_directories([folder]):
            raise UsageError(
                f"{folder} is no run directory and contains none: no {RUN_FILE} in it or directly inside its folders"
            )
    return folders


def read_settings(path: Path) -> dict[str, dict[str, Any]]:
    """Read the settings by group, from the comment line above each group."""
    groups: dict[str, dict[str, Any]] = {}
    for part in re.split(r"^# ", "\n" + path.read_text(encoding="utf-8"), flags=re.MULTILINE):
        heading, _, body = part.partition("\n")
        values = yaml.safe_load(body)
        if isinstance(values, dict):
            groups.setdefault(heading.strip() or "Settings", {}).update(values)
    return groups


def described(metrics: Iterable[str]) -> dict[str, Any]:
    """Return `titles`: title by metric; `prominent`: important metrics, most important first."""
    names = list(metrics)
    return {"titles": {name: title(name) for name in names}, "prominent": prominent(names)}


def _objects(lines: Sequence[bytes]) -> Iterator[dict[str, Any]]:
    for line in lines:
        try:
            found = json.loads(line)
        except ValueError:
            continue
        if isinstance(found, dict) and isinstance(found.get("step"), int):
            yield found
