"""Images without a row, from requests and chats, and their positions in token IDs."""

from collections.abc import Sequence
from functools import partial

from rlhf_cli.data.pictures.decoding import pixels_of, resized, size_of
from rlhf_cli.data.pictures.expanding import with_runs
from rlhf_cli.data.pictures.sources import Contents, digest_of
from rlhf_cli.errors import UsageError
from rlhf_cli.models.vision.family import VisionFamily
from rlhf_cli.models.vision.pictures import Picture, PlacedPicture


def picture_of_contents(contents: Contents) -> Picture:
    """Load an encoded image at its original size. Raises PictureFault if it is damaged or unsupported."""
    height, width = size_of(contents)
    # Load pixels lazily: a request may be rejected before they are needed.
    return Picture(digest_of(contents, height, width).hex(), height, width, partial(pixels_of, contents, height, width))


def placed_pictures(
    ids: list[int], pictures: Sequence[Picture], family: VisionFamily
) -> tuple[list[int], tuple[PlacedPicture, ...]]:
    """Expand image placeholders in the token IDs. Returns the IDs and the placed images.

    Raises:
        UsageError: the numbers of placeholders and images differ, or the model does not support an image.
    """
    found = ids.count(family.image_token)
    if found != len(pictures):
        raise UsageError(
            f"the text's number of placeholders {family.placeholder} is {found}, its number of pictures {len(pictures)}"
        )
    fitted = [_fitted(picture, family) for picture in pictures]
    runs = [family.run(picture.height, picture.width) for picture in fitted]
    ids, starts = with_runs(ids, [run.token_ids for run in runs], family.image_token)
    return ids, tuple(
        PlacedPicture(picture, start, len(run.token_ids), family.image_token, run.grid, run.patches)
        for picture, start, run in zip(fitted, starts, runs, strict=True)
    )


def _fitted(picture: Picture, family: VisionFamily) -> Picture:
    """Resize the image for the model. A policy of the same type has already sent it at this size."""
    height, width = family.final_size(picture.height, picture.width)
    if (height, width) == (picture.height, picture.width):
        return picture
    # The digest includes the size, because another size is another image for caches.
    return Picture(f"{picture.digest} {height} {width}", height, width, lambda: resized(picture.pixels, height, width))
