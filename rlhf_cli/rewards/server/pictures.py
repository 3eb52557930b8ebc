"""Pictures of requests: text in base64, never a path or an address, which would read files of the server's machine."""

from collections.abc import Sequence
from functools import partial

from rlhf_cli.data.pictures.decoding import PictureFault, pixels_of, size_of
from rlhf_cli.data.pictures.sources import digest_of, encoded_base64
from rlhf_cli.models.vision.pictures import Picture


def received_pictures(images: Sequence[Sequence[str]]) -> list[tuple[Picture, ...]]:
    """Return the pictures of each text, checked and in their own sizes; `data:` URLs or base64 alone.

    Raises:
        PictureFault: a picture cannot be read; the message names the text, counted from 0, and the picture.
    """
    return [
        tuple(_received(url, f"picture {place} of text {number} of query") for place, url in enumerate(its, 1))
        for number, its in enumerate(images)
    ]


def _received(url: str, where: str) -> Picture:
    try:
        contents = encoded_base64(url)
        height, width = size_of(contents)
    except PictureFault as fault:
        raise PictureFault(f"{where} {fault}") from fault
    return Picture(digest_of(contents, height, width).hex(), height, width, partial(pixels_of, contents, height, width))
