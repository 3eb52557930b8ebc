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


def reinforce_formula(experience: Experience, settings: ReinforcePolicyConfig, sample: int, token: int) -> list[str]:
    """Return the formula of `reinforce` with numbers."""
    from rlhf_cli.algorithms.formulas import number

    first, end = experience.cu[sample : sample + 2].tolist()
    rest = experience.rewards_N[first + token : end].tolist()
    total = sum(settings.gamma**later * reward for later, reward in enumerate(rest))
    return [
        f"A = sum of gamma^s r_(t+s) over {len(rest)} tokens to the end, gamma {number(settings.gamma)} = "
        f"{number(total)}",
        "REINFORCE++, arXiv 2501.03262",
    ]


def reinforce_group_formula(experience: Experience, _: object, sample: int, token: int) -> list[str]:
    """Return the formula of `reinforce_group` with numbers."""
    from rlhf_cli.algorithms.formulas import less_mean_formula

    return [*less_mean_formula(experience, sample), "REINFORCE++ with baseline, arXiv 2501.03262"]


REINFORCE = Estimator("reinforce++", reinforce, whiten=True, steps="tokens", formula=reinforce_formula)
REINFORCE_GROUP = Estimator(
    "reinforce++_group", reinforce_group, min_group=2, whiten=True, steps="groups", formula=reinforce_group_formula
)
