"""Rows that are bare lists of messages, as in Open-Reasoner-Zero's files, made into rows with columns.

Such a file is a list of pairs: a human's question, then an assistant's turn that holds `ground_truth` instead of text.
"""

from typing import Any

GROUND_TRUTH = "ground_truth"


def is_bare_dialogue(value: object) -> bool:
    """Return whether a row is a list of messages instead of an object with columns."""
    return isinstance(value, list) and bool(value) and all(isinstance(message, dict) for message in value)


def row_of_dialogue(messages: list[dict[str, object]]) -> dict[str, object]:
    """Return the row that a list of messages means: a prompt with its ground truth, or a conversation."""
    last = messages[-1]
    if GROUND_TRUTH not in last:
        return {"messages" if "role" in messages[0] else "conversations": messages}
    truth = last[GROUND_TRUTH]
    value = truth["value"] if isinstance(truth, dict) and "value" in truth else truth
    return {"prompt": messages[:-1], GROUND_TRUTH: value}


def row_of_numbered(row: dict[str, Any]) -> dict[str, object]:
    """Return the row, or the list it means if its columns are places of a list: `datasets` reads lists so."""
    places = [str(place) for place in range(len(row))]
    if not row or list(row) != places or not all(isinstance(message, dict) for message in row.values()):
        return row
    return row_of_dialogue(list(row.values()))
