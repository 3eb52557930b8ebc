"""Scores of responses compared with the scores of the other responses to the same prompt.

`scores_B` one score a response; `groups_B` int64 any numbers, equal if the prompt is the same, in any order. Groups may
differ in size if a reward failed; a response that is alone in its group has nothing to be compared with and gets 0.
Everything is computed in float64 and comes back in the type that went in.
"""

import torch
from torch import Tensor

# Keeps a spread of nearly nothing from blowing up the quotient (arXiv 2402.03300, as in the authors' successors).
STD_EPS = 1e-6


def less_group_mean(scores_B: Tensor, groups_B: Tensor) -> Tensor:
    """Return `R_i - mean` over the group."""
    group_B = _numbered(groups_B)
    return (scores_B.double() - _means(scores_B, group_B)[group_B]).to(scores_B.dtype)


def less_mean_of_others(scores_B: Tensor, groups_B: Tensor) -> Tensor:
    """Return `R_i - mean` over the other responses of the group (RLOO, arXiv 2402.14740, eq. 8)."""
    group_B = _numbered(groups_B)
    size_B = torch.bincount(group_B)[group_B].double()
    # R_i - (sum - R_i) / (n - 1) = (R_i - mean) n / (n - 1)
    centred_B = scores_B.double() - _means(scores_B, group_B)[group_B]
    return (centred_B * size_B / (size_B - 1).clamp(min=1)).to(scores_B.dtype)


def group_normalised(scores_B: Tensor, groups_B: Tensor) -> Tensor:
    """Return `(R_i - mean) / (std + 1e-6)` with the unbiased spread (GRPO, arXiv 2402.03300); 0 where all are equal."""
    group_B = _numbered(groups_B)
    centred_B = scores_B.double() - _means(scores_B, group_B)[group_B]
    normal_B = centred_B / (_stds(scores_B, group_B)[group_B] + STD_EPS)
    best_G, worst_G = _extreme(scores_B.double(), group_B, "amax"), _extreme(scores_B.double(), group_B, "amin")
    return normal_B.masked_fill((best_G == worst_G)[group_B], 0.0).to(scores_B.dtype)


def best_over_second(scores_B: Tensor, groups_B: Tensor) -> Tensor:
    """Return `(max - second) / (std + 1e-6)` for the best response of each group, 0 for the others (arXiv 2503.19595).

    Where two are best there is none, and all are 0.
    """
    group_B = _numbered(groups_B)
    scores = scores_B.double()
    best_G = _extreme(scores, group_B, "amax")
    is_best_B = scores == best_G[group_B]
    second_G = _extreme(scores.masked_fill(is_best_B, -torch.inf), group_B, "amax")
    alone_G = (torch.bincount(group_B) == 1) | (torch.bincount(group_B, weights=is_best_B.double()) > 1)
    lead_G = torch.where(alone_G, 0.0, best_G - second_G) / (_stds(scores, group_B) + STD_EPS)
    return torch.where(is_best_B, lead_G[group_B], 0.0).to(scores_B.dtype)


def _numbered(groups_B: Tensor) -> Tensor:
    """Return the group of each response, numbered from 0 without gaps."""
    return torch.unique(groups_B, return_inverse=True)[1]


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
