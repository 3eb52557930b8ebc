"""Pictures as data sets have them, and their way to pixels: read when a model or an engine needs them."""

import base64
import binascii
import hashlib
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from rlhf_cli.data.pictures.decoding import PictureFault, pixels_of
from rlhf_cli.data.pictures.marks import BASE64, CELL_KEYS
from rlhf_cli.errors import RunError
from rlhf_cli.models.vision.family import PictureRun
from rlhf_cli.models.vision.pictures import Picture, PlacedPicture

Contents = bytes | memoryview
"""An encoded picture in memory."""


@dataclass(frozen=True, slots=True)
class Stamp:
    """The size in bytes and the time of change of a file: other values mean that it was replaced."""

    size: int
    changed: int

    @classmethod
    def of(cls, path: str) -> "Stamp":
        """Return the stamp of a file. Raise OSError if there is none."""
        found = Path(path).stat()
        return cls(found.st_size, found.st_mtime_ns)


@dataclass(frozen=True, slots=True)
class EncodedPicture:
    """An encoded picture: a file with its stamp, or bytes, which may be a view of a mapped table."""

    path: str | None = None
    stamp: Stamp | None = None
    contents: Contents | None = field(default=None, repr=False)

    def read(self) -> Contents:
        """Return the bytes. Raise OSError if the file is not there."""
        return self.contents if self.contents is not None else Path(self.path or "").read_bytes()


@dataclass(frozen=True, slots=True)
class SourcePicture:
    """A picture of a row: encoded, in its final size, and the tokens that stand for it."""

    encoded: EncodedPicture
    digest: bytes
    height: int
    width: int
    run: PictureRun


@dataclass(frozen=True, slots=True)
class StandingPicture:
    """A picture of a row whose run of tokens begins at `start` in a sequence; `token` as in `PlacedPicture`."""

    picture: SourcePicture
    start: int
    token: int

    @property
    def stop(self) -> int:
        """The position behind the run."""
        return self.start + len(self.picture.run.token_ids)

    def placed(self) -> PlacedPicture:
        """Return the record that sequences have."""
        source = self.picture
        return placed_picture(
            source.encoded,
            source.digest,
            size=(source.height, source.width),
            place=(self.start, len(source.run.token_ids)),
            token=self.token,
            grid=source.run.grid,
            patches=source.run.patches,
        )


def placed_picture(
    encoded: EncodedPicture,
    digest: bytes,
    *,
    size: tuple[int, int],
    place: tuple[int, int],
    token: int,
    grid: tuple[int, int] | None,
    patches: int,
) -> PlacedPicture:
    """Return a picture in a sequence whose pixels are read when they are asked for."""
    return PlacedPicture(Picture(digest.hex(), *size, PixelReader(encoded, digest, size)), *place, token, grid, patches)


def digest_of(contents: Contents, height: int, width: int) -> bytes:
    """Return a hash of the contents and the final size."""
    digest = hashlib.blake2b(contents, digest_size=16)
    digest.update(f" {height} {width}".encode())
    return digest.digest()


@dataclass(frozen=True, slots=True)
class PixelReader:
    """Reads the pixels of an encoded picture in its final size. Pickled it has the bytes: a path may mean nothing on
    another machine, and pixels are several times as large.
    """

    encoded: EncodedPicture
    digest: bytes
    size: tuple[int, int]

    def __call__(self) -> np.ndarray:
        """Return the pixels, uint8 [height, width, 3]. Raise RunError if the file is another one now."""
        return pixels_of(self._contents(), *self.size)

    def _contents(self) -> Contents:
        try:
            contents = self.encoded.read()
        except OSError as error:
            raise RunError(f"picture {self.encoded.path} cannot be read any more: {error.strerror or error}") from error
        if digest_of(contents, *self.size) != self.digest:
            raise RunError(f"picture {self.encoded.path} was changed since the data were read: start again")
        return contents

    def __reduce__(self) -> tuple[type["PixelReader"], tuple[EncodedPicture, bytes, tuple[int, int]]]:
        encoded = EncodedPicture(self.encoded.path, contents=bytes(self._contents()))
        return PixelReader, (encoded, self.digest, self.size)


def encoded_cell(cell: object, folder: Path) -> EncodedPicture:
    """Return the picture in a cell; relative paths begin in `folder`. Raise PictureFault if it is not there."""
    if isinstance(cell, dict) and cell.get("bytes") is not None:
        cell = cell["bytes"]
    elif isinstance(cell, dict):
        if cell.get(BASE64):
            return EncodedPicture(contents=_of_base64(str(cell[BASE64])))
        cell = next((cell[key] for key in CELL_KEYS if cell.get(key)), None)
    if isinstance(cell, bytes):
        return EncodedPicture(contents=cell)
    if not isinstance(cell, str):
        raise PictureFault(f"is neither a path nor bytes: {cell!r:.40}")
    if cell.startswith("data:"):
        return EncodedPicture(contents=_of_data_url(cell))
    if cell.startswith(("http://", "https://")):
        raise PictureFault("is on the web: nothing is downloaded for a row, save it as a file")
    return _of_file(folder / cell.removeprefix("file://"))


def encoded_base64(text: str) -> bytes:
    """Return the bytes of a `data:` URL or of base64 text. Raise PictureFault for other texts, such as paths."""
    return _of_data_url(text) if text.startswith("data:") else _of_base64(text)


def _of_file(path: Path) -> EncodedPicture:
    if not path.is_file():
        raise PictureFault(f"is not there: no file {str(path)!r} (--image_dir names the folder of pictures)")
    return EncodedPicture(str(path), Stamp.of(str(path)))


def _of_data_url(url: str) -> bytes:
    """Return the bytes of 'data:image/png;base64,...'."""
    head, _, text = url.partition(",")
    if not head.endswith(";base64"):
        raise PictureFault(f"is no base64 text: its address begins with {head[:40]!r}")
    return _of_base64(text)


def _of_base64(text: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise PictureFault(f"is no base64 text: {error}") from error
