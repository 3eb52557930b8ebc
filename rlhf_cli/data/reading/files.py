"""Rows of a data file: JSON lines, JSON list, CSV or Parquet, optionally gzipped.

Files are memory-mapped and rows are parsed on access, so memory only grows with the row index. Rows keep the file
order. Columns are untyped: a column may contain a number in one row and text in another.
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
"""Rows per record batch."""
_NEWLINE = 10
_MAX_BLANK = 2
"""Maximum length in bytes of a possibly blank line; longer ones contain at least `{}`."""
_CSV_BLOCK = 1 << 26
"""Bytes parsed at a time. Rows must not be longer."""


@dataclass(frozen=True, slots=True)
class Table:
    """Rows of a file. `read(i)` returns a row as dict, `place(i)` its location, such as 'line 3'.

    `checksum()` covers the content; None disables caching.
    """

    path: str
    num_rows: int
    read: Callable[[int], dict[str, object]]
    place: Callable[[int], str]
    checksum: Callable[[], str] | None = None

    def where(self, index: int) -> str:
        """Return a row's file and location, for messages."""
        return f"{self.path} {self.place(index)}"


def kind_of_file(path: Path) -> str | None:
    """Return the suffix that selects the reader ('.json', '.csv', ...), without .gz; None for other files."""
    suffixes = [suffix.lower() for suffix in path.suffixes]
    # The suffix before .gz selects the reader.
    if suffixes and suffixes[-1] == ".gz":
        suffixes.pop()
    return suffixes[-1] if suffixes and suffixes[-1] in _READERS else None


def read_file(path: Path, *, head: int | None = None) -> Table:
    """Read a data file, or only its first `head` rows, which reads little of a large file.

    Raises UsageError with the file, and the line if available.
    """
    kind = kind_of_file(path)
    if kind is None:
        raise UsageError(f"{path} is no data file: its name ends in none of {', '.join(_READERS)} (or these with .gz)")
    try:
        with _opened(path) as file:
            table = _READERS[kind](file, str(path), head)
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror or first_line(error)}") from error
    if table.num_rows == 0:
        raise UsageError(f"{path} is empty: it has no rows")
    # Computed on request: hashing a large file takes seconds.
    return replace(table, checksum=lambda: _checksum(path))


def _checksum(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "blake2b").hexdigest()


@contextmanager
def _opened(path: Path) -> Iterator[IO[bytes]]:
    """Open a file. A gzipped file is first unpacked to a temporary file."""
    if path.suffix.lower() != ".gz":
        with path.open("rb") as file:
            yield file
        return
    # Unpack to a file instead of memory, so that large files can be mapped.
    with tempfile.TemporaryFile(prefix="rlhf-") as unpacked:
        try:
            with gzip.open(path) as packed:
                shutil.copyfileobj(packed, unpacked)
        except (gzip.BadGzipFile, EOFError, zlib.error) as error:
            raise UsageError(f"{path} is damaged: {error}") from error
        unpacked.seek(0)
        yield unpacked


def _read_json(file: IO[bytes], path: str, head: int | None) -> Table:
    """Read a list of objects, or one object per line, depending on the first character."""
    if file.seek(0, 2) == 0:
        return _no_rows(path)
    # An empty file cannot be mapped, so it is handled above.
    mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    # Skip a byte order mark, which Windows programs write.
    start = mapped[:4096].removeprefix(b"\xef\xbb\xbf").lstrip()
    return _json_list(mapped, path, head) if start.startswith(b"[") else _json_lines(mapped, path, head)


def _json_lines(mapped: mmap.mmap, path: str, head: int | None) -> Table:
    ends = _line_ends(mapped) if head is None else _first_line_ends(mapped, head)
    # Arrays instead of Python lists: files may have hundreds of millions of lines.
    starts = np.concatenate([[0], ends[:-1] + 1])
    # Decoding only short lines is much faster than checking all of them.
    long_enough = ends - starts > _MAX_BLANK
    for number in np.flatnonzero(~long_enough):
        long_enough[number] = bool(mapped[starts[number] : ends[number]].strip())
    lines = np.flatnonzero(long_enough)

    def read(index: int) -> dict[str, object]:
        number = lines[index]
        try:
            # utf-8-sig drops a byte order mark in the first line.
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
    """Return each line's end in bytes, int64; the last line needs no line break."""
    found = [
        np.flatnonzero(np.frombuffer(block, dtype=np.uint8) == _NEWLINE) + start
        for start, block in blocks(mapped, 0, len(mapped))
    ]
    ends = np.concatenate(found)
    return ends if mapped[-1] == _NEWLINE else np.append(ends, len(mapped))


def _first_line_ends(mapped: mmap.mmap, count: int) -> np.ndarray:
    """Return the ends of the first lines in bytes, int64, `count` of them non-blank."""
    ends, start, found = [], 0, 0
    while found < count and start < len(mapped):
        end = mapped.find(b"\n", start)
        ends.append(end if end >= 0 else len(mapped))
        found += bool(mapped[start : ends[-1]].strip())
        start = ends[-1] + 1
    return np.array(ends, dtype=np.int64)


def _json_list(mapped: mmap.mmap, path: str, head: int | None) -> Table:
    # One element more than wanted, since an end is the next element's start.
    bounds = np.fromiter(islice(element_bounds(mapped, path), None if head is None else head + 1), dtype=np.int64)

    def read(index: int) -> dict[str, object]:
        start, stop = bounds[index : index + 2]
        return checked_object(DECODER.raw_decode(mapped[start:stop].decode())[0], f"{path} row {index}")

    return Table(path, bounds.size - 1, read, lambda index: f"row {index}")


def _no_rows(path: str) -> Table:
    return Table(path, 0, lambda index: {}, str)


def _read_csv(file: IO[bytes], path: str, head: int | None) -> Table:
    """Read all columns as text. Row numbers start after the header."""
    try:
        first = next(iter(file.readline().splitlines()), b"")  # lines may end with only CR
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
    # Arrow reads the header again.
    file.seek(0)
    try:
        batches = pa.csv.open_csv(
            file,
            read_options=pa.csv.ReadOptions(
                use_threads=False, block_size=_CSV_BLOCK
            ),  # with threads, errors do not contain the row
            parse_options=pa.csv.ParseOptions(newlines_in_values=True),
            convert_options=pa.csv.ConvertOptions(
                # Read as text: type inference would change values such as 007.
                column_types=dict.fromkeys(columns, pa.string()),
                strings_can_be_null=False,
            ),
        )
        return _stored(batches, batches.schema, path, head)
    except pa.ArrowInvalid as error:
        raise UsageError(f"{path} is not a valid CSV file: {first_line(error)}") from error


def _refuse_repeated(columns: list[str], path: str) -> None:
    """Raise UsageError for duplicate column names: a row could keep only one of them."""
    if len(set(columns)) < len(columns):
        raise UsageError(f"{path} names a column twice: {', '.join(columns)}")


def _read_parquet(file: IO[bytes], path: str, head: int | None) -> Table:
    try:
        parquet = pa.parquet.ParquetFile(file)
        _refuse_repeated(parquet.schema_arrow.names, path)
        return _stored(parquet.iter_batches(batch_size=BATCH_ROWS), parquet.schema_arrow, path, head)
    except pa.ArrowException as error:  # also for valid files with features that Arrow does not support
        raise UsageError(f"{path} cannot be read as Parquet: {first_line(error)}") from error


def _stored(batches: Any, schema: pa.Schema, path: str, head: int | None) -> Table:
    writer = TableWriter(schema)
    # The first batch is enough for the head.
    for batch in batches if head is None else (batch.slice(0, head) for batch in islice(batches, 1)):
        # Small batches, because reading a row decodes its batch's columns.
        for start in range(0, batch.num_rows, BATCH_ROWS):
            writer.append(batch.slice(start, BATCH_ROWS))
    stored = writer.finish()
    read = row_reader(schema)
    return Table(path, len(stored), lambda index: read(stored.row(index)), lambda index: f"row {index}")


_READERS: dict[str, Callable[[IO[bytes], str, int | None], Table]] = {
    ".jsonl": _read_json,
    ".json": _read_json,
    ".csv": _read_csv,
    ".parquet": _read_parquet,
}
"""Readers by file suffix."""
