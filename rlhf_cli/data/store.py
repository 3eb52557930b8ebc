"""Tables too large for memory: written once to a temporary Arrow file, then read through a memory map.

The file never has a name, so that nothing is left behind even if the process is killed while it writes. It lies in
the system's folder for temporary files (TMPDIR). Tables that are kept for later runs are in `cache`.
"""

import collections.abc
import hashlib
import mmap
import tempfile
from collections.abc import Callable, Iterable
from typing import IO, Any, TypeVar

import numpy as np
import pyarrow as pa

Item = TypeVar("Item")


class TableWriter:
    """Collects record batches of one schema in a file: a temporary one, or one opened for writing and reading."""

    def __init__(self, schema: pa.Schema, file: IO[bytes] | None = None) -> None:
        self.schema = schema
        self.file: Any = file or tempfile.TemporaryFile()  # noqa: SIM115 (closed in finish)
        self._writer = pa.ipc.new_stream(self.file, schema)

    def append(self, batch: pa.RecordBatch) -> None:
        """Write a batch; reading is by row within batches, so some hundreds of rows each are best."""
        self._writer.write_batch(batch)

    def append_columns(self, columns: dict[str, list]) -> None:
        """Write a batch from one list of values per column."""
        self.append(pa.record_batch([pa.array(columns[f.name], f.type) for f in self.schema], schema=self.schema))

    def close(self) -> None:
        """End the stream of batches."""
        self._writer.close()
        self.file.flush()

    def mapped(self) -> "StoredTable":
        """Return the table of everything written before `close`."""
        # Not by pa.memory_map, which wants a path; the mapping outlives the file, as buffers of the table hold it.
        mapped = mmap.mmap(self.file.fileno(), 0, access=mmap.ACCESS_READ)
        return StoredTable(pa.ipc.open_stream(pa.py_buffer(mapped)).read_all())

    def finish(self) -> "StoredTable":
        """Return the table of everything written; the writer cannot be used afterwards."""
        self.close()
        table = self.mapped()
        self.file.close()
        return table


class StoredTable:
    """Random access to the rows of an Arrow table, zero-copy for lists of numbers."""

    def __init__(self, table: pa.Table) -> None:
        self._batches = [batch for batch in table.to_batches() if batch.num_rows]
        self._starts = np.cumsum([0] + [batch.num_rows for batch in self._batches])
        self.names: list[str] = table.schema.names

    def __len__(self) -> int:
        return int(self._starts[-1])

    def _find(self, row: int) -> tuple[pa.RecordBatch, int]:
        if not 0 <= row < len(self):
            raise IndexError(f"row {row} of {len(self)}")
        number = int(np.searchsorted(self._starts, row, side="right")) - 1
        return self._batches[number], row - int(self._starts[number])

    def numbers(self, name: str, row: int) -> np.ndarray:
        """Return a cell of a list column as a read-only view of the file."""
        batch, position = self._find(row)
        return batch.column(name)[position].values.to_numpy()

    def column(self, name: str) -> np.ndarray:
        """Return a whole column of plain numbers or truths."""
        parts = [batch.column(name).to_numpy(zero_copy_only=False) for batch in self._batches]
        return np.concatenate(parts) if parts else np.zeros(0)

    def lists(self, name: str) -> tuple[np.ndarray, np.ndarray]:
        """Return a whole column of lists of numbers end to end, and the length of each list."""
        columns = [batch.column(name) for batch in self._batches]
        lengths = [column.value_lengths().to_numpy() for column in columns]
        values = [column.flatten().to_numpy() for column in columns]
        return np.concatenate(values or [np.zeros(0)]), np.concatenate(lengths or [np.zeros(0)]).astype(np.int64)

    def digest(self, names: Iterable[str]) -> str:
        """Return a hash of columns of numbers, truths, or lists of numbers or digests: of their values, however they
        are stored.
        """
        digest = hashlib.blake2b(digest_size=16)
        for name in names:
            lengths, values = hashlib.blake2b(), hashlib.blake2b()
            for batch in self._batches:
                column = batch.column(name)
                if pa.types.is_list(column.type):
                    lengths.update(column.value_lengths().to_numpy().tobytes())
                    column = column.flatten()
                is_digests = pa.types.is_fixed_size_binary(column.type)
                values.update(
                    b"".join(column.to_pylist()) if is_digests else column.to_numpy(zero_copy_only=False).tobytes()
                )
            digest.update(f"{name} {lengths.hexdigest()} {values.hexdigest()} ".encode())
        return digest.hexdigest()

    def value(self, name: str, row: int) -> Any:
        """Return a cell as a Python value."""
        batch, position = self._find(row)
        return batch.column(name)[position].as_py()

    def fields(self, name: str, row: int, names: tuple[str, ...]) -> list[tuple[Any, ...]]:
        """Return some fields of each object in a cell of a list of objects."""
        batch, position = self._find(row)
        cell = batch.column(name)[position].values
        return list(zip(*(cell.field(field).to_pylist() for field in names), strict=True))

    def views(self, name: str, row: int, field: str) -> list[memoryview | None]:
        """Return a field of bytes of each object in a cell of a list of objects, as views of the file."""
        batch, position = self._find(row)
        buffers = [value.as_buffer() for value in batch.column(name)[position].values.field(field)]
        return [None if buffer is None else memoryview(buffer) for buffer in buffers]

    def row(self, row: int) -> dict[str, Any]:
        """Return a whole row as Python values."""
        batch, position = self._find(row)
        return {name: column[position].as_py() for name, column in zip(self.names, batch.columns, strict=True)}


class StoredItems(collections.abc.Sequence[Item]):
    """Rows of a table as items, each made when it is asked for."""

    def __init__(self, table: StoredTable, item_at: Callable[[StoredTable, int], Item]) -> None:
        self._table, self._item_at = table, item_at

    def __len__(self) -> int:
        return len(self._table)

    def __getitem__(self, index):  # type: ignore[no-untyped-def]
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        return self._item_at(self._table, int(index))
