"""Conversation files: written as messages, read in all `rlhf sft` formats."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

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


def rows_of(session: Session, models: Sequence[str]) -> list[dict[str, object]]:
    """Return one row per model with its name and messages. Skips models with an empty answer, which cannot be trained
    on.
    """
    return [
        {"pretrain": name, **_row(session.messages(number))}
        for number, name in enumerate(models)
        # A model that answered some messages with nothing has no complete conversation.
        if all(turn.answers[number].strip() for turn in session.turns)
    ]


def _row(messages: Sequence[Message]) -> dict[str, object]:
    """Return a conversation's columns. Images are marked in the text, as in datasets."""
    plain = [{"role": m.role, "content": m.content} for m in messages]
    sources = [shown.source for m in messages for shown in m.pictures if isinstance(shown, ShownPicture)]
    if not sources:
        return {"messages": plain}
    return {
        "messages": [m | {"content": m["content"].replace(MARK, TEXT_MARK)} for m in plain],
        "images": sources,
    }


def write_conversation(path: Path, rows: Sequence[dict[str, object]], *, may_replace: bool) -> None:
    """Write the rows as JSON lines, or as a JSON list if the name ends with .json.

    Raises:
        UsageError: the file exists and may not be replaced, or cannot be written.
    """
    if path.exists() and not may_replace:
        raise UsageError(f"{path} already exists and was not written by this chat: choose another name")
    try:
        if path.suffix == ".json":
            path.write_text(json.dumps(list(rows), indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
        else:
            write_rows(path, rows)
    except OSError as error:
        raise UsageError(f"{path} cannot be written: {error.strerror}") from error


def read_conversation(path: Path, row: int, *, takes_pictures: bool) -> Conversation:
    """Read the conversation in a row, counted from 1, with images if the models support them.

    Raises:
        UsageError: the row does not exist, or an image is unusable.
    """
    if not path.is_file():
        raise UsageError(f"file not found: {path}")
    rows = load_rows(str(path), split="train", seed=0)
    if row > len(rows):
        raise UsageError(f"{path} has {len(rows):,} rows, not {row:,}")
    found = choose_format(rows.sources[0], Columns(None), data_format="auto").read(rows[row - 1])
    if not isinstance(found, Conversation):
        # `rlhf chat` continues conversations, and plain text has no turns to continue.
        raise UsageError(f"{path} contains plain text, not conversations")
    if not takes_pictures:
        refuse_pictures(rows[row - 1], [found])
        return found
    conversation = placed(rows[row - 1], found, None)
    folder = path.absolute().parent
    return replace(conversation, messages=tuple(_with_pictures(m, folder) for m in conversation.messages))


def _with_pictures(message: Message, folder: Path) -> Message:
    return replace(message, pictures=tuple(shown_picture(cell, folder) for cell in message.pictures))


def shown_picture(cell: object, folder: Path) -> ShownPicture:
    """Load the image in a dataset cell. Relative paths are resolved against the folder.

    Raises:
        UsageError: the image does not exist or is unreadable.
    """
    try:
        encoded = encoded_cell(cell, folder)
        picture = picture_of_contents(encoded.read())
    except PictureFault as fault:
        raise UsageError(f"the image {cell if isinstance(cell, str) else ''} {fault}") from fault
    except OSError as error:
        raise UsageError(f"cannot read image {cell}: {error.strerror}") from error
    source = encoded.path or f"data:image/png;base64,{png_in_base64(picture)}"
    return ShownPicture(source, picture)
