"""The weight of the entropy bonus if it follows the measured entropy.

The controller of Skywork-OR1 (arXiv 2505.22312, section 4.3). Its state is two numbers, which the caller keeps and
checkpoints; the entropy itself is measured in the update, over all ranks.
"""

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class EntropyState:
    """Weight of the bonus, and whether it counts in the next step."""

    coef: float
    applied: bool = True

    @property
    def weight(self) -> float:
        """The factor of the entropy in the next step."""
        return self.coef if self.applied else 0.0


def next_entropy_state(
    state: EntropyState, *, entropy: float, target: float | None, delta: float, max_coef: float
) -> EntropyState:
    """Return the state for the next step; unchanged if there is no target, or the entropy is not finite.

    `entropy` is the mean over the trained tokens of the step, nats. Below `target` the weight rises by `delta`, else it
    falls, within 0 and `max_coef`; it counts while the entropy is not above the target.
    """
    if target is None or not math.isfinite(entropy):
        return state
    coef = state.coef + (delta if entropy < target else -delta)
    return EntropyState(min(max(coef, 0.0), max_coef), applied=entropy <= target)
