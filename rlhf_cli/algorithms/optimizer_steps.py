"""The arithmetic of optimizer steps, on tensors of any shape."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

ParameterGroup = Mapping[str, Any]
"""The settings of the parameters of a group, by PyTorch's names."""
NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)
"""Coefficients of Muon's odd polynomial (kellerjordan.github.io/posts/muon): the steepest at 0 that stays near 1."""
ITERATIONS = 5
SMALLEST_NORM = 1e-7
RMS_OF_ADAMW = 0.2
"""Root mean square of AdamW's updates in training (arXiv 2502.16982, section 2.2)."""


def adamw_step(
    weight: Tensor,
    gradient: Tensor,
    first: Tensor,
    second: Tensor,
    *,
    step: int,
    settings: ParameterGroup,
) -> None:
    """Update weight and moments in place (arXiv 1711.05101, algorithm 2).

    Args:
        step: the number of the step; the first is 1.
        settings: a parameter group, with `lr`, `betas`, `eps` and `weight_decay`.
    """
    (beta1, beta2), lr = settings["betas"], settings["lr"]
    first.lerp_(gradient, 1 - beta1)
    second.lerp_(gradient.square(), 1 - beta2)
    root = second.div(1 - beta2**step).sqrt_().add_(settings["eps"])
    weight.mul_(1 - lr * settings["weight_decay"]).addcdiv_(first, root, value=-lr / (1 - beta1**step))


def orthogonalized(matrices: Tensor) -> Tensor:
    """Return matrices `[..., rows, columns]` with singular values near 1 (0.7 to 1.2) and the same singular vectors.

    The polynomial is applied to the singular values by matrix products alone, in bfloat16 on a GPU.
    """
    a, b, c = NEWTON_SCHULZ
    x = matrices.bfloat16() if matrices.is_cuda else matrices.float()
    is_tall = x.size(-2) > x.size(-1)
    x = x.mT if is_tall else x
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + SMALLEST_NORM)
    for _ in range(ITERATIONS):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return (x.mT if is_tall else x).to(matrices.dtype)


def muon_update(matrices: Tensor) -> Tensor:
    """Return the orthogonalized matrices with the size of AdamW's updates, so that both take the same learning rate
    (arXiv 2502.16982, equation 4).
    """
    return orthogonalized(matrices) * (RMS_OF_ADAMW * max(matrices.shape[-2:]) ** 0.5)
