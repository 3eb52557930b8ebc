"""Generalized advantage estimation with a critic (arXiv 1506.02438), as in PPO."""

from pydantic import Field

from rlhf_cli.algorithms.estimators.estimator import Advantages, Estimator, Experience
from rlhf_cli.config.policy import PolicyConfig


class ActorCriticPolicyConfig(PolicyConfig):
    """Policy objective"""

    gamma: float = Field(1.0, ge=0, le=1)
    """Discount per token."""
    lambd: float = Field(1.0, ge=0, le=1)
    """GAE's lambda: 1 is Monte Carlo, 0 one-step."""


def ppo(experience: Experience, settings: ActorCriticPolicyConfig) -> Advantages:
    """Return GAE and its returns."""
    from rlhf_cli.algorithms.advantages import gae

    assert experience.values_N is not None, "GAE needs a critic"
    return Advantages(
        *gae(
            experience.rewards_N,
            experience.values_N,
            experience.cu,
            gamma=settings.gamma,
            lambd=settings.lambd,
            bootstrap_B=experience.bootstrap_B,
        )
    )


PPO = Estimator("ppo", ppo, critic=True, whiten=True, steps="tokens")
