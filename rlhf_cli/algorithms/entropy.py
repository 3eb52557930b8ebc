"""Adaptive entropy bonus: a weight that follows the measured entropy.

This is the Skywork-OR1 controller (arXiv 2505.22312, section 4.3). Its state is two numbers that the caller stores and
checkpoints; the entropy is measured during the update, over all ranks.
"""

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class EntropyState:
    """Bonus weight, and whether it is applied in the next step."""

    coef: float
    applied: bool = True

    @property
    def weight(self) -> float:
        """Entropy weight in the next step."""
        return self.coef if self.applied else 0.0


def next_entropy_state(
    state: EntropyState, *, entropy: float, target: float | None, delta: float, max_coef: float
) -> EntropyState:
    """Compute the state for the next step. Without a target or with a non-finite entropy, it is unchanged.

    `entropy` is the mean over trained tokens in the step, in nats. Below `target`, the weight rises by `delta`,
    otherwise it falls, clamped to 0 and `max_coef`. It is applied while entropy is at most the target.
    """
    if target is None or not math.isfinite(entropy):
        return state
    coef = state.coef + (delta if entropy < target else -delta)
    # The weight is updated in every step, but the bonus is applied only below the target.
    return EntropyState(min(max(coef, 0.0), max_coef), applied=entropy <= target)
