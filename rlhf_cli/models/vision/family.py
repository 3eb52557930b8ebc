"""What a family of vision-language models does with pictures: their size, their tokens, and the tower's inputs."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch


@dataclass(frozen=True, slots=True)
class PictureRun:
    """The tokens that stand for one picture, in place of the one placeholder that the chat template writes.

    `grid` and `patches` as in `PlacedPicture`.
    """

    token_ids: tuple[int, ...]
    grid: tuple[int, int] | None
    patches: int = 0


class VisionFamily(Protocol):
    """How models of one family take pictures. Made from a model's folder, without its weights.

    `image_token` is the id of the placeholder, once a picture in a rendered prompt; `placeholder` is its text. `mark`
    is the text of a picture for prompts without a chat template: the placeholder with the tokens that frame it.
    """

    image_token: int
    placeholder: str
    mark: str

    def final_size(self, height: int, width: int) -> tuple[int, int]:
        """Return the size in which trainer and engine get a picture: within the bounds of pixels, as the model cuts it.

        Raise UsageError for a picture that the family does not take, such as a line of pixels.
        """
        ...

    def run(self, height: int, width: int) -> PictureRun:
        """Return the tokens of a picture of this final size."""
        ...

    def tower_inputs(self, pictures: Sequence[np.ndarray]) -> dict[str, torch.Tensor]:
        """Return the arguments of `get_image_features` for pictures in their final sizes, uint8 [height, width, 3]."""
        ...
