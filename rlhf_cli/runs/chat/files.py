"""Conversations in files of rows: written as messages, read in every format that `rlhf sft` reads."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rlhf_cli.data.formats.conversations import Conversation
from rlhf_cli.data.formats.table import choose_format
from rlhf_cli.data.reading.columns import Columns
from rlhf_cli.data.reading.sources import load_rows
from rlhf_cli.data.selection import write_rows
from rlhf_cli.errors import UsageError
from rlhf_cli.runs.chat.session import Session


def rows_of(session: Session, models: Sequence[str]) -> list[dict[str, Any]]:
    """Return a row for each model: its name and its messages. A model with an empty answer has none, because rows with
    an empty answer cannot be trained on.
    """
    return [
        {"pretrain": name, "messages": [{"role": m.role, "content": m.content} for m in session.messages(number)]}
        for number, name in enumerate(models)
        if all(turn.answers[number].strip() for turn in session.turns)
    ]


def write_conversation(path: Path, rows: Sequence[dict[str, Any]], *, may_replace: bool) -> None:
    """Write the rows to a file, a line each, or a JSON list if its name ends with .json.

    Raises:
        UsageError: there is such a file and it may not be replaced, or it cannot be written.
    """
    if path.exists() and not may_replace:
        raise UsageError(f"{path} is there already, and this chat has not written it: give another name")
    try:
        if path.suffix == ".json":
            path.write_text(json.dumps(list(rows), indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
        else:
            write_rows(path, rows)
    except OSError as error:
        raise UsageError(f"{path} cannot be written: {error.strerror}") from error


def read_conversation(path: Path, row: int) -> Conversation:
    """Return the conversation in a row, counted from 1. Raise UsageError if there is none."""
    if not path.is_file():
        raise UsageError(f"there is no file {path}")
    rows = load_rows(str(path), split="train", seed=0)
    if row > len(rows):
        raise UsageError(f"{path} has {len(rows):,} rows, not {row:,}")
    found = choose_format(rows.sources[0], Columns(None), data_format="auto").read(rows[row - 1])
    if not isinstance(found, Conversation):
        raise UsageError(f"{path} has plain text, not a conversation")
    return found
