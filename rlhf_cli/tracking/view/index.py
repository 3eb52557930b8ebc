"""Index of a samples file: an SQLite file next to it with one row per sample, extended while the samples file grows.

Text stays in the samples file; the index stores line offsets and numbers to filter and sort by.
"""

import json
import sqlite3
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path
from typing import Any

from rlhf_cli.tracking.sinks import INDEX_ENDING, present_row

COLUMNS = ("step", "group", "sample", "reward", "advantage", "length", "prompt")
"""Indexed numbers of a sample. `prompt` is a hash, equal for equal prompts."""
_VERSION = 1
"""Raise it with the tables below: indexes of other versions are built again."""
_TABLES = """
CREATE TABLE samples (
    number INTEGER PRIMARY KEY, start INTEGER, step INTEGER, "group" INTEGER, sample INTEGER,
    reward REAL, advantage REAL, length INTEGER, prompt INTEGER);
CREATE TABLE indexed (end INTEGER, last INTEGER, digest BLOB);
INSERT INTO indexed VALUES (0, 0, x'');
"""
_INSERT = "INSERT INTO samples VALUES (NULL, ?, ?, ?, ?, ?, ?, ?, ?)"
_LINES_TOGETHER = 2000
"""Lines between two looks at the clock."""
_LOCK_SECONDS = 10.0
"""Time limit for waiting for a second program that extends the same index."""
_MAX_STEPS, _MAX_BINS = 60, 24


@dataclass(frozen=True)
class Query:
    """Samples to select and their order.

    - `bounds`: (minimum, maximum) by column, None for no bound.
    - `order`: column, or "number" for the order of the file.
    - `text`: text that the sample contains, upper or lower case.
    """

    bounds: Mapping[str, tuple[float | None, float | None]] = field(default_factory=dict)
    order: str = "number"
    descending: bool = False
    text: str = ""

    @property
    def where(self) -> tuple[str, list[float]]:
        """SQL condition and its values."""
        terms, values = ["1"], list[float]()
        for name, ends in self.bounds.items():
            for comparison, end in zip((">=", "<="), ends, strict=True):
                if end is not None:
                    terms.append(f'"{name}" {comparison} ?')
                    values.append(end)
        return " AND ".join(terms), values

    @property
    def order_by(self) -> str:
        """SQL order; samples without the value are last."""
        direction = "DESC" if self.descending else "ASC"
        return f'"{self.order}" {direction} NULLS LAST, number {direction}'


@dataclass(frozen=True)
class Page:
    """Part of the selected samples.

    - `rows`: samples with current key names, and their `number` in the file.
    - `next`: number of selected samples to skip for the next page; None after the last one.
    - `total`: number of selected samples; with `Query.text`, before the text is searched.
    """

    rows: list[dict[str, Any]]
    next: int | None
    total: int


class SampleIndex:
    """Samples of a samples file. Methods may be called from any thread."""

    def __init__(self, samples: Path) -> None:
        self._samples = samples
        # One connection for all threads: SQLite allows it if calls do not overlap.
        self._lock = threading.Lock()
        self._database = _opened(samples)

    def close(self) -> None:
        """Close the index."""
        with self._lock:
            self._database.close()

    def extend(self, seconds: float) -> tuple[int, int]:
        """Index new lines for about this time. Returns the bytes that are indexed, and the size of the samples file."""
        with self._lock, self._samples.open("rb") as lines:
            with self._transaction():
                end = self._continued(lines)
                end = self._add(lines, end, until=time.monotonic() + seconds)
            return end, self._samples.stat().st_size

    def page(self, query: Query, *, skip: int, limit: int, seconds: float) -> Page:
        """Return up to `limit` selected samples after the first `skip`.

        A search for a text ends after about `seconds`, even with fewer samples; `next` continues it.
        """
        condition, values = query.where
        with self._lock:
            (total,) = self._one(f"SELECT COUNT(*) FROM samples WHERE {condition}", values)
            rows, place = self._found(query, skip, limit, time.monotonic() + seconds)
        return Page(rows, place if place < total else None, total)

    def row(self, number: int) -> dict[str, Any]:
        """Return a sample by number in the file, from 1, with `prompt_number` as in the column `prompt`.

        Raises:
            KeyError: there is none.
        """
        with self._lock:
            found = self._one("SELECT number, start, prompt FROM samples WHERE number = ?", [number])
            if found is None:
                raise KeyError(number)
            return {**self._read([found[:2]])[0], "prompt_number": found[2]}

    def groups(self, query: Query, *, skip: int, limit: int) -> list[dict[str, Any]]:
        """Return up to `limit` groups of the selected samples: step, group, count, and mean and range of rewards.

        `order` is the column "step", "mean" or "spread".
        """
        condition, values = query.where
        order = f'"{query.order}" {"DESC" if query.descending else "ASC"} NULLS LAST, step, "group"'
        names = ("step", "group", "count", "mean", "low", "high", "spread")
        with self._lock:
            rows = self._database.execute(
                'SELECT step, "group", COUNT(*), AVG(reward) AS mean, MIN(reward), MAX(reward), '
                f"MAX(reward) - MIN(reward) AS spread FROM samples WHERE {condition} "
                f'GROUP BY step, "group" ORDER BY {order} LIMIT ? OFFSET ?',
                [*values, limit, skip],
            ).fetchall()
        return [dict(zip(names, row, strict=True)) for row in rows]

    def histogram(self, query: Query, column: str) -> dict[str, Any]:
        """Count the selected samples by step and value of a column.

        Returns:
            - `low`, `high` and `first`, `last`: ranges of values and steps; `bins`, `steps`: numbers of equal parts.
            - `counts`: [step bin, value bin, number of samples] for bins with samples.
        """
        condition, values = query.where
        known = f'{condition} AND "{column}" IS NOT NULL'
        with self._lock:
            low, high, first, last = self._one(
                f'SELECT MIN("{column}"), MAX("{column}"), MIN(step), MAX(step) FROM samples WHERE {known}', values
            )
            if low is None:
                return {"counts": []}
            steps = min(_MAX_STEPS, last - first + 1)
            # The maximum belongs to the last bin, not to one after it.
            counts = self._database.execute(
                f'SELECT (step - ?) * ? / ?, MIN(?, CAST(("{column}" - ?) * ? / ? AS INTEGER)), COUNT(*) '
                f"FROM samples WHERE {known} GROUP BY 1, 2",
                [first, steps, last - first + 1, _MAX_BINS - 1, low, _MAX_BINS, (high - low) or 1, *values],
            ).fetchall()
        return {
            "low": low, "high": high, "first": first, "last": last, "bins": _MAX_BINS, "steps": steps, "counts": counts
        }  # fmt: skip

    def _found(self, query: Query, skip: int, limit: int, until: float) -> tuple[list[dict[str, Any]], int]:
        """Return samples, and how many selected ones lie before the next page."""
        condition, values = query.where
        rows: list[dict[str, Any]] = []
        place, text = skip, query.text.lower()
        # Without a text, one read is enough.
        together = limit if not text else _LINES_TOGETHER
        while len(rows) < limit:
            found = self._database.execute(
                f"SELECT number, start FROM samples WHERE {condition} ORDER BY {query.order_by} LIMIT ? OFFSET ?",
                [*values, together, place],
            ).fetchall()
            for row in self._read(found):
                place += 1
                if not text or text in _words(row):
                    rows.append(row)
                if len(rows) == limit:
                    break
            if len(found) < together or time.monotonic() > until:
                break
        return rows, place

    def _read(self, found: Sequence[tuple[int, int]]) -> list[dict[str, Any]]:
        """Read samples by (number, offset)."""
        rows = []
        with self._samples.open("rb") as lines:
            for number, start in found:
                lines.seek(start)
                rows.append({"number": number, **present_row(json.loads(lines.readline()))})
        return rows

    def _one(self, query: str, values: Sequence[float] = ()) -> Any:
        return self._database.execute(query, values).fetchone()

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        # A second program may extend the same index: the lock is held from before the end is read.
        self._database.execute("BEGIN IMMEDIATE")
        try:
            yield
        except BaseException:
            self._database.execute("ROLLBACK")
            raise
        self._database.execute("COMMIT")

    def _continued(self, lines: Any) -> int:
        """Return the offset to continue at: 0, with an empty index, if the samples file was replaced since."""
        end, last, digest = self._one("SELECT end, last, digest FROM indexed")
        lines.seek(last)
        if not end or _digest(lines.read(end - last)) == digest:
            return int(end)
        self._database.execute("DELETE FROM samples")
        self._database.execute("UPDATE indexed SET end = 0, last = 0, digest = x''")
        return 0

    def _add(self, lines: Any, end: int, *, until: float) -> int:
        """Index lines from the offset `end`. Returns the offset after the last one."""
        lines.seek(end)
        last = b""
        while time.monotonic() < until:
            added = []
            for line in lines:
                if not line.endswith(b"\n"):  # the run is still writing it, or was killed while writing it
                    break
                added.append((end, line))
                end, last = end + len(line), line
                if len(added) == _LINES_TOGETHER:
                    break
            self._database.executemany(_INSERT, (values for values in map(_values, added) if values))
            if len(added) < _LINES_TOGETHER:
                break
        if last:
            self._database.execute(
                "UPDATE indexed SET end = ?, last = ?, digest = ?", [end, end - len(last), _digest(last)]
            )
        return end


def _opened(samples: Path) -> sqlite3.Connection:
    """Open the index file, or a temporary one in memory if the folder is read-only."""
    path = samples.with_name(samples.name + INDEX_ENDING)
    try:
        return _connected(path)
    except sqlite3.OperationalError:
        return _connected(":memory:")
    except sqlite3.DatabaseError:
        # Not an index, such as one torn by a power failure.
        path.unlink()
        return _connected(path)


def _connected(path: Path | str) -> sqlite3.Connection:
    database = sqlite3.connect(path, timeout=_LOCK_SECONDS, isolation_level=None, check_same_thread=False)
    # The index can be built again, so a power failure may lose it.
    database.execute("PRAGMA synchronous = OFF")
    database.execute("BEGIN IMMEDIATE")
    (version,) = database.execute("PRAGMA user_version").fetchone()
    if version != _VERSION:
        for table in ("samples", "indexed"):
            database.execute(f"DROP TABLE IF EXISTS {table}")
        for statement in _TABLES.split(";"):
            database.execute(statement)
        database.execute(f"PRAGMA user_version = {_VERSION}")
    database.execute("COMMIT")
    return database


def _values(line: tuple[int, bytes]) -> tuple[Any, ...] | None:
    """Return the values of a line for the index; None if it is no sample."""
    start, text = line
    try:
        row = present_row(json.loads(text))
        numbers = [row.get(name) for name in COLUMNS[:-1]]
    except (ValueError, AttributeError):
        return None
    return (start, *(one if isinstance(one, int | float) else None for one in numbers), prompt_number(row))


def prompt_number(row: Mapping[str, Any]) -> int:
    """Return a hash of a sample's prompt."""
    prompt = row.get("prompt")
    text = prompt if isinstance(prompt, str) else json.dumps(prompt)
    # 6 bytes: JavaScript has integers of 53 bits.
    return int.from_bytes(blake2b(text.encode(errors="replace"), digest_size=6).digest())


def _digest(line: bytes) -> bytes:
    return blake2b(line, digest_size=16).digest()


def _words(row: Mapping[str, Any]) -> str:
    """Return a sample's text in lower case."""
    texts = [row.get(name) for name in ("id", "prompt", "response", "label", "messages")]
    return "\n".join(text if isinstance(text, str) else json.dumps(text, ensure_ascii=False) for text in texts).lower()
