"""Images as stored in datasets, decoded when a model or engine needs them."""

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
"""An encoded image in memory."""


@dataclass(frozen=True, slots=True)
class Stamp:
    """Size in bytes and modification time of a file, to detect replacement."""

    size: int
    changed: int

    @classmethod
    def of(cls, path: str) -> "Stamp":
        """Return a file's stamp. Raises OSError if it does not exist."""
        found = Path(path).stat()
        return cls(found.st_size, found.st_mtime_ns)


@dataclass(frozen=True, slots=True)
class EncodedPicture:
    """An encoded image: a file with its stamp, or bytes, possibly a view of a mapped table."""

    path: str | None = None
    stamp: Stamp | None = None
    contents: Contents | None = field(default=None, repr=False)

    def read(self) -> Contents:
        """Return the bytes. Raises OSError if the file does not exist."""
        return self.contents if self.contents is not None else Path(self.path or "").read_bytes()


@dataclass(frozen=True, slots=True)
class SourcePicture:
    """A row's image: encoded, with its final size and tokens."""

    encoded: EncodedPicture
    digest: bytes
    height: int
    width: int
    run: PictureRun


@dataclass(frozen=True, slots=True)
class StandingPicture:
    """A row's image with its first token at `start` in a sequence; `token` as in `PlacedPicture`."""

    picture: SourcePicture
    start: int
    token: int

    @property
    def stop(self) -> int:
        """End position of the image's tokens (exclusive)."""
        return self.start + len(self.picture.run.token_ids)


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
    """Return an image in a sequence, with pixels loaded on access."""
    return PlacedPicture(
        Picture(digest.hex(), *size, _PixelReader(encoded, digest, size)), *place, token, grid, patches
    )


def digest_of(contents: Contents, height: int, width: int) -> bytes:
    """Hash the content and the final size."""
    digest = hashlib.blake2b(contents, digest_size=16)
    digest.update(f" {height} {width}".encode())
    return digest.digest()


@dataclass(frozen=True, slots=True)
class _PixelReader:
    """Loads the pixels of an encoded image at its final size.

    Pickling stores the encoded bytes: the path may not exist on another machine, and pixels are several times as large.
    """

    encoded: EncodedPicture
    digest: bytes
    size: tuple[int, int]

    def __call__(self) -> np.ndarray:
        """Return the pixels, uint8 [height, width, 3]. Raises RunError if the file has changed."""
        return pixels_of(self._contents(), *self.size)

    def _contents(self) -> Contents:
        try:
            contents = self.encoded.read()
        except OSError as error:
            raise RunError(f"picture {self.encoded.path} cannot be read any more: {error.strerror or error}") from error
        # Compare the content, not the stamp: copying a folder changes times.
        if digest_of(contents, *self.size) != self.digest:
            raise RunError(f"picture {self.encoded.path} was changed since the data were read: start again")
        return contents

    def __reduce__(self) -> tuple[type["_PixelReader"], tuple[EncodedPicture, bytes, tuple[int, int]]]:
        # `bytes` copies a view of the mapped table, which cannot be pickled.
        encoded = EncodedPicture(self.encoded.path, contents=bytes(self._contents()))
        return _PixelReader, (encoded, self.digest, self.size)


def encoded_cell(cell: object, folder: Path) -> EncodedPicture:
    """Return the image in a cell. Relative paths start at `folder`. Raises PictureFault if it does not exist."""
    # Hugging Face stores images as an object with bytes and path; the path may not exist here.
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
    # Some datasets store file URLs.
    return _of_file(folder / cell.removeprefix("file://"))


def encoded_base64(text: str) -> bytes:
    """Decode a `data:` URL or base64 text. Raises PictureFault for other text, such as paths."""
    return _of_data_url(text) if text.startswith("data:") else _of_base64(text)


def _of_file(path: Path) -> EncodedPicture:
    if not path.is_file():
        raise PictureFault(f"is not there: no file {str(path)!r} (--image_dir names the folder of pictures)")
    return EncodedPicture(str(path), Stamp.of(str(path)))


def _of_data_url(url: str) -> bytes:
    """Decode 'data:image/png;base64,...'."""
    head, _, text = url.partition(",")
    if not head.endswith(";base64"):
        raise PictureFault(f"is no base64 text: its address begins with {head[:40]!r}")
    return _of_base64(text)


def _of_base64(text: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise PictureFault(f"is no base64 text: {error}") from error
