"""Rows of datasets: files, folders and Hugging Face Hub names, optionally mixed by probabilities.

Conversion to conversations is in `formats`. Local files are neither cached nor do they cause downloads.
"""

import os
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, overload

import numpy as np

from rlhf_cli.config.plugins import is_target, load_target
from rlhf_cli.config.procedural import is_procedural
from rlhf_cli.config.queries import HARBOR_PREFIX, VERIFIERS_PREFIX
from rlhf_cli.data.formats.dialogues import row_of_numbered
from rlhf_cli.data.reading import harbor, verifiers
from rlhf_cli.data.reading.files import Table, kind_of_file, read_file
from rlhf_cli.data.reading.json_cells import row_reader
from rlhf_cli.data.reading.reasoning_gym import read_problems
from rlhf_cli.data.sampling import SEED_MASK
from rlhf_cli.errors import UsageError, one_line

_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+(:[\w.-]+)?")
_OTHER_SPLITS = {"train", "training", "test", "testing", "validation", "valid", "val", "dev", "eval"}
"""Words in file names that identify a split."""
COLUMN_ROWS = 100
"""Number of initial rows that determine a source's columns. Rows may omit optional columns."""


class RowFault(UsageError):
    """An unusable row. Other rows may be usable."""


_ABSENT = object()


class Row(dict[str, Any]):
    """One row: columns and values, with its source.

    A key with dots that is not a column accesses nested objects: `row["extra_info.question"]`.

    Example: row 16 of a file: `Row({"prompt": "2+3=", "answer": "5"}, source, 16)`.
    """

    def __init__(self, values: dict[str, object], source: "Source", index: int) -> None:
        super().__init__(values)
        self.source = source
        self.index = index

    def __missing__(self, key: str) -> object:
        # Only dotted keys look inside: a missing plain column is simply missing.
        found: object = dict(self) if "." in key else _ABSENT
        for part in key.split("."):
            found = found.get(part, _ABSENT) if isinstance(found, dict) else _ABSENT
        if found is _ABSENT:
            raise KeyError(key)
        return found

    def get(self, key: str, default: object = None) -> Any:
        """Return the value of a column, or of an entry in a column."""
        try:
            return self[key]
        except KeyError:
            return default

    def __contains__(self, key: object) -> bool:
        return self.get(str(key), _ABSENT) is not _ABSENT

    @property
    def where(self) -> str:
        """File and line, for messages."""
        return self.source.where(self.index)

    @property
    def file(self) -> str:
        """File or Hub dataset of the row."""
        return self.source.file(self.index)

    def error(self, message: str) -> RowFault:
        """Return an error about this row, with file and line."""
        return RowFault(f"{self.where}: {message}")


@dataclass(frozen=True)
class Source:
    """One dataset as named in the settings: the concatenated rows of its files."""

    name: str
    tables: tuple[Table, ...]
    format_code: str | None = None
    """User code that converts each row, as `file.py:NAME` or `module:NAME`."""

    @cached_property
    def _ends(self) -> np.ndarray:
        return np.cumsum([table.num_rows for table in self.tables])

    def __len__(self) -> int:
        return int(self._ends[-1])

    def _find(self, index: int) -> tuple[Table, int]:
        # side="right", because an index equal to an end belongs to the next table.
        number = int(np.searchsorted(self._ends, index, side="right"))
        return self.tables[number], index - (int(self._ends[number - 1]) if number else 0)

    def row(self, index: int) -> Row:
        """Return row number `index`, from 0. Raises UsageError with the line if parsing fails."""
        table, position = self._find(index)
        row = Row(table.read(position), self, index)
        return row if self.format_code is None else _made_by(self.format_code, row)

    def file(self, index: int) -> str:
        """Return a row's file."""
        return self._find(index)[0].path

    def where(self, index: int) -> str:
        """Return a row's file and line, for messages."""
        table, position = self._find(index)
        return table.where(position)

    def columns(self) -> list[str]:
        """Return the columns of the first rows, in order of appearance."""
        names: dict[str, None] = {}
        for index in range(min(COLUMN_ROWS, len(self))):
            names.update(dict.fromkeys(self.row(index)))
        return list(names)


def _made_by(code: str, row: Row) -> Row:
    """Convert a row with user code. Raises RowFault if the code fails or returns no row."""
    # A copy, so that user code cannot change the row.
    try:
        made = load_target(code)(dict(row))
    except Exception as error:
        raise row.error(f"--data_format {code} raises {type(error).__name__}: {one_line(error)}") from error
    if not isinstance(made, dict):
        raise row.error(f"--data_format {code} has to return a dict, not {type(made).__name__}")
    return Row(made, row.source, row.index)


@dataclass(frozen=True)
class Rows(Sequence[Row]):
    """Rows from one or more sources in training order: row `i` is `index_N[i]` of `sources[source_N[i]]`."""

    sources: tuple[Source, ...]
    source_N: np.ndarray
    index_N: np.ndarray

    def __len__(self) -> int:
        return self.index_N.size

    @overload
    def __getitem__(self, number: int) -> Row: ...
    @overload
    def __getitem__(self, number: slice) -> list[Row]: ...
    def __getitem__(self, number: int | slice) -> Row | list[Row]:
        if isinstance(number, slice):
            return [self[i] for i in range(*number.indices(len(self)))]
        return self.sources[self.source_N[number]].row(int(self.index_N[number]))

    def used(self) -> list[int]:
        """Return the number of rows used per source."""
        return np.bincount(self.source_N, minlength=len(self.sources)).tolist()


def load_rows(
    spec: str,
    *,
    split: str,
    probs: str | None = None,
    seed: int,
    max_samples: int | None = None,
    hub: Callable[[str, str], Table] | None = None,
    data_format: str = "auto",
) -> Rows:
    """Load the datasets in `spec`, separated by commas.

    Each name is a file, a folder of files, or `owner/name[:config]` on the Hub, followed by `@split` if the split is
    not `split`. Without `probs`, sources are concatenated. With `probs` ('0.3,0.7'), builds the largest mixture without
    repeated rows: each source has exactly its share (to the nearest row), sampled and shuffled with `seed`. At most
    `max_samples` rows are used. `hub(name, split)` reads a Hub dataset. If `data_format` is user code, it converts each
    row.

    Raises:
        UsageError: a dataset is missing, empty or malformed; rows are parsed and checked on access.
    """
    names = _names(spec)
    # Parse the probabilities before loading, which may take minutes.
    shares = _parsed_probs(probs, names)
    code = data_format if is_target(data_format) else None
    sources = tuple(replace(_load_source(name, split, hub or _read_hub), format_code=code) for name in names)
    if shares is None:
        source_N = np.repeat(np.arange(len(sources)), [len(source) for source in sources])
        index_N = np.concatenate([np.arange(len(source)) for source in sources])
        return Rows(sources, source_N[:max_samples], index_N[:max_samples])
    return _mixed(sources, shares, seed=seed, max_samples=max_samples)


class _TakesLong(Exception):
    """A source without a part that can be read quickly."""


def first_rows(spec: str, *, split: str, data_format: str = "auto") -> list[Source]:
    """Return local sources in `spec` with only their first rows, enough to determine columns.

    Skips sources that are slow to open: Hub datasets, `save_to_disk` folders and compressed files.

    Raises:
        UsageError: a dataset is missing, or its first rows are empty or malformed.
    """
    code = data_format if is_target(data_format) else None
    sources = []
    for name in _names(spec):
        with suppress(_TakesLong):
            # One row more, so that messages can tell that there are others.
            source = _load_source(name, split, _not_now, head=COLUMN_ROWS + 1)
            sources.append(replace(source, format_code=code))
    return sources


def _not_now(name: str, split: str) -> Table:
    raise _TakesLong


# Use os.path: Path raises OSError if a name exceeds the system's limit, which a list of datasets may.


def _names(spec: str) -> list[str]:
    # An existing file may have a comma in its name.
    names = [spec] if os.path.exists(spec) else [name.strip() for name in spec.split(",")]
    if not all(names):
        raise UsageError(f"data set {spec!r} has an empty name")
    return names


def _parsed_probs(probs: str | None, names: list[str]) -> list[float] | None:
    if probs is None:
        return None
    try:
        shares = [float(share) for share in probs.split(",")]
    except ValueError:
        raise UsageError(f"probabilities {probs!r} are not numbers separated by commas") from None
    if len(shares) != len(names):
        raise UsageError(f"probabilities {probs!r} are {len(shares)} for {len(names)} data sets: {', '.join(names)}")
    if not (min(shares) > 0 and abs(sum(shares) - 1) <= 1e-6):  # also false for nan
        raise UsageError(f"probabilities {probs!r} must be positive and add up to 1, not {sum(shares):g}")
    return shares


def _mixed(sources: tuple[Source, ...], shares: list[float], *, seed: int, max_samples: int | None) -> Rows:
    # The tolerance avoids losing a row to rounding.
    total = min(int(len(source) / share + 1e-9) for source, share in zip(sources, shares, strict=True))
    counts = exact_shares(min(total, max_samples or total), shares)
    random = np.random.default_rng(seed & SEED_MASK)
    source_N = np.repeat(np.arange(len(sources)), counts)
    # Permute before cutting, so that a mixture samples rows instead of taking the first ones.
    chosen = [random.permutation(len(source))[:count] for source, count in zip(sources, counts, strict=True)]
    order = random.permutation(source_N.size)
    return Rows(sources, source_N[order], np.concatenate(chosen)[order])


def exact_shares(total: int, shares: list[float]) -> list[int]:
    """Return integers that add up to `total`, each within one of `share * total` (largest remainder method)."""
    exact = [share * total for share in shares]
    counts = [int(value + 1e-9) for value in exact]
    # Ties by index, so that the result is deterministic.
    by_remainder = sorted(range(len(shares)), key=lambda i: (counts[i] - exact[i], i))
    for index in by_remainder[: total - sum(counts)]:
        counts[index] += 1
    return counts


def _load_source(name: str, default_split: str, hub: Callable[[str, str], Table], *, head: int | None = None) -> Source:
    if is_procedural(name):
        return Source(name, (read_problems(name, head=head),))
    if name.startswith(HARBOR_PREFIX):
        return Source(name, (harbor.read_tasks(name),))
    if name.startswith(VERIFIERS_PREFIX):
        return Source(name, (verifiers.read_tasks(name),))
    path, split = _parted(name)
    if os.path.isdir(path):
        return Source(name, _read_folder(path, split, default_split, head))
    if os.path.exists(path) or kind_of_file(path) is not None:
        if split not in (None, "train"):
            raise UsageError(f"{path} is one file and has no split {split!r}: leave @{split} out")
        if not os.path.exists(path):
            raise UsageError(f"no file {str(path)!r}")
        return Source(name, _read_files([path], head))
    hub_name = name.rpartition("@")[0] if split else name
    # A relative path such as data/rows is not a Hub name if its folder exists.
    if _HUB_NAME.fullmatch(hub_name) and not Path(hub_name).parent.is_dir():
        return Source(name, (hub(hub_name, split or default_split),))
    raise UsageError(f"no file or folder {str(path)!r} (a data set on the Hub is written owner/name)")


def _parted(name: str) -> tuple[Path, str | None]:
    """Split `name@split` into path and split. An existing path that contains @ is not split."""
    path, _, split = name.rpartition("@")
    # Paths may contain @, also in folder names.
    if not path or os.sep in split or os.path.exists(os.path.expanduser(name)):
        return Path(name).expanduser(), None
    return Path(path).expanduser(), split


def _read_files(paths: Sequence[Path], head: int | None) -> tuple[Table, ...]:
    """Read the files, or the first `head` rows in total."""
    if head is None:
        return tuple(read_file(path) for path in paths)
    tables: list[Table] = []
    # Later files need not be opened once there are enough rows.
    for path in paths:
        left = head - sum(table.num_rows for table in tables)
        if left > 0 and path.suffix.lower() == ".gz":
            raise _TakesLong
        if left > 0:
            tables.append(read_file(path, head=left))
    return tuple(tables)


def _read_folder(folder: Path, split: str | None, default_split: str, head: int | None) -> tuple[Table, ...]:
    """Read all data files in a folder in name order, or only the split's files if names contain splits."""
    # Written by `save_to_disk`.
    if (folder / "state.json").exists() or (folder / "dataset_dict.json").exists():
        if head is not None:
            raise _TakesLong
        return (_read_saved(folder, split or default_split),)
    # Skip hidden folders, such as caches of the Hub library.
    visible = (path for path in folder.rglob("*") if not any(p.startswith(".") for p in path.relative_to(folder).parts))
    files = sorted(path for path in visible if path.is_file() and kind_of_file(path) is not None)
    if not files:
        raise UsageError(f"folder {folder} has no data file (json, jsonl, csv, parquet, or these with .gz)")
    words = {path: _words(path.relative_to(folder)) for path in files}
    chosen = [path for path in files if (split or default_split) in words[path]]
    if not chosen and split is None:
        # Files whose names contain no split are used for any split.
        chosen = [path for path in files if not words[path] & _OTHER_SPLITS]
    if not chosen:
        names = ", ".join(str(path.relative_to(folder)) for path in files)
        raise UsageError(f"folder {folder} has no file of the split {split or default_split!r}; its files: {names}")
    return _read_files(chosen, head)


def _words(path: Path) -> set[str]:
    return set(re.split(r"[^a-z]+", str(path).lower()))


def _read_saved(folder: Path, split: str) -> Table:
    """Read a folder written by `save_to_disk` of `datasets`."""
    import datasets

    loaded = datasets.load_from_disk(str(folder))
    if isinstance(loaded, datasets.DatasetDict):
        if split not in loaded:
            raise UsageError(f"folder {folder} has no split {split!r}; its splits: {', '.join(loaded)}")
        loaded = loaded[split]
    return _table_of(loaded, str(folder))


def _read_hub(name: str, split: str) -> Table:
    """Read a Hub dataset split, cached under HF_HOME. Works offline once cached."""
    os.environ.setdefault("HF_UPDATE_DOWNLOAD_COUNTS", "0")  # do not report dataset usage
    import datasets

    path, _, config = name.partition(":")
    # Its progress bars would break the terminal output.
    datasets.disable_progress_bars()
    try:
        loaded = datasets.load_dataset(path, config or None, split=split)
    except (OSError, ValueError, RuntimeError, datasets.exceptions.DatasetsError) as error:
        # Only the first lines: errors of the Hub library list all files.
        reason = str(error).strip().splitlines()
        raise UsageError(
            f"{name!r} is no local file or folder, and split {split!r} of it could not be read from the Hub: "
            f"{' '.join(reason[:3])}"
        ) from error
    return _table_of(loaded, f"{name}@{split}")


def _table_of(loaded: Any, path: str) -> Table:
    if len(loaded) == 0:
        raise UsageError(f"{path} is empty: it has no rows")

    # Without Arrow format, `datasets` decodes all cells of a row.
    loaded = _with_encoded_pictures(loaded).with_format("arrow")
    read_row = row_reader(loaded.data.schema)

    def read(index: int) -> dict[str, object]:
        (row,) = loaded[index].to_pylist()
        # `datasets` reads JSON lists as numbered columns.
        return row_of_numbered(read_row(row))

    return Table(path, len(loaded), read, lambda index: f"row {index}", lambda: str(loaded._fingerprint))


def _with_encoded_pictures(loaded: Any) -> Any:
    """Return the dataset with encoded images, which it would otherwise decode for each row."""
    import datasets

    def encoded(feature: Any) -> Any:
        if isinstance(feature, datasets.Image):
            return datasets.Image(decode=False)
        if isinstance(feature, datasets.List | datasets.LargeList):
            return type(feature)(encoded(feature.feature))
        return {name: encoded(entry) for name, entry in feature.items()} if isinstance(feature, dict) else feature

    wanted = datasets.Features({name: encoded(feature) for name, feature in loaded.features.items()})
    return loaded if wanted == loaded.features else loaded.cast(wanted)


@dataclass(frozen=True, slots=True)
class ReadSource:
    """A source with its files, used rows, and format with columns."""

    name: str
    files: tuple[str, ...]
    num_rows: int
    num_used: int
    form: str

    def __str__(self) -> str:
        part = f", {self.num_used:,} of {self.num_rows:,} rows" if self.num_used < self.num_rows else ""
        return f"{self.name} ({self.form}{part})"


def read_sources(rows: Rows, forms: Sequence[str]) -> list[ReadSource]:
    """Return these rows' sources with their formats."""
    return [
        ReadSource(source.name, tuple(table.path for table in source.tables), len(source), count, form)
        for source, form, count in zip(rows.sources, forms, rows.used(), strict=True)
    ]


def batches(rows: Rows, size: int) -> Iterator[list[Row]]:
    """Yield the rows in batches."""
    for start in range(0, len(rows), size):
        yield rows[start : start + size]
