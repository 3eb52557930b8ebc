"""Where the pictures of a pack stand, and the positions of its tokens in three axes."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from rlhf_cli.models.vision.pictures import PackPictures, Picture, PlacedPicture


@dataclass(frozen=True, slots=True)
class TokenRun:
    """Tokens that stand together in a pack, int32 [L], and the pictures among them.

    `first_position` is the place of the first token in its sequence. `behind` is the number of the run that the tokens
    continue, if that is another one, and `shift` is what the pictures there add to later positions (`rope_shift`).
    """

    token_ids: np.ndarray
    first_position: int = 0
    behind: int | None = None
    pictures: tuple[PlacedPicture, ...] = ()
    shift: int = 0


def rope_shift(pictures: Iterable[PlacedPicture]) -> int:
    """Return what pictures add to the positions of the tokens behind them, where positions have three axes.

    A picture of `rows` and `columns` takes as many positions as the larger of the two (arXiv 2409.12191, section 2.1).
    """
    return sum(max(placed.grid) - placed.length for placed in pictures if placed.grid is not None)


def place_pictures(runs: Sequence[TokenRun]) -> PackPictures | None:
    """Return the pictures of runs that stand end to end in a pack, None if there are none."""
    placed = [(start, run, one) for start, run in zip(_starts(runs), runs, strict=True) for one in run.pictures]
    if not placed:
        return None
    rows = [start + one.start + _placeholders(run, one) for start, run, one in placed]
    features: dict[Picture, np.ndarray] = {}
    num_features = 0
    for (_, _, one), its_rows in zip(placed, rows, strict=True):
        if one.picture not in features:
            features[one.picture] = num_features + np.arange(its_rows.size)
            num_features += its_rows.size
    has_axes = any(one.grid is not None for _, _, one in placed)
    return PackPictures(
        pictures=tuple(features),
        rows_P=torch.from_numpy(np.concatenate(rows)),
        features_P=torch.from_numpy(np.concatenate([features[one.picture] for _, _, one in placed])),
        rope_3T=torch.from_numpy(np.concatenate([rope_positions(run) for run in runs], axis=1)) if has_axes else None,
    )


def rope_positions(run: TokenRun) -> np.ndarray:
    """Return the positions of a run's tokens in time, rows and columns, int64 [3, L].

    Text has the same position in all three, from the largest before it on (arXiv 2409.12191, section 2.1).
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
        rope_3L[:, placed.stop :] += rope_shift([placed])
    return rope_3L


def _starts(runs: Sequence[TokenRun]) -> list[int]:
    lengths = [run.token_ids.size for run in runs]
    return [0, *np.cumsum(lengths[:-1]).tolist()] if lengths else []


def _placeholders(run: TokenRun, placed: PlacedPicture) -> np.ndarray:
    """Return the placeholders of a picture, counted from the start of its run of tokens."""
    return np.flatnonzero(run.token_ids[placed.start : placed.stop] == placed.token)
