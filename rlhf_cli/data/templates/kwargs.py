"""Variables of a chat template's own, such as Qwen 3's `enable_thinking`: of the settings, and of single rows."""

import json
from collections.abc import Mapping

from rlhf_cli.data.reading.sources import Row

KWARGS_COLUMN = "chat_template_kwargs"
"""Column of the same name as the setting, as TRL has it."""


def template_kwargs_of(row: Row) -> dict[str, object]:
    """Return the row's own variables: an object, or JSON text of one; none without the column.

    Parquet gives every row the entries of all rows; an entry without a value is none.

    Raises UsageError naming the row if the cell is no object.
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
