"""Share of a token in the gradient of an optimizer step, and comparison of gradients."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Projection:
    """Gradient `g_t` of a token's part of the loss, compared with the gradient `g` of its optimizer step.

    - `product`: `g_t . g`.
    - `norm`, `step_norm`: norms of `g_t` and `g`.
    """

    product: float
    norm: float
    step_norm: float

    @property
    def share(self) -> float:
        """Share of the gradient norm, `g_t . g / |g|^2`. The shares of all tokens sum to 1."""
        return self.product / self.step_norm**2 if self.step_norm else 0.0

    @property
    def cosine(self) -> float:
        """Cosine of the angle between both; 0 if one is 0."""
        return self.product / (self.norm * self.step_norm) if self.norm and self.step_norm else 0.0


def compared(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> Projection:
    """Compare gradients or other vectors, given as tensors by name. A missing tensor counts as 0."""
    product = sum(_dot(values, other[name]) for name, values in one.items() if name in other)
    norms = (sum(_dot(values, values) for values in tensors.values()) ** 0.5 for tensors in (one, other))
    return Projection(product, *norms)


def _dot(one: Tensor, other: Tensor) -> float:
    """Return the dot product, added in float64: it has as many terms as a model has weights."""
    return float((one * other).sum(dtype=torch.float64))
