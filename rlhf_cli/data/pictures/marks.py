"""Image positions in messages: one character per image until the chat template writes its placeholder.

A cell is an image as stored in a row: a path, bytes, a data URL, or an object with bytes and path.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace

from rlhf_cli.data.formats.conversations import MARK, Conversation, Message, Role
from rlhf_cli.data.reading.sources import Row

TEXT_MARK = "<image>"
"""Text marker in EasyR1, verl and LLaVA rows."""
_EITHER = re.compile(f"({MARK}|{TEXT_MARK})")
IMAGE_COLUMNS = ("images", "image")
_EMPTY: tuple[object, ...] = (None, "", b"", [], {})
CELL_KEYS = ("image", "path", "url")
"""Keys for an image in a part of type image, in Qwen and transformers messages, or in a cell."""
BASE64 = "base64"
"""Key for a base64 image without data URL prefix, in transformers messages."""

_Content = tuple[str, tuple[object, ...]]
"""Text with markers, and a cell per marker; None for an image from the row's column."""


def content_of_parts(row: Row, number: int, role: Role, parts: Sequence[object]) -> _Content:
    """Parse multi-part content of message `number` in OpenAI format. Raises RowFault for unsupported parts."""
    texts: list[str] = []
    cells: list[object] = []
    for part in parts:
        kind = part.get("type", "text") if isinstance(part, dict) else None
        if isinstance(part, dict) and kind in ("image", "image_url"):
            texts.append(MARK)
            cells.append(_cell_of_part(part))
        elif isinstance(part, dict) and kind == "text" and isinstance(part.get("text"), str):
            texts.append(part["text"])
        elif isinstance(part, dict) and isinstance(kind, str) and kind != "text":
            raise row.error(f"message {number} has a part of type {kind!r}: parts are text or image")
        else:
            raise row.error(f"message {number} has content that is not text: {list(parts)!r:.60}")
    if cells and role == "assistant":
        raise row.error(f"message {number} from assistant has a picture, and models write text alone")
    text = "".join(texts)
    # The marker character in text would be taken for an image.
    if cells and text.count(MARK) != len(cells):
        raise _own_mark(row, number)
    return text, tuple(cells)


def _cell_of_part(part: dict[str, object]) -> object:
    """Return the image in a part; None if it is in the row's column."""
    given = part.get("image_url")
    if isinstance(given, dict):
        given = given.get("url")
    # The order matters for parts with several keys: OpenAI's `image_url` comes first.
    held = [given, *(part.get(key) for key in CELL_KEYS), {BASE64: part.get(BASE64)}]
    return next((cell for cell in held if not _is_empty(cell)), None)


def _is_empty(cell: object) -> bool:
    """Return whether a cell contains no image."""
    if isinstance(cell, dict):
        return cell.get("bytes") is None and not any(cell.get(key) for key in (*CELL_KEYS, BASE64))
    return cell in _EMPTY


def _own_mark(row: Row, number: int) -> Exception:
    return row.error(f"message {number} has the character U+FFFC in its text, which stands for a picture here")


def cells_of(row: Row, image_key: str | None) -> tuple[str | None, list[object]]:
    """Return the row's image column, None without, and its cells.

    Raises:
        RowFault: both columns contain images, and none is set.
    """
    names = [name for name in _names(image_key) if name in row]
    filled = [name for name in names if _listed(row.get(name))]
    if len(filled) > 1:
        raise row.error(f"{' and '.join(filled)} both have pictures: choose one with --image_key")
    # An empty column still counts as an image column.
    name = next(iter(filled or names), None)
    return name, _listed(row.get(name)) if name else []


def _names(image_key: str | None) -> tuple[str, ...]:
    return (image_key,) if image_key else IMAGE_COLUMNS


def _listed(value: object) -> list[object]:
    return [cell for cell in (value if isinstance(value, list) else [value]) if not _is_empty(cell)]


def placed(row: Row, conversation: Conversation, image_key: str | None) -> Conversation:
    """Return the conversation with a cell for each marker.

    Text markers count only if the row has an image column. Images without any marker are placed before the first user
    text, as in TRL.

    Raises:
        RowFault: the numbers of markers and images differ, assistant text contains a marker, or user text contains one
        and the source has no image column.
    """
    column, cells = cells_of(row, image_key)
    messages = conversation.messages
    if column is None:
        _refuse_marks_without_column(row, messages, image_key)
    else:
        messages = tuple(_with_marks(row, number, m, bool(cells)) for number, m in enumerate(messages, start=1))
    # Cells of parts are already assigned; only free markers take images from the column.
    free = sum(cell is None for message in messages for cell in message.pictures)
    if cells and not any(message.pictures for message in messages):
        messages, free = _before_first_user(row, messages, len(cells)), len(cells)
    if free != len(cells):
        raise _unequal(row, column, marks=free, pictures=len(cells))
    if not any(message.pictures for message in messages):
        return conversation
    for number, message in enumerate(messages, start=1):
        if message.content.count(MARK) != len(message.pictures):
            raise _own_mark(row, number)
    # Images are assigned in the order of their markers.
    left = iter(cells)
    return replace(conversation, messages=tuple(_filled(message, left) for message in messages))


def _unequal(row: Row, column: str | None, *, marks: int, pictures: int) -> Exception:
    found = [f"{count:,} {word}{'' if count == 1 else 's'}" for count, word in ((marks, "mark"), (pictures, "picture"))]
    where = f"column {column!r}" if column else "no column of images"
    return row.error(f"{found[0]} in the messages, but {found[1]} in {where}")


def _refuse_marks_without_column(row: Row, messages: tuple[Message, ...], image_key: str | None) -> None:
    marked = [n for n, m in enumerate(messages, start=1) if m.role != "assistant" and TEXT_MARK in m.content]
    if marked and not any(message.pictures for message in messages):
        names, columns = _names(image_key), row.source.columns()
        if not any(name in columns for name in names):
            raise row.error(
                f"message {marked[0]} has the mark {TEXT_MARK}, and there is no column {' or '.join(names)}: "
                f"--image_key names the column of pictures; columns present: {', '.join(columns)}"
            )


def _with_marks(row: Row, number: int, message: Message, has_pictures: bool) -> Message:
    """Replace text markers with the single-character marker."""
    if TEXT_MARK not in message.content:
        return message
    if message.role == "assistant":
        if has_pictures:
            raise row.error(f"message {number} from assistant has the mark {TEXT_MARK}, and models write text alone")
        return message
    # Keep cells of parts, and add free markers for the text markers between them.
    own = iter(message.pictures)
    marks = _EITHER.findall(message.content)
    if marks.count(MARK) != len(message.pictures):
        raise _own_mark(row, number)
    cells = tuple(next(own) if mark == MARK else None for mark in marks)
    return replace(message, content=message.content.replace(TEXT_MARK, MARK), pictures=cells)


def _before_first_user(row: Row, messages: tuple[Message, ...], count: int) -> tuple[Message, ...]:
    first = next((place for place, message in enumerate(messages) if message.role == "user"), None)
    if first is None:
        raise row.error("the row has pictures, and no message of a user to put them into")
    user = messages[first]
    if MARK in user.content:
        raise _own_mark(row, first + 1)
    user = replace(user, content=MARK * count + user.content, pictures=(None,) * count)
    return (*messages[:first], user, *messages[first + 1 :])


def _filled(message: Message, left: Iterator[object]) -> Message:
    if not message.pictures:
        return message
    cells = tuple(next(left) if cell is None else cell for cell in message.pictures)
    return replace(message, pictures=cells)
