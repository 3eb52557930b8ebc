"""Converts rows that are bare message lists, as in Open-Reasoner-Zero, to rows with columns.

Such a file is a list of pairs: a human question, and an assistant turn with `ground_truth` instead of text.
"""

from typing import Any

_GROUND_TRUTH = "ground_truth"


def is_bare_dialogue(value: object) -> bool:
    """Return whether a row is a message list instead of an object with columns."""
    return isinstance(value, list) and bool(value) and all(isinstance(message, dict) for message in value)


def row_of_dialogue(messages: list[dict[str, object]]) -> dict[str, object]:
    """Convert a message list to a row: a prompt with ground truth, or a conversation."""
    last = messages[-1]
    if _GROUND_TRUTH not in last:
        # ShareGPT messages have "from" instead of "role".
        return {"messages" if "role" in messages[0] else "conversations": messages}
    truth = last[_GROUND_TRUTH]
    value = truth["value"] if isinstance(truth, dict) and "value" in truth else truth
    return {"prompt": messages[:-1], _GROUND_TRUTH: value}


def row_of_numbered(row: dict[str, Any]) -> dict[str, object]:
    """Convert a row with numbered columns back to a list: `datasets` reads lists that way."""
    places = [str(place) for place in range(len(row))]
    if not row or list(row) != places or not all(isinstance(message, dict) for message in row.values()):
        return row
    return row_of_dialogue(list(row.values()))
