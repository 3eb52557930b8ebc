"""Rows of one data file: JSON lines, a JSON list, CSV or Parquet, each also gzipped.

Files are read through memory maps and a row is parsed on request, so memory grows only with the starts of the rows.
Rows keep the order of the file. Columns are not typed: one row may hold a number in a column that holds text in another
row.
"""

import csv
import gzip
import hashlib
import json
import mmap
import shutil
import tempfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import IO, Any

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet

from rlhf_cli.data.reading.json_cells import row_reader
from rlhf_cli.data.reading.json_lists import DECODER, beyond_limits, blocks, checked_object, element_bounds
from rlhf_cli.data.store import TableWriter
from rlhf_cli.errors import UsageError, first_line

BATCH_ROWS = 256
"""Rows of a record batch."""
NEWLINE = 10
MAX_BLANK = 2
"""Bytes of a line that may turn out to be blank; a longer one has at least `{}` to be a row."""
CSV_BLOCK = 1 << 26
"""Bytes parsed at a time; no row may be longer than this."""


@dataclass(frozen=True, slots=True)
class Table:
    """The rows of one file. `read(i)` returns a row as a dict, `place(i)` its place in the file: 'line 3'.

    `checksum()` is a checksum of all content; None if it is not known, so that nothing made from the file is kept.
    """

    path: str
    num_rows: int
    read: Callable[[int], dict[str, object]]
    place: Callable[[int], str]
    checksum: Callable[[], str] | None = None

    def where(self, index: int) -> str:
        """Return the file and place of a row, for messages."""
        return f"{self.path} {self.place(index)}"


def kind_of_file(path: Path) -> str | None:
    """Return the suffix that decides how the file is read ('.json', '.csv', ...), without .gz; None if it is no data
    file.
    """
    suffixes = [suffix.lower() for suffix in path.suffixes]
    if suffixes and suffixes[-1] == ".gz":
        suffixes.pop()
    return suffixes[-1] if suffixes and suffixes[-1] in READERS else None


def read_file(path: Path, *, head: int | None = None) -> Table:
    """Return the rows of a data file, or only the first `head` of them, for which little of a large file is read.

    Raise UsageError that names the file and, if it has lines, the line.
    """
    kind = kind_of_file(path)
    if kind is None:
        raise UsageError(f"{path} is no data file: its name ends in none of {', '.join(READERS)} (or these with .gz)")
    try:
        with _opened(path) as file:
            table = READERS[kind](file, str(path), head)
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror or first_line(error)}") from error
    if table.num_rows == 0:
        raise UsageError(f"{path} is empty: it has no rows")
    return replace(table, checksum=lambda: _checksum(path))


def _checksum(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "blake2b").hexdigest()


@contextmanager
def _opened(path: Path) -> Iterator[IO[bytes]]:
    """Return the file's bytes; a gzipped file is unpacked into a temporary one first."""
    if path.suffix.lower() != ".gz":
        with path.open("rb") as file:
            yield file
        return
    with tempfile.TemporaryFile(prefix="rlhf-") as unpacked:
        try:
            with gzip.open(path) as packed:
                shutil.copyfileobj(packed, unpacked)
        except (gzip.BadGzipFile, EOFError, zlib.error) as error:
            raise UsageError(f"{path} is damaged: {error}") from error
        unpacked.seek(0)
        yield unpacked


def _read_json(file: IO[bytes], path: str, head: int | None) -> Table:
    """Return the rows of a list of objects, or of one object per line; the first character decides."""
    if file.seek(0, 2) == 0:
        return _no_rows(path)
    mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    start = mapped[:4096].removeprefix(b"\xef\xbb\xbf").lstrip()
    return _json_list(mapped, path, head) if start.startswith(b"[") else _json_lines(mapped, path, head)


def _json_lines(mapped: mmap.mmap, path: str, head: int | None) -> Table:
    ends = _line_ends(mapped) if head is None else _first_line_ends(mapped, head)
    starts = np.concatenate([[0], ends[:-1] + 1])
    long_enough = ends - starts > MAX_BLANK
    for number in np.flatnonzero(~long_enough):
        long_enough[number] = bool(mapped[starts[number] : ends[number]].strip())
    lines = np.flatnonzero(long_enough)

    def read(index: int) -> dict[str, object]:
        number = lines[index]
        try:
            row = DECODER.decode(mapped[starts[number] : ends[number]].decode("utf-8-sig"))
        except UnicodeDecodeError as error:
            raise UsageError(f"{path} line {number + 1} is not UTF-8 text: {error.reason}") from error
        except json.JSONDecodeError as error:
            raise UsageError(
                f"{path} line {number + 1} is not valid JSON: {error.msg} at column {error.colno}; "
                "a JSON file holds one object per line, or a list of objects"
            ) from error
        except (ValueError, RecursionError) as error:
            raise UsageError(f"{path} line {number + 1} {beyond_limits(error)}") from error
        return checked_object(row, f"{path} line {number + 1}")

    return Table(path, lines.size, read, lambda index: f"line {lines[index] + 1}")


def _line_ends(mapped: mmap.mmap) -> np.ndarray:
    """Return the byte position of each line's end, int64; the last line needs no line break."""
    found = [
        np.flatnonzero(np.frombuffer(block, dtype=np.uint8) == NEWLINE) + start
        for start, block in blocks(mapped, 0, len(mapped))
    ]
    ends = np.concatenate(found)
    return ends if mapped[-1] == NEWLINE else np.append(ends, len(mapped))


def _first_line_ends(mapped: mmap.mmap, count: int) -> np.ndarray:
    """Return the byte position of the ends of the first lines, `count` of them that are not blank, int64."""
    ends, start, found = [], 0, 0
    while found < count and start < len(mapped):
        end = mapped.find(b"\n", start)
        ends.append(end if end >= 0 else len(mapped))
        found += bool(mapped[start : ends[-1]].strip())
        start = ends[-1] + 1
    return np.array(ends, dtype=np.int64)


def _json_list(mapped: mmap.mmap, path: str, head: int | None) -> Table:
    bounds = np.fromiter(islice(element_bounds(mapped, path), None if head is None else head + 1), dtype=np.int64)

    def read(index: int) -> dict[str, object]:
        start, stop = bounds[index : index + 2]
        return checked_object(DECODER.raw_decode(mapped[start:stop].decode())[0], f"{path} row {index + 1}")

    return Table(path, bounds.size - 1, read, lambda index: f"row {index + 1}")


def _no_rows(path: str) -> Table:
    return Table(path, 0, lambda index: {}, str)


def _read_csv(file: IO[bytes], path: str, head: int | None) -> Table:
    """Return all columns as text. Row numbers count from the first row after the header."""
    try:
        first = next(iter(file.readline().splitlines()), b"")  # lines may end in CR alone
        columns = next(csv.reader([first.decode("utf-8-sig")]), [])
    except UnicodeDecodeError as error:
        raise UsageError(f"{path} line 1 is not UTF-8 text: {error.reason}") from error
    except csv.Error as error:
        raise UsageError(f"{path} line 1 names no columns: {error}") from error
    _refuse_repeated(columns, path)
    if file.tell() == 0:
        return _no_rows(path)
    if not columns:
        raise UsageError(f"{path} line 1 is blank: the first line of a CSV file names its columns")
    file.seek(0)
    try:
        batches = pa.csv.open_csv(
            file,
            read_options=pa.csv.ReadOptions(
                use_threads=False, block_size=CSV_BLOCK
            ),  # with threads, errors do not name the row
            parse_options=pa.csv.ParseOptions(newlines_in_values=True),
            convert_options=pa.csv.ConvertOptions(
                column_types=dict.fromkeys(columns, pa.string()), strings_can_be_null=False
            ),
        )
        return _stored(batches, batches.schema, path, head)
    except pa.ArrowInvalid as error:
        raise UsageError(f"{path} is not a valid CSV file: {first_line(error)}") from error


def _refuse_repeated(columns: list[str], path: str) -> None:
    """Raise UsageError if two columns have one name: a row could keep only one of them."""
    if len(set(columns)) < len(columns):
        raise UsageError(f"{path} names a column twice: {', '.join(columns)}")


def _read_parquet(file: IO[bytes], path: str, head: int | None) -> Table:
    try:
        parquet = pa.parquet.ParquetFile(file)
        _refuse_repeated(parquet.schema_arrow.names, path)
        return _stored(parquet.iter_batches(batch_size=BATCH_ROWS), parquet.schema_arrow, path, head)
    except pa.ArrowException as error:  # also of a sound file with what Arrow does not read
        raise UsageError(f"{path} cannot be read as Parquet: {first_line(error)}") from error


def _stored(batches: Any, schema: pa.Schema, path: str, head: int | None) -> Table:
    writer = TableWriter(schema)
    for batch in batches if head is None else (batch.slice(0, head) for batch in islice(batches, 1)):
        for start in range(0, batch.num_rows, BATCH_ROWS):
            writer.append(batch.slice(start, BATCH_ROWS))
    stored = writer.finish()
    read = row_reader(schema)
    return Table(path, len(stored), lambda index: read(stored.row(index)), lambda index: f"row {index + 1}")


READERS: dict[str, Callable[[IO[bytes], str, int | None], Table]] = {
    ".jsonl": _read_json,
    ".json": _read_json,
    ".csv": _read_csv,
    ".parquet": _read_parquet,
}
"""How a file is read, by the end of its name."""
