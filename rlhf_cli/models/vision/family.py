"""Interface of a vision-language model family: image sizes and image tokens."""

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class PictureRun:
    """Tokens that replace the single image placeholder in a rendered chat template.

    `grid` and `patches` are the same as in `PlacedPicture`.
    """

    token_ids: tuple[int, ...]
    grid: tuple[int, int] | None
    patches: int = 0


class VisionFamily(Protocol):
    """Image handling for a model family, created from a model folder without weights.

    - `image_token`: placeholder ID, once per image in a rendered prompt.
    - `placeholder`: placeholder text.
    - `mark`: image text for prompts without a chat template, the placeholder with surrounding tokens.
    """

    image_token: int
    placeholder: str
    mark: str

    def final_size(self, height: int, width: int) -> tuple[int, int]:
        """Return the image size for trainer and engine: within the pixel bounds, as the model resizes it.

        Raises UsageError for an unsupported image, such as a line of pixels.
        """
        ...

    def run(self, height: int, width: int) -> PictureRun:
        """Return the tokens for an image with this final size."""
        ...
