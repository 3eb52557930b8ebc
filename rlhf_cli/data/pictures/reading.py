"""Loads, verifies and measures the images in rows."""

import os
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from rlhf_cli.config.pictures import PicturesConfig
from rlhf_cli.data.formats.conversations import Conversation, Document
from rlhf_cli.data.pictures.decoding import PictureFault, size_of
from rlhf_cli.data.pictures.marks import cells_of, placed
from rlhf_cli.data.pictures.sources import SourcePicture, digest_of, encoded_cell
from rlhf_cli.data.reading.columns import ONLY_TEXT, refuse_images, refuse_videos
from rlhf_cli.data.reading.sources import Row, Rows
from rlhf_cli.errors import UsageError
from rlhf_cli.models.vision.family import VisionFamily

BATCH_ROWS = 64
"""Rows with images per batch: their encoded images are in memory."""
# More threads do not help: measuring is limited by the other work of a row.
NUM_THREADS = min(8, len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)
"""Threads for measuring images. Pillow decodes without the GIL; the rest of a row's processing holds it."""

A = TypeVar("A")
_B = TypeVar("_B")


@dataclass(frozen=True)
class PictureReader:
    """Loads images of rows for a model family.

    Text models have no reader; `refuse_pictures` rejects their images.
    """

    family: VisionFamily
    settings: PicturesConfig

    def identity(self, rows: Rows) -> list[object]:
        """Return everything that affects the images of these rows, except their content, as JSON values."""
        # Relative paths depend on the folder of the file.
        folders = {str(self._folder(table.path)) for source in rows.sources for table in source.tables}
        return [self.settings.model_dump(mode="json"), repr(self.family), sorted(folders)]

    def example(self, row: Row, example: Conversation | Document) -> Conversation | Document:
        """Return the example with placed images. Raises RowFault, also for images with plain text."""
        if isinstance(example, Conversation):
            return self._placed(row, example)
        refuse_videos(row)
        column, cells = cells_of(row, self.settings.image_key)
        if cells:
            raise row.error(f"column {column!r} has pictures, and plain text has no place for them")
        return example

    def _placed(self, row: Row, conversation: Conversation) -> Conversation:
        """Return the conversation with a cell per marker. Raises RowFault if markers and images do not match."""
        refuse_videos(row)
        conversation = placed(row, conversation, self.settings.image_key)
        placeholder = self.family.placeholder
        for number, message in enumerate(conversation.messages, start=1):
            # The placeholder in text would be expanded to an image.
            if any(placeholder in text for text in (*message.pieces, message.reasoning)):
                raise row.error(f"message {number} has {placeholder} in its text, which stands for a picture")
        return conversation

    def without_pictures(self, row: Row) -> dict[str, object]:
        """Return the row's columns without images, which JSON does not support."""
        column, _ = cells_of(row, self.settings.image_key)
        return {name: value for name, value in row.items() if name != column}

    def pictures(self, row: Row, examples: Sequence[Conversation | Document]) -> list[tuple[SourcePicture, ...]]:
        """Return the images per example of a row. Raises RowFault for an unusable one."""
        found: dict[int, SourcePicture] = {}
        read: list[tuple[SourcePicture, ...]] = []
        for example in examples:
            cells = example.pictures if isinstance(example, Conversation) else ()
            if len(cells) > (most := self.settings.max_images_per_prompt):
                raise row.error(f"{len(cells):,} pictures are more than max_images_per_prompt {most:,}")
            for number, cell in enumerate(cells, start=1):
                # Both sides of a pair contain the same cell, so measure it once.
                if id(cell) not in found:
                    found[id(cell)] = self._read(row, number, cell)
            read.append(tuple(found[id(cell)] for cell in cells))
        return read

    def _read(self, row: Row, number: int, cell: object) -> SourcePicture:
        try:
            encoded = encoded_cell(cell, self._folder(row.file))
            contents = encoded.read()
            height, width = self.family.final_size(*size_of(contents))
        except OSError as error:
            raise row.error(f"picture {number} cannot be read: {error.strerror or error}") from error
        except PictureFault as error:
            raise row.error(f"picture {number}{_named(cell)} {error}") from error
        except UsageError as error:
            raise row.error(f"picture {number}{_named(cell)}: {error}") from error
        digest, run = digest_of(contents, height, width), self.family.run(height, width)
        return SourcePicture(encoded, digest, height, width, run)

    def _folder(self, file: str) -> Path:
        """Return the base folder for image paths in a file's rows."""
        given = self.settings.image_dir
        return (Path(given).expanduser() if given is not None else Path(file).parent).absolute()


def made_in_order(step: Callable[[A], _B], items: Iterable[A]) -> list[_B]:
    """Apply `step` to each item in threads. Returns results in order.

    Raises the exception of the first failing item, like a loop would. Steps only measure images: chat templates must be
    rendered by one thread at a time, because transformers tracks assistant turns in shared state.
    """
    with ThreadPoolExecutor(NUM_THREADS) as executor:
        return list(executor.map(step, items))


def _named(cell: object) -> str:
    """Return an image's name for messages."""
    path = cell.get("path") if isinstance(cell, dict) else cell
    return f" ({path:.80})" if isinstance(path, str) else ""


def refuse_pictures(row: Row, examples: Sequence[Conversation | Document]) -> None:
    """Raise RowFault if a row contains images, which text models do not support."""
    refuse_images(row)
    if any(example.pictures for example in examples if isinstance(example, Conversation)):
        raise row.error(f"its messages have pictures, but {ONLY_TEXT}")


def check_image_key(rows: Rows, reader: PictureReader | None) -> None:
    """Raise UsageError if no dataset has the configured image column."""
    key = None if reader is None else reader.settings.image_key
    if key is not None and not any(key in source.columns() for source in rows.sources):
        names = ", ".join(source.name for source in rows.sources)
        present = ", ".join(dict.fromkeys(column for source in rows.sources for column in source.columns()))
        raise UsageError(f"{names}: no column {key!r} (--image_key); columns present: {present}")
