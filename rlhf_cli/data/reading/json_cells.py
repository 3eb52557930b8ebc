"""JSON cells in Parquet, Arrow, CSV and `datasets`: as text, structs or maps.

Distinguishes a file's nulls from those added by Arrow: a struct has the keys of all rows, so missing keys become null.
These are removed. Nulls in lists, maps and JSON text are intentional and kept. Dates and times become ISO 8601 text,
decimals become numbers.
"""

import json
from collections.abc import Callable
from typing import Any

import pyarrow as pa

_Reader = Callable[[Any], Any]

_LISTS = (
    pa.types.is_list,
    pa.types.is_large_list,
    pa.types.is_fixed_size_list,
    pa.types.is_list_view,
    pa.types.is_large_list_view,
)


def row_reader(schema: pa.Schema) -> _Reader:
    """Return a function that restores a row from Arrow's form. Columns may be null."""
    readers = {field.name: _reader(field.type) for field in schema}

    def read(row: dict[str, object]) -> dict[str, object]:
        return {name: reader(row[name]) for name, reader in readers.items()}

    return read


def _reader(kind: pa.DataType) -> _Reader:
    # Arrow's JSON type stores text.
    if isinstance(kind, pa.JsonType):
        return parsed
    if pa.types.is_dictionary(kind) or pa.types.is_run_end_encoded(kind):
        return _reader(kind.value_type)
    if pa.types.is_decimal(kind):
        # Decimals with scale 0 are integers.
        number = int if kind.scale <= 0 else float
        return lambda value: None if value is None else number(value)
    if pa.types.is_temporal(kind):
        return lambda value: (
            value.isoformat() if hasattr(value, "isoformat") else value if value is None else str(value)
        )
    if pa.types.is_struct(kind):
        return _struct_reader({field.name: _reader(field.type) for field in kind})
    # Maps keep their nulls, unlike structs, because all keys were written.
    if pa.types.is_map(kind):
        item = _reader(kind.item_type)
        return lambda value: None if value is None else {key: item(entry) for key, entry in value}
    if any(is_kind(kind) for is_kind in _LISTS):
        entry_of = _reader(kind.value_type)
        return lambda value: None if value is None else [entry_of(entry) for entry in value]
    return lambda value: value


def _struct_reader(readers: dict[str, _Reader]) -> _Reader:
    def read(value: dict[str, object] | None) -> dict[str, object] | None:
        if value is None:
            return None
        # Arrow gives a struct the keys of all rows, so a null means that the key was absent.
        return {name: reader(value[name]) for name, reader in readers.items() if value[name] is not None}

    return read


def parsed(value: object) -> Any:
    """Parse JSON text. Other values, and other text, are returned unchanged."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError):  # Python rejects some valid JSON: too many digits, too deep
        return value


def records(value: object) -> object:
    """Return a list of objects in any storage form: JSON text, JSON text per entry, or an object of lists.

    Older `datasets` versions convert a list of objects to an object of lists. Other values are returned unchanged.
    """
    found = parsed(value)
    if isinstance(found, list):
        found = [parsed(entry) for entry in found]
    elif isinstance(found, dict) and found and all(isinstance(entry, list) for entry in found.values()):
        # Unequal lengths are an object with lists, not a list of objects.
        length = max(map(len, found.values()))
        if any(len(entry) != length for entry in found.values()):
            return value
        found = [{key: entry[place] for key, entry in found.items()} for place in range(length)]
    are_objects = isinstance(found, list) and all(isinstance(entry, dict) for entry in found)
    return found if are_objects else value
