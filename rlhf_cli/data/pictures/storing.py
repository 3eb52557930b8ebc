"""Storage of images in tables: additional columns for vision models."""

from collections.abc import Sequence

import numpy as np
import pyarrow as pa

from rlhf_cli.data.pictures.sources import EncodedPicture, Stamp, StandingPicture, placed_picture
from rlhf_cli.data.store import StoredTable
from rlhf_cli.models.vision.pictures import PlacedPicture

_PLACES, _DIGESTS, FILES = "picture_places", "picture_digests", "picture_files"
_COLUMNS = {
    _PLACES: pa.list_(pa.int32()),
    _DIGESTS: pa.list_(pa.binary(16)),
    FILES: pa.list_(
        pa.struct({"path": pa.string(), "size": pa.int64(), "changed": pa.int64(), "contents": pa.large_binary()})
    ),
}
_NUMBERS = 8
"""Per image in `_PLACES`: start, length, token, height, width, patches, grid rows and columns, -1 without a grid."""
_PATCHES = 5
"""Index of the patches."""


def schema_with_pictures(schema: pa.Schema, *, has_pictures: bool) -> pa.Schema:
    """Add the image columns to the schema for vision models."""
    return pa.schema([*schema, *pa.schema(_COLUMNS)]) if has_pictures else schema


def stored_pictures(pictures: Sequence[StandingPicture]) -> dict[str, object]:
    """Return the cells for an item's images."""
    return {
        _PLACES: [number for standing in pictures for number in _numbers(standing)],
        _DIGESTS: [standing.picture.digest for standing in pictures],
        FILES: [_file(standing.picture.encoded) for standing in pictures],
    }


def _numbers(standing: StandingPicture) -> tuple[int, ...]:
    source = standing.picture
    length = len(source.run.token_ids)
    size = source.height, source.width
    # -1 instead of null keeps the numbers in one flat column.
    return (standing.start, length, standing.token, *size, source.run.patches, *(source.run.grid or (-1, -1)))


def _file(encoded: EncodedPicture) -> dict[str, object]:
    stamp = encoded.stamp
    stamped = {} if stamp is None else {"size": stamp.size, "changed": stamp.changed}
    return {"path": encoded.path, "contents": encoded.contents, **stamped}


def pictures_at(table: StoredTable, row: int) -> tuple[PlacedPicture, ...]:
    """Return an item's images, () for text models."""
    if _PLACES not in table.names:
        return ()
    places = table.numbers(_PLACES, row).reshape(-1, _NUMBERS).tolist()
    if not places:
        return ()
    # Views avoid copying the encoded images.
    paths = [path for (path,) in table.fields(FILES, row, ("path",))]
    stored = zip(places, table.value(_DIGESTS, row), paths, table.views(FILES, row, "contents"), strict=True)
    return tuple(_picture(numbers, digest, path, contents) for numbers, digest, path, contents in stored)


def _picture(numbers: list[int], digest: bytes, path: str | None, contents: memoryview | None) -> PlacedPicture:
    start, length, token, height, width, patches, *grid = numbers
    return placed_picture(
        EncodedPicture(path, contents=contents),
        digest,
        size=(height, width),
        place=(start, length),
        token=token,
        grid=None if grid[0] < 0 else (grid[0], grid[1]),
        patches=patches,
    )


def patches_of(table: StoredTable) -> np.ndarray | None:
    """Return the image patches per item, int64 [N]; None for text models."""
    if _PLACES not in table.names:
        return None
    numbers, lengths = table.lists(_PLACES)
    # int64, since the sum over a dataset exceeds int32.
    sums = np.concatenate([[0], numbers.reshape(-1, _NUMBERS)[:, _PATCHES].cumsum(dtype=np.int64)])
    bounds = np.concatenate([[0], lengths.cumsum()]) // _NUMBERS
    found: np.ndarray = np.diff(sums[bounds])
    return found


def files_are_unchanged(table: StoredTable) -> bool:
    """Return whether all image files are unchanged since the table was made."""
    if FILES not in table.names:
        return True
    # Check each file once, however many rows use it.
    found: dict[str, Stamp] = {}
    for row in range(len(table)):
        for path, size, changed in table.fields(FILES, row, ("path", "size", "changed")):
            if path is not None:
                found[path] = Stamp(size, changed)
    return all(_is(path, stamp) for path, stamp in found.items())


def _is(path: str, stamp: Stamp) -> bool:
    try:
        return Stamp.of(path) == stamp
    except OSError:
        return False
