"""Tables larger than memory: written once to a temporary Arrow file, then read through a memory map.

The file is unnamed, so that nothing remains even if the process is killed. It is in the system's temporary folder
(TMPDIR). Persistent tables are in `cache`.
"""

import collections.abc
import hashlib
import mmap
import tempfile
from collections.abc import Callable, Iterable
from typing import IO, Any, TypeVar

import numpy as np
import pyarrow as pa

_Item = TypeVar("_Item")


class TableWriter:
    """Writes record batches with one schema to a temporary or given file."""

    def __init__(self, schema: pa.Schema, file: IO[bytes] | None = None) -> None:
        self.schema = schema
        # Unnamed, so that the system removes it when the process ends.
        self.file: Any = file or tempfile.TemporaryFile()  # noqa: SIM115 (closed in finish)
        self._writer = pa.ipc.new_stream(self.file, schema)

    def append(self, batch: pa.RecordBatch) -> None:
        """Write a batch. Batches of some hundred rows are best, because rows are read from batches."""
        self._writer.write_batch(batch)

    def append_columns(self, columns: dict[str, list]) -> None:
        """Write a batch from a list of values per column."""
        self.append(pa.record_batch([pa.array(columns[f.name], f.type) for f in self.schema], schema=self.schema))

    def close(self) -> None:
        """End the stream of batches."""
        self._writer.close()
        # Flush before mapping, or the map would miss the last batch.
        self.file.flush()

    def mapped(self) -> "StoredTable":
        """Return everything written before `close` as a table."""
        # pa.memory_map requires a path. The table's buffers keep this mapping alive after the file is closed.
        mapped = mmap.mmap(self.file.fileno(), 0, access=mmap.ACCESS_READ)
        return StoredTable(pa.ipc.open_stream(pa.py_buffer(mapped)).read_all())

    def finish(self) -> "StoredTable":
        """Return everything written as a table. The writer cannot be used afterwards."""
        self.close()
        table = self.mapped()
        self.file.close()
        return table


class StoredTable:
    """Random access to an Arrow table, zero-copy for lists of numbers."""

    def __init__(self, table: pa.Table) -> None:
        # Empty batches would break the search for a row's batch.
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
        """Return a list cell as a read-only view of the file."""
        batch, position = self._find(row)
        return batch.column(name)[position].values.to_numpy()

    def column(self, name: str) -> np.ndarray:
        """Return a column of numbers or booleans."""
        parts = [batch.column(name).to_numpy(zero_copy_only=False) for batch in self._batches]
        return np.concatenate(parts) if parts else np.zeros(0)

    def lists(self, name: str) -> tuple[np.ndarray, np.ndarray]:
        """Return a column of number lists concatenated, and each list's length."""
        columns = [batch.column(name) for batch in self._batches]
        lengths = [column.value_lengths().to_numpy() for column in columns]
        values = [column.flatten().to_numpy() for column in columns]
        return np.concatenate(values or [np.zeros(0)]), np.concatenate(lengths or [np.zeros(0)]).astype(np.int64)

    def digest(self, names: Iterable[str]) -> str:
        """Hash columns of numbers, booleans, or lists of numbers or digests. Depends only on values, not on batches."""
        digest = hashlib.blake2b(digest_size=16)
        for name in names:
            # Hash lengths and values separately, so that batch boundaries do not matter.
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
        """Return some fields of each object in a list cell."""
        # `as_py` would convert all fields, including image contents.
        batch, position = self._find(row)
        cell = batch.column(name)[position].values
        return list(zip(*(cell.field(field).to_pylist() for field in names), strict=True))

    def views(self, name: str, row: int, field: str) -> list[memoryview | None]:
        """Return a bytes field of each object in a list cell, as views of the file."""
        batch, position = self._find(row)
        buffers = [value.as_buffer() for value in batch.column(name)[position].values.field(field)]
        return [None if buffer is None else memoryview(buffer) for buffer in buffers]

    def row(self, row: int) -> dict[str, Any]:
        """Return a row as Python values."""
        batch, position = self._find(row)
        return {name: column[position].as_py() for name, column in zip(self.names, batch.columns, strict=True)}


class StoredItems(collections.abc.Sequence[_Item]):
    """Table rows as items, created on access."""

    def __init__(self, table: StoredTable, item_at: Callable[[StoredTable, int], _Item]) -> None:
        self._table, self._item_at = table, item_at

    def __len__(self) -> int:
        return len(self._table)

    def __getitem__(self, index):  # type: ignore[no-untyped-def]
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        return self._item_at(self._table, int(index))
