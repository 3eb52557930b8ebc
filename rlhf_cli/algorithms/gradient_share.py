"""Share of a token in the gradient of an optimizer step."""

from dataclasses import dataclass


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
