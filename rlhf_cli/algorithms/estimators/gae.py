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


def gae_formula(experience: Experience, settings: ActorCriticPolicyConfig, sample: int, token: int) -> list[str]:
    """Return the formula of GAE with numbers."""
    from rlhf_cli.algorithms.formulas import number

    assert experience.values_N is not None, "GAE needs a critic"
    first, end = experience.cu[sample : sample + 2].tolist()
    rewards, values = experience.rewards_N[first:end].tolist(), experience.values_N[first:end].tolist()
    values.append(0.0 if experience.bootstrap_B is None else float(experience.bootstrap_B[sample]))
    gamma, lambd = settings.gamma, settings.lambd
    deltas = [reward + gamma * values[t + 1] - values[t] for t, reward in enumerate(rewards)]
    total = sum((gamma * lambd) ** later * delta for later, delta in enumerate(deltas[token:]))
    return [
        f"delta = r + gamma V' - V = {number(rewards[token])} + {number(gamma)} x {number(values[token + 1])} - "
        f"{number(values[token])} = {number(deltas[token])}",
        f"A = sum of (gamma lambda)^s delta_(t+s) over {end - first - token} tokens, lambda {number(lambd)} = "
        f"{number(total)}",
        "GAE, arXiv 1506.02438, eq. 16",
    ]


PPO = Estimator("ppo", ppo, critic=True, whiten=True, steps="tokens", formula=gae_formula)
