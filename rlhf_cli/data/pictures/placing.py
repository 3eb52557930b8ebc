"""Pictures that come without a row, as in requests and chats, and their places in token ids."""

from collections.abc import Sequence
from functools import partial

from rlhf_cli.data.pictures.decoding import pixels_of, resized, size_of
from rlhf_cli.data.pictures.expanding import with_runs
from rlhf_cli.data.pictures.sources import Contents, digest_of
from rlhf_cli.errors import UsageError
from rlhf_cli.models.vision.family import VisionFamily
from rlhf_cli.models.vision.pictures import Picture, PlacedPicture


def picture_of_contents(contents: Contents) -> Picture:
    """Return an encoded picture in its own size. Raise PictureFault if it is broken or of a kind not read."""
    height, width = size_of(contents)
    return Picture(digest_of(contents, height, width).hex(), height, width, partial(pixels_of, contents, height, width))


def placed_pictures(
    ids: list[int], pictures: Sequence[Picture], family: VisionFamily
) -> tuple[list[int], tuple[PlacedPicture, ...]]:
    """Return the ids with the tokens of each picture in place of its placeholder, and the pictures there.

    Raises:
        UsageError: placeholders and pictures differ in number, or the model does not take a picture.
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
    """Return the picture in the size that the model takes; a policy of the same kind has sent it in this size."""
    height, width = family.final_size(picture.height, picture.width)
    if (height, width) == (picture.height, picture.width):
        return picture
    return Picture(f"{picture.digest} {height} {width}", height, width, lambda: resized(picture.pixels, height, width))
