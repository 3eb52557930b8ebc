"""Scores compared within a group: the responses to the same prompt.

`scores_B` holds one score per response and `groups_B` int64 prompt IDs, in any order. Group sizes may differ when
rewards fail; a response with no other in its group gets 0. Computation is in float64; results have the input dtype.
"""

import torch
from torch import Tensor

# Keeps a tiny standard deviation from blowing up the quotient (arXiv 2402.03300, as in later code by the authors).
# Multiplied by the score range: rewards of 0 and 1e-6 train like rewards of 0 and 1.
STD_EPS = 1e-6

# Scores within this relative difference are equal: two units in the last place of float32, the precision of reward
# models. Float64 rounding, such as 0.1 + 0.2 against 0.3, is far smaller.
_SPREAD_EPS = 2**-23


def is_alike(lowest: float, highest: float) -> bool:
    """Return whether scores in this range are equal up to rounding. Such a group has no training signal."""
    return highest - lowest <= _SPREAD_EPS * (abs(lowest) + abs(highest))


def scale_of(scores_B: Tensor) -> float:
    """Return the score range (largest minus smallest), or the magnitude if all scores are equal, or 1 if all are 0."""
    if not len(scores_B):
        return 1.0
    lowest, highest = (float(extreme) for extreme in scores_B.aminmax())
    return (max(abs(lowest), abs(highest)) or 1.0) if is_alike(lowest, highest) else highest - lowest


def less_group_mean(scores_B: Tensor, groups_B: Tensor) -> Tensor:
    """Compute `R_i - mean` over the group; 0 if all scores are equal."""
    return _centred(scores_B, _numbered(groups_B)).to(scores_B.dtype)


def less_mean_of_others(scores_B: Tensor, groups_B: Tensor) -> Tensor:
    """Compute `R_i - mean` over the other responses in the group (RLOO, arXiv 2402.14740, eq. 8)."""
    group_B = _numbered(groups_B)
    size_B = torch.bincount(group_B)[group_B].double()
    # R_i - (sum - R_i) / (n - 1) = (R_i - mean) n / (n - 1)
    centred_B = _centred(scores_B, group_B)
    return (centred_B * size_B / (size_B - 1).clamp(min=1)).to(scores_B.dtype)


def group_normalised(scores_B: Tensor, groups_B: Tensor, *, scale: float | None = None) -> Tensor:
    """Compute `(R_i - mean) / (std + 1e-6 scale)` with the unbiased std (GRPO, arXiv 2402.03300); 0 if all are equal.

    `scale` defaults to the score range. Pass it if the scores include a term on a different scale.
    """
    group_B = _numbered(groups_B)
    eps = STD_EPS * (scale_of(scores_B) if scale is None else scale)
    return (_centred(scores_B, group_B) / (_stds(scores_B, group_B)[group_B] + eps)).to(scores_B.dtype)


def over_batch_std(scores_B: Tensor, groups_B: Tensor, *, scale: float | None = None) -> Tensor:
    """Compute `(R_i - mean) / (std + 1e-6 scale)` with the group's mean and the unbiased std of all scores.

    Lite PPO, arXiv 2508.08221: a group of nearly equal scores does not weigh as much as one with a real spread.
    """
    eps = STD_EPS * (scale_of(scores_B) if scale is None else scale)
    std = scores_B.double().std() if len(scores_B) > 1 else torch.zeros((), dtype=torch.float64)
    return (_centred(scores_B, _numbered(groups_B)) / (std + eps)).to(scores_B.dtype)


def over_group_mean(scores_B: Tensor, groups_B: Tensor) -> Tensor:
    """Compute `(R_i - mean) / mean` over the group; 0 if the mean is 0 (MaxRL, arXiv 2602.02710)."""
    group_B = _numbered(groups_B)
    centred_B, mean_B = _centred(scores_B, group_B), _means(scores_B, group_B)[group_B]
    return torch.where(mean_B == 0, 0.0, centred_B / mean_B).to(scores_B.dtype)


def best_over_second(scores_B: Tensor, groups_B: Tensor, *, scale: float | None = None) -> Tensor:
    """Compute `(max - second) / (std + 1e-6 scale)` for the best response per group, 0 for the rest (arXiv 2503.19595).

    If two responses tie for best, the group gets 0. `scale` is the same as in `group_normalised`.
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


def best_and_worst(scores_B: Tensor, groups_B: Tensor, *, among_B: Tensor) -> tuple[Tensor, Tensor]:
    """Return 1 for the best response in each group, -1 for the worst and 0 for the others, float64, and group numbers.

    Only responses of `among_B` (bool) are compared; of equal ones, the first is taken. A group of equal scores has
    only zeros.
    """
    group_B = _numbered(groups_B)
    scores, order_B = scores_B.double(), torch.arange(len(scores_B), dtype=torch.float64)
    signs_B = torch.zeros(len(scores_B), dtype=torch.float64)
    lowest = scores.masked_fill(~among_B, torch.inf)
    highest = scores.masked_fill(~among_B, -torch.inf)
    least_G, most_G = _extreme(lowest, group_B, "amin"), _extreme(highest, group_B, "amax")
    pairs = zip(least_G.tolist(), most_G.tolist(), strict=True)
    differs_G = torch.tensor([low < high and not is_alike(low, high) for low, high in pairs], dtype=torch.bool)
    for sign, values, extreme_G in ((1.0, highest, most_G), (-1.0, lowest, least_G)):
        is_extreme_B = (values == extreme_G[group_B]) & differs_G[group_B]
        first_G = _extreme(order_B.masked_fill(~is_extreme_B, torch.inf), group_B, "amin")
        signs_B[is_extreme_B & (order_B == first_G[group_B])] = sign
    return signs_B, group_B


def _numbered(groups_B: Tensor) -> Tensor:
    """Renumber the groups from 0 without gaps."""
    # bincount and scatter allocate up to the largest ID, and callers may pass any IDs.
    return torch.unique(groups_B, return_inverse=True)[1]


def _centred(scores_B: Tensor, group_B: Tensor) -> Tensor:
    """Compute `R_i - mean` over the group, float64.

    Equal scores give exactly 0: otherwise the division by the standard deviation would amplify rounding errors.
    """
    centred_B = scores_B.double() - _means(scores_B, group_B)[group_B]
    return centred_B.masked_fill(_alike_groups(scores_B.double(), group_B)[group_B], 0.0)


def _alike_groups(scores_B: Tensor, group_B: Tensor) -> Tensor:
    """Return whether all scores in each group are equal, bool `[G]`."""
    lowest_G, highest_G = (_extreme(scores_B, group_B, kind) for kind in ("amin", "amax"))
    pairs = zip(lowest_G.tolist(), highest_G.tolist(), strict=True)
    return torch.tensor([is_alike(*pair) for pair in pairs], dtype=torch.bool)


def _means(scores_B: Tensor, group_B: Tensor) -> Tensor:
    """Compute the mean score per group, float64 `[G]`."""
    return torch.bincount(group_B, weights=scores_B.double()) / torch.bincount(group_B)


def _stds(scores_B: Tensor, group_B: Tensor) -> Tensor:
    """Compute the unbiased standard deviation per group, float64 `[G]`; 0 for a single response."""
    centred_B = scores_B.double() - _means(scores_B, group_B)[group_B]
    squares_G = torch.bincount(group_B, weights=centred_B.square())
    return (squares_G / (torch.bincount(group_B) - 1).clamp(min=1)).sqrt()


def _extreme(scores_B: Tensor, group_B: Tensor, kind: str) -> Tensor:
    """Return the largest ("amax") or smallest ("amin") value per group, float64 `[G]`."""
    start = scores_B.new_zeros(int(group_B.max()) + 1 if len(group_B) else 0)
    return start.scatter_reduce(0, group_B, scores_B, kind, include_self=False)
