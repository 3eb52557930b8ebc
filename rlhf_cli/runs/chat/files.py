"""Conversations in files of rows: written as messages, read in every format that `rlhf sft` reads."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rlhf_cli.data.formats.conversations import MARK, Conversation, Message
from rlhf_cli.data.formats.table import choose_format
from rlhf_cli.data.pictures.decoding import PictureFault
from rlhf_cli.data.pictures.marks import TEXT_MARK, placed
from rlhf_cli.data.pictures.placing import picture_of_contents
from rlhf_cli.data.pictures.reading import refuse_pictures
from rlhf_cli.data.pictures.sources import encoded_cell
from rlhf_cli.data.reading.columns import Columns
from rlhf_cli.data.reading.sources import load_rows
from rlhf_cli.data.selection import write_rows
from rlhf_cli.errors import UsageError
from rlhf_cli.rewards.png import png_in_base64
from rlhf_cli.runs.chat.session import Session, ShownPicture


def rows_of(session: Session, models: Sequence[str]) -> list[dict[str, Any]]:
    """Return a row for each model: its name and its messages. A model with an empty answer has none, because rows with
    an empty answer cannot be trained on.
    """
    return [
        {"pretrain": name, **_row(session.messages(number))}
        for number, name in enumerate(models)
        if all(turn.answers[number].strip() for turn in session.turns)
    ]


def _row(messages: Sequence[Message]) -> dict[str, Any]:
    """Return the columns of a conversation; pictures stand at marks in the text, as data sets have them."""
    row: dict[str, Any] = {"messages": [{"role": m.role, "content": m.content} for m in messages]}
    sources = [shown.source for m in messages for shown in m.pictures if isinstance(shown, ShownPicture)]
    if not sources:
        return row
    return {
        "messages": [m | {"content": m["content"].replace(MARK, TEXT_MARK)} for m in row["messages"]],
        "images": sources,
    }


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


def read_conversation(path: Path, row: int, *, takes_pictures: bool) -> Conversation:
    """Return the conversation in a row, counted from 1, with its pictures if the models take some.

    Raises:
        UsageError: there is no such row, or a picture of it cannot be shown to the models.
    """
    if not path.is_file():
        raise UsageError(f"there is no file {path}")
    rows = load_rows(str(path), split="train", seed=0)
    if row > len(rows):
        raise UsageError(f"{path} has {len(rows):,} rows, not {row:,}")
    found = choose_format(rows.sources[0], Columns(None), data_format="auto").read(rows[row - 1])
    if not isinstance(found, Conversation):
        raise UsageError(f"{path} has plain text, not a conversation")
    if not takes_pictures:
        refuse_pictures(rows[row - 1], [found])
        return found
    conversation = placed(rows[row - 1], found, None)
    folder = path.absolute().parent
    return replace(conversation, messages=tuple(_with_pictures(m, folder) for m in conversation.messages))


def _with_pictures(message: Message, folder: Path) -> Message:
    return replace(message, pictures=tuple(shown_picture(cell, folder) for cell in message.pictures))


def shown_picture(cell: object, folder: Path) -> ShownPicture:
    """Return the picture in a cell of a row, or of a path; relative paths begin in the folder.

    Raises:
        UsageError: there is no picture that can be read.
    """
    try:
        encoded = encoded_cell(cell, folder)
        picture = picture_of_contents(encoded.read())
    except PictureFault as fault:
        raise UsageError(f"the picture {cell if isinstance(cell, str) else ''} {fault}") from fault
    except OSError as error:
        raise UsageError(f"the picture {cell} cannot be read: {error.strerror}") from error
    source = encoded.path or f"data:image/png;base64,{png_in_base64(picture)}"
    return ShownPicture(source, picture)
