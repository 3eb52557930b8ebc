"""Optimizer update rules for tensors of any shape."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

ParameterGroup = Mapping[str, Any]
"""Parameter group settings, with PyTorch's names."""
NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)
"""Coefficients of Muon's odd polynomial (kellerjordan.github.io/posts/muon), chosen for maximal slope at 0."""
# As in the reference implementation: more iterations cost matrix products and leave singular values between 0.7 and
# 1.2.
ITERATIONS = 5
# Keeps a zero gradient, such as an unused expert's, from becoming NaN.
_SMALLEST_NORM = 1e-7
_RMS_OF_ADAMW = 0.2
"""Root mean square of AdamW updates during training (arXiv 2502.16982, section 2.2)."""


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
        step: step number, starting at 1.
        settings: a parameter group with `lr`, `betas`, `eps` and `weight_decay`.
    """
    (beta1, beta2), lr = settings["betas"], settings["lr"]
    first.lerp_(gradient, 1 - beta1)
    second.lerp_(gradient.square(), 1 - beta2)
    # eps is added after bias correction, as in torch.optim.AdamW, so both optimizers share hyperparameters.
    root = second.div(1 - beta2**step).sqrt_().add_(settings["eps"])
    weight.mul_(1 - lr * settings["weight_decay"]).addcdiv_(first, root, value=-lr / (1 - beta1**step))


def orthogonalized(matrices: Tensor) -> Tensor:
    """Return matrices `[..., rows, columns]` with the same singular vectors and singular values near 1 (0.7 to 1.2).

    The polynomial acts on the singular values through matrix products, in bfloat16 on a GPU.
    """
    a, b, c = NEWTON_SCHULZ
    x = matrices.bfloat16() if matrices.is_cuda else matrices.float()
    is_tall = x.size(-2) > x.size(-1)
    # x @ x.mT has the size of the row dimension, so iterate with the smaller dimension as rows.
    x = x.mT if is_tall else x
    # The Frobenius norm bounds the largest singular value: the iteration converges only from values up to about 1.
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + _SMALLEST_NORM)
    for _ in range(ITERATIONS):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return (x.mT if is_tall else x).to(matrices.dtype)


def muon_update(matrices: Tensor) -> Tensor:
    """Orthogonalize matrices and scale them to AdamW's update size, so both use the same learning rate.

    Source: arXiv 2502.16982, equation 4.
    """
    return orthogonalized(matrices) * (_RMS_OF_ADAMW * max(matrices.shape[-2:]) ** 0.5)
