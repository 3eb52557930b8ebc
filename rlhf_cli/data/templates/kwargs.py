"""Chat template variables such as Qwen 3's `enable_thinking`, from the settings or per row."""

import json
from collections.abc import Mapping

from rlhf_cli.data.reading.sources import Row

KWARGS_COLUMN = "chat_template_kwargs"
"""Column with the same name as the setting, as in TRL."""


def template_kwargs_of(row: Row) -> dict[str, object]:
    """Return the row's template variables from an object or JSON text; {} without the column.

    Parquet adds the entries of all rows to each row, so entries without a value are removed.

    Raises UsageError with the row if the cell is not an object.
    """
    cell = row.get(KWARGS_COLUMN)
    try:
        value = json.loads(cell) if isinstance(cell, str) and cell.strip() else cell
    except (ValueError, RecursionError):
        value = cell
    if value is None or value == "":
        return {}
    if not isinstance(value, Mapping):
        raise row.error(f"column {KWARGS_COLUMN!r} is no object of variables but {cell!r:.60}")
    return {name: entry for name, entry in value.items() if entry is not None}
