"""Image positions in a pack, and three-axis token positions."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from rlhf_cli.models.vision.pictures import PackPictures, Picture, PlacedPicture


@dataclass(frozen=True, slots=True)
class TokenRun:
    """Consecutive tokens in a pack, int32 [L], with their images.

    - `first_position`: position of the first token in its sequence.
    - `behind`: number of the run that these tokens continue, if any.
    - `shift`: offset of later positions because of images in that run (`rope_shift`).
    - `routed_experts`: experts to replay for the first tokens (`TokenSequence`).
    """

    token_ids: np.ndarray
    first_position: int = 0
    behind: int | None = None
    pictures: tuple[PlacedPicture, ...] = ()
    shift: int = 0
    routed_experts: np.ndarray | None = None


def rope_shift(pictures: Iterable[PlacedPicture]) -> int:
    """Return by how much images shift the positions of later tokens with three-axis positions.

    An image with `rows` and `columns` advances positions by the larger of the two (arXiv 2409.12191, section 2.1).
    """
    return sum(max(placed.grid) - placed.length for placed in pictures if placed.grid is not None)


def place_pictures(runs: Sequence[TokenRun]) -> PackPictures | None:
    """Return the images of concatenated runs, None without images."""
    placed = [(start, run, one) for start, run in zip(_starts(runs), runs, strict=True) for one in run.pictures]
    if not placed:
        return None
    rows = [start + one.start + _placeholders(run, one) for start, run, one in placed]
    features: dict[Picture, np.ndarray] = {}
    num_features = 0
    for (_, _, one), its_rows in zip(placed, rows, strict=True):
        # Equal images are encoded once, and their features are used at each position.
        if one.picture not in features:
            features[one.picture] = num_features + np.arange(its_rows.size)
            num_features += its_rows.size
    has_axes = any(one.grid is not None for _, _, one in placed)
    return PackPictures(
        pictures=tuple(features),
        rows_P=torch.from_numpy(np.concatenate(rows)),
        features_P=torch.from_numpy(np.concatenate([features[one.picture] for _, _, one in placed])),
        # Only some families use three-axis positions.
        rope_3T=torch.from_numpy(np.concatenate([rope_positions(run) for run in runs], axis=1)) if has_axes else None,
    )


def rope_positions(run: TokenRun) -> np.ndarray:
    """Return the time, row and column positions of a run's tokens, int64 [3, L].

    Text tokens have equal positions in all axes, starting after the largest previous one (arXiv 2409.12191, section
    2.1).
    """
    rope_3L = np.tile(np.arange(run.token_ids.size) + run.first_position + run.shift, (3, 1))
    for placed in run.pictures:
        if placed.grid is None:
            continue
        num_rows, num_columns = placed.grid
        first = rope_3L[0, placed.start]
        its = slice(placed.start, placed.stop)
        rope_3L[:, its] = first
        rope_3L[1, its] += np.repeat(np.arange(num_rows), num_columns)
        rope_3L[2, its] += np.tile(np.arange(num_columns), num_rows)
        # Later text continues after the image's largest position.
        rope_3L[:, placed.stop :] += rope_shift([placed])
    return rope_3L


def _starts(runs: Sequence[TokenRun]) -> list[int]:
    lengths = [run.token_ids.size for run in runs]
    return [0, *np.cumsum(lengths[:-1]).tolist()] if lengths else []


def _placeholders(run: TokenRun, placed: PlacedPicture) -> np.ndarray:
    """Return an image's placeholder positions relative to the start of its run."""
    # Images may contain other tokens, such as row separators, which have no features.
    return np.flatnonzero(run.token_ids[placed.start : placed.stop] == placed.token)
