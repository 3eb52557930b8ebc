"""Per-token critic loss and explained variance."""

import torch
from torch import Tensor


def clipped_value_loss(
    values_K: Tensor, old_values_K: Tensor, returns_K: Tensor, *, value_clip: float
) -> tuple[Tensor, Tensor]:
    """Compute the clipped value loss per token, and 1 where the clipped branch is used.

    The loss is `0.5 max((V - R)^2, (V_old + clamp(V - V_old, +-value_clip) - R)^2)`. The clipped branch is larger if
    the value has moved from the old value towards the return by more than `value_clip`; its gradient is zero (as in
    OpenAI's PPO, arXiv 2005.12729, section 3).
    """
    moved_K = values_K - old_values_K
    clipped_K = old_values_K + moved_K.clamp(-value_clip, value_clip)
    plain_K, limited_K = (values_K - returns_K).square(), (clipped_K - returns_K).square()
    # Within the clip range both branches are equal only up to rounding, so compare the distance first.
    decides_K = (moved_K.abs() > value_clip) & (limited_K > plain_K)
    return 0.5 * torch.where(decides_K, limited_K, plain_K), decides_K.float()


def explained_variance(*, return_mean: float, return_square: float, error_mean: float, error_square: float) -> float:
    """Compute `1 - Var(R - V) / Var(R)` from global means of `R, R^2, R - V, (R - V)^2`; 0 for constant returns."""
    return_variance = return_square - return_mean**2
    # Relative to the mean square: the difference of two float64 means is accurate to about 1e-16 of it.
    if return_variance <= 1e-12 * max(return_square, 1e-12):
        return 0.0
    return 1.0 - (error_square - error_mean**2) / return_variance
