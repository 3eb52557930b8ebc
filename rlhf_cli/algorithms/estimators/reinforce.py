"""REINFORCE++: token returns, or rewards minus the group mean, whitened over the rollout (arXiv 2501.03262)."""

from typing import Literal

from pydantic import Field, model_validator

from rlhf_cli.algorithms.estimators.estimator import Advantages, Estimator, Experience
from rlhf_cli.config.policy import PolicyConfig


class ReinforcePolicyConfig(PolicyConfig):
    """Policy objective"""

    baseline: Literal["none", "group"] = "none"
    """Baseline subtracted before whitening. group: mean reward of the prompt's responses, with KL in the loss (k2)."""
    gamma: float = Field(1.0, ge=0, le=1)
    """Discount per token."""

    @model_validator(mode="after")
    def _check_gamma(self) -> "ReinforcePolicyConfig":
        if self.baseline == "group" and self.gamma != 1.0:
            raise ValueError("gamma discounts token rewards, but baseline group uses one reward per response")
        return self


def reinforce(experience: Experience, settings: ReinforcePolicyConfig) -> Advantages:
    """Return discounted rewards-to-go."""
    from rlhf_cli.algorithms.advantages import returns_to_go

    return Advantages(returns_to_go(experience.rewards_N, experience.cu, gamma=settings.gamma))


def reinforce_group(experience: Experience, _: object) -> Advantages:
    """Return `R_i - mean` over the group, at every token."""
    from rlhf_cli.algorithms.groups import less_group_mean

    return Advantages(per_response_B=less_group_mean(experience.rewards_B, experience.groups_B))


REINFORCE = Estimator("reinforce++", reinforce, whiten=True, steps="tokens")
REINFORCE_GROUP = Estimator("reinforce++_group", reinforce_group, min_group=2, whiten=True, steps="groups")
