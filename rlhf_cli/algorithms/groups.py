"""Scores of responses compared with the scores of the other responses to the same prompt.

`scores_B` one score a response; `groups_B` int64 any numbers, equal if the prompt is the same, in any order. Groups may
differ in size if a reward failed; a response that is alone in its group has nothing to be compared with and gets 0.
Everything is computed in float64 and comes back in the type that went in.
"""

import torch
from torch import Tensor

# Keeps a spread of nearly nothing from blowing up the quotient (arXiv 2402.03300, as in the authors' successors). In
# units of the scale of the scores: rewards of 0 and 1e-6 teach as much as rewards of 0 and 1.
STD_EPS = 1e-6

# Scores that differ by less than this share of their sizes are equal: two units in the last place of float32, in which
# reward models compute. Float64 sums such as 0.1 + 0.2 and 0.3 differ by far less.
SPREAD_EPS = 2**-23


def is_alike(lowest: float, highest: float) -> bool:
    """Return whether the scores between these two are equal but for rounding: a group of them teaches nothing."""
    return highest - lowest <= SPREAD_EPS * (abs(lowest) + abs(highest))


def scale_of(scores_B: Tensor) -> float:
    """Return the difference of the largest and the smallest score; their size if all are alike, 1 if all are 0."""
    if not len(scores_B):
        return 1.0
    lowest, highest = (float(extreme) for extreme in scores_B.aminmax())
    return (max(abs(lowest), abs(highest)) or 1.0) if is_alike(lowest, highest) else highest - lowest


def less_group_mean(scores_B: Tensor, groups_B: Tensor) -> Tensor:
    """Return `R_i - mean` over the group; 0 where all are alike."""
    return _centred(scores_B, _numbered(groups_B)).to(scores_B.dtype)


def less_mean_of_others(scores_B: Tensor, groups_B: Tensor) -> Tensor:
    """Return `R_i - mean` over the other responses of the group (RLOO, arXiv 2402.14740, eq. 8)."""
    group_B = _numbered(groups_B)
    size_B = torch.bincount(group_B)[group_B].double()
    # R_i - (sum - R_i) / (n - 1) = (R_i - mean) n / (n - 1)
    centred_B = _centred(scores_B, group_B)
    return (centred_B * size_B / (size_B - 1).clamp(min=1)).to(scores_B.dtype)


def group_normalised(scores_B: Tensor, groups_B: Tensor, *, scale: float | None = None) -> Tensor:
    """Return `(R_i - mean) / (std + 1e-6 scale)` with the unbiased spread (GRPO, arXiv 2402.03300); 0 where all are
    alike.

    `scale` is that of the scores if not given. Give it if the scores contain something of another scale.
    """
    group_B = _numbered(groups_B)
    eps = STD_EPS * (scale_of(scores_B) if scale is None else scale)
    return (_centred(scores_B, group_B) / (_stds(scores_B, group_B)[group_B] + eps)).to(scores_B.dtype)


def best_over_second(scores_B: Tensor, groups_B: Tensor, *, scale: float | None = None) -> Tensor:
    """Return `(max - second) / (std + 1e-6 scale)` for the best response of each group, 0 for the others (arXiv
    2503.19595).

    Where two are best there is none, and all are 0. `scale` is as in `group_normalised`.
    """
    group_B = _numbered(groups_B)
    scores = scores_B.double()
    best_G = _extreme(scores, group_B, "amax")
    is_best_B = scores == best_G[group_B]
    second_G = _extreme(scores.masked_fill(is_best_B, -torch.inf), group_B, "amax")
    alone_G = (torch.bincount(group_B) == 1) | (torch.bincount(group_B, weights=is_best_B.double()) > 1)
    is_nothing_G = alone_G | _alike_groups(scores, group_B)
    eps = STD_EPS * (scale_of(scores) if scale is None else scale)
    lead_G = torch.where(is_nothing_G, 0.0, best_G - second_G) / (_stds(scores, group_B) + eps)
    return torch.where(is_best_B, lead_G[group_B], 0.0).to(scores_B.dtype)


def _numbered(groups_B: Tensor) -> Tensor:
    """Return the group of each response, numbered from 0 without gaps."""
    return torch.unique(groups_B, return_inverse=True)[1]


def _centred(scores_B: Tensor, group_B: Tensor) -> Tensor:
    """Return `R_i - mean` over the group, float64; 0 where all are alike, so that no rounding is left to normalise."""
    centred_B = scores_B.double() - _means(scores_B, group_B)[group_B]
    return centred_B.masked_fill(_alike_groups(scores_B.double(), group_B)[group_B], 0.0)


def _alike_groups(scores_B: Tensor, group_B: Tensor) -> Tensor:
    """Return whether the scores of each group are alike, bool `[G]`."""
    lowest_G, highest_G = (_extreme(scores_B, group_B, kind) for kind in ("amin", "amax"))
    pairs = zip(lowest_G.tolist(), highest_G.tolist(), strict=True)
    return torch.tensor([is_alike(*pair) for pair in pairs], dtype=torch.bool)


def _means(scores_B: Tensor, group_B: Tensor) -> Tensor:
    """Return the mean of each group, float64 `[G]`."""
    return torch.bincount(group_B, weights=scores_B.double()) / torch.bincount(group_B)


def _stds(scores_B: Tensor, group_B: Tensor) -> Tensor:
    """Return the unbiased standard deviation of each group, float64 `[G]`; 0 for a group of one."""
    centred_B = scores_B.double() - _means(scores_B, group_B)[group_B]
    squares_G = torch.bincount(group_B, weights=centred_B.square())
    return (squares_G / (torch.bincount(group_B) - 1).clamp(min=1)).sqrt()


def _extreme(scores_B: Tensor, group_B: Tensor, kind: str) -> Tensor:
    """Return the largest ("amax") or smallest ("amin") value of each group, float64 `[G]`."""
    start = scores_B.new_zeros(int(group_B.max()) + 1 if len(group_B) else 0)
    return start.scatter_reduce(0, group_B, scores_B, kind, include_self=False)
