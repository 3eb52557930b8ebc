"""Per-token loss of the critic, and how much of the returns it explains."""

import torch
from torch import Tensor


def clipped_value_loss(
    values_K: Tensor, old_values_K: Tensor, returns_K: Tensor, *, value_clip: float
) -> tuple[Tensor, Tensor]:
    """Return (`0.5 max((V - R)^2, (V_old + clamp(V - V_old, +-value_clip) - R)^2)` per token, 1 if the clip decides).
    The clipped branch is the larger one if a value has moved away from the old one towards the return by more than
    `value_clip`; there the gradient is zero (the form of OpenAI's PPO, arXiv 2005.12729, section 3).
    """
    moved_K = values_K - old_values_K
    clipped_K = old_values_K + moved_K.clamp(-value_clip, value_clip)
    plain_K, limited_K = (values_K - returns_K).square(), (clipped_K - returns_K).square()
    # Within the clip both are the same number, but not to the last bit.
    decides_K = (moved_K.abs() > value_clip) & (limited_K > plain_K)
    return 0.5 * torch.where(decides_K, limited_K, plain_K), decides_K.float()


def explained_variance(*, return_mean: float, return_square: float, error_mean: float, error_square: float) -> float:
    """Return `1 - Var(R - V) / Var(R)` from global means of `R, R^2, R - V, (R - V)^2`; 0 where returns do not vary."""
    return_variance = return_square - return_mean**2
    if return_variance <= 1e-12 * max(return_square, 1e-12):
        return 0.0
    return 1.0 - (error_square - error_mean**2) / return_variance
