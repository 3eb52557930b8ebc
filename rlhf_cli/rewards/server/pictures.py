"""Image decoding for requests.

Only base64 is accepted: paths and URLs from clients would read files on the server or reach into its network.
"""

from collections.abc import Sequence

from rlhf_cli.data.pictures.decoding import PictureFault
from rlhf_cli.data.pictures.placing import picture_of_contents
from rlhf_cli.data.pictures.sources import encoded_base64
from rlhf_cli.models.vision.pictures import Picture


def received_pictures(images: Sequence[Sequence[str]]) -> list[tuple[Picture, ...]]:
    """Decode the images for each text from `data:` URLs or base64, at original size. Equal ones are decoded once.

    Raises:
        PictureFault: an image is invalid. The message names the text, counted from 0, and the image, counted from 1.
    """
    decoded: dict[str, Picture] = {}
    for number, row in enumerate(images):
        for place, url in enumerate(row, 1):
            if url not in decoded:
                decoded[url] = _received(url, f"image {place} for query text {number}")
    return [tuple(decoded[url] for url in row) for row in images]


def _received(url: str, where: str) -> Picture:
    try:
        return picture_of_contents(encoded_base64(url))
    except PictureFault as fault:
        raise PictureFault(f"{where} {fault}") from fault
