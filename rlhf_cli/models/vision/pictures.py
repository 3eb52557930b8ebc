"""Image records, from data to vision encoders and rollout engines.

An image is a run of tokens in a sequence. Some are placeholders, which the vision encoder's features replace. Their
positions come from the prompt only, so a placeholder ID that a model samples is an ordinary token.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch


# eq=False, because fields include the reader. The digest identifies an image.
@dataclass(frozen=True, eq=False)
class Picture:
    """An image in the size that trainer and engine receive.

    - `digest`: hash of contents and size; images with the same digest are equal.
    - `read`: returns the pixels, uint8 [height, width, 3] in RGB. It is pickled with the image, so it must work on
      other machines.

    A message contains each object once, even if more than one record refers to it.
    """

    digest: str
    height: int
    width: int
    read: Callable[[], np.ndarray]

    @property
    def pixels(self) -> np.ndarray:
        """The pixels, uint8 [height, width, 3] in RGB. Read on every access, not cached."""
        pixels = self.read()
        assert pixels.shape == (self.height, self.width, 3), f"{pixels.shape} instead of {self.height, self.width, 3}"
        return pixels

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Picture) and self.digest == other.digest

    def __hash__(self) -> int:
        return hash(self.digest)


def picture_of_pixels(digest: str, pixels: np.ndarray) -> Picture:
    """Create an image from pixels, uint8 [height, width, 3]."""
    # A partial can be pickled, unlike a lambda.
    return Picture(digest, pixels.shape[0], pixels.shape[1], partial(np.asarray, pixels))


@dataclass(frozen=True)
class PlacedPicture:
    """An image in a sequence, represented by `length` tokens from `start`.

    - `token`: placeholder ID. Other tokens in the run, such as Idefics3's row and column markers, are embedded like
      text.
    - `grid`: feature rows and columns for models with three-axis positions (Qwen-VL's multimodal RoPE, arXiv
      2409.12191, section 2.1), otherwise None.
    - `patches`: number of encoder input patches, of which each feature combines one or more.

    Example: a Qwen-VL image of 4 x 6 features at token 10 has `start` 10, `length` 24 and `grid` (4, 6).
    """

    picture: Picture
    start: int
    length: int
    token: int
    grid: tuple[int, int] | None = None
    patches: int = 0

    @property
    def stop(self) -> int:
        """Position after the run."""
        return self.start + self.length

    def moved(self, by: int) -> "PlacedPicture":
        """Return the image shifted by this many tokens."""
        return replace(self, start=self.start + by)


def unexpanded(token_ids: list[int], pictures: tuple[PlacedPicture, ...]) -> list[int]:
    """Return the tokens with one placeholder per run, the form in which vLLM expects a prompt."""
    shortened: list[int] = []
    place = 0
    for placed in pictures:
        shortened += [*token_ids[place : placed.start], placed.token]
        place = placed.stop
    return shortened + token_ids[place:]


@dataclass(frozen=True)
class PackPictures:
    """Unique images in a pack of T tokens; their concatenated features have F rows.

    - `rows_P`, `features_P`: pack row `rows_P[i]` gets feature `features_P[i]`. An image in more than one sequence has
      more rows than features.
    - `rope_3T`: positions in time, rows and columns for models with three-axis positions, otherwise None.
    """

    pictures: tuple[Picture, ...]
    rows_P: torch.Tensor
    features_P: torch.Tensor
    rope_3T: torch.Tensor | None = None

    def to(self, device: torch.device | str) -> "PackPictures":
        """Move the tensors to another device; pixels are not moved."""
        return replace(
            self,
            # Asynchronous copies overlap with computation if the pack is in pinned memory.
            rows_P=self.rows_P.to(device, non_blocking=True),
            features_P=self.features_P.to(device, non_blocking=True),
            rope_3T=None if self.rope_3T is None else self.rope_3T.to(device, non_blocking=True),
        )

    def with_filler(self, count: int) -> "PackPictures":
        """Return the record for a pack with `count` filler tokens at the end."""
        rope_3T = self.rope_3T
        return self if rope_3T is None else replace(self, rope_3T=torch.nn.functional.pad(rope_3T, (0, count)))
