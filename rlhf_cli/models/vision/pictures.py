"""Pictures on their way from data to vision towers and rollout engines.

A picture stands in a sequence as a run of tokens, of which some are placeholders: the features of the vision tower
take their place. Which tokens these are comes from the prompt alone, so a placeholder that a model samples is a token
like any other one.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch


@dataclass(frozen=True, eq=False)
class Picture:
    """A picture in the size in which trainer and engine get it.

    `digest` is a hash of its contents and size: pictures with the same digest are equal. `read` returns the pixels,
    uint8 [height, width, 3] in RGB. It travels with the picture, so it has what other machines need to read them. A
    message has each object once, however many records refer to it.
    """

    digest: str
    height: int
    width: int
    read: Callable[[], np.ndarray]

    @property
    def pixels(self) -> np.ndarray:
        """The pixels, uint8 [height, width, 3] in RGB, read each time: no picture keeps them."""
        pixels = self.read()
        assert pixels.shape == (self.height, self.width, 3), f"{pixels.shape} instead of {self.height, self.width, 3}"
        return pixels

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Picture) and self.digest == other.digest

    def __hash__(self) -> int:
        return hash(self.digest)


def picture_of_pixels(digest: str, pixels: np.ndarray) -> Picture:
    """Return the picture with these pixels, uint8 [height, width, 3]."""
    return Picture(digest, pixels.shape[0], pixels.shape[1], partial(np.asarray, pixels))


@dataclass(frozen=True)
class PlacedPicture:
    """A picture in a sequence: the run of `length` tokens from `start` on stands for it.

    The tokens of the run with the id `token` are placeholders; others, as Idefics3 has for rows and columns, are
    embedded like text. `grid` are the rows and columns of the features where the model counts positions in three axes
    (Qwen-VL's multimodal rotary embedding, arXiv 2409.12191, section 2.1); None where positions just count tokens.
    `patches` are the inputs of the tower, which are several for one placeholder.
    """

    picture: Picture
    start: int
    length: int
    token: int
    grid: tuple[int, int] | None = None
    patches: int = 0

    @property
    def stop(self) -> int:
        """The position behind the run."""
        return self.start + self.length

    def moved(self, by: int) -> "PlacedPicture":
        """Return the picture that many tokens later."""
        return replace(self, start=self.start + by)


def unexpanded(token_ids: list[int], pictures: tuple[PlacedPicture, ...]) -> list[int]:
    """Return the tokens with one placeholder for each run, as vLLM takes a prompt."""
    shortened: list[int] = []
    place = 0
    for placed in pictures:
        shortened += [*token_ids[place : placed.start], placed.token]
        place = placed.stop
    return shortened + token_ids[place:]


@dataclass(frozen=True)
class PackPictures:
    """The pictures of a pack of T tokens, each once, whose features end to end are F.

    Row `rows_P[i]` of the pack gets feature `features_P[i]`; a picture that stands in several sequences has more rows
    than features. `rope_3T` are positions in time, rows and columns, for models that count in three axes, else None.
    """

    pictures: tuple[Picture, ...]
    rows_P: torch.Tensor
    features_P: torch.Tensor
    rope_3T: torch.Tensor | None = None

    def to(self, device: torch.device | str) -> "PackPictures":
        """Return the record with its tensors on another device; pixels stay where they are."""
        return replace(
            self,
            rows_P=self.rows_P.to(device, non_blocking=True),
            features_P=self.features_P.to(device, non_blocking=True),
            rope_3T=None if self.rope_3T is None else self.rope_3T.to(device, non_blocking=True),
        )

    def with_filler(self, count: int) -> "PackPictures":
        """Return the record for a pack with that many more tokens behind its own."""
        rope_3T = self.rope_3T
        return self if rope_3T is None else replace(self, rope_3T=torch.nn.functional.pad(rope_3T, (0, count)))
