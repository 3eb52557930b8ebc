"""Pictures of requests: text in base64, never a path or an address, which would read files of the server's machine."""

from collections.abc import Sequence

from rlhf_cli.data.pictures.decoding import PictureFault
from rlhf_cli.data.pictures.placing import picture_of_contents
from rlhf_cli.data.pictures.sources import encoded_base64
from rlhf_cli.models.vision.pictures import Picture


def received_pictures(images: Sequence[Sequence[str]]) -> list[tuple[Picture, ...]]:
    """Return the pictures of each text, checked and in their own sizes; `data:` URLs or base64 alone. Equal ones are
    read once.

    Raises:
        PictureFault: a picture cannot be read; the message names the text, counted from 0, and the picture.
    """
    found: dict[str, Picture] = {}
    for number, its in enumerate(images):
        for place, url in enumerate(its, 1):
            if url not in found:
                found[url] = _received(url, f"picture {place} of text {number} of query")
    return [tuple(found[url] for url in its) for its in images]


def _received(url: str, where: str) -> Picture:
    try:
        return picture_of_contents(encoded_base64(url))
    except PictureFault as fault:
        raise PictureFault(f"{where} {fault}") from fault
