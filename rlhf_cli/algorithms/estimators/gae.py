"""Generalized advantage estimation with a critic (arXiv 1506.02438), as in PPO."""

from typing import Any, Literal

from pydantic import Field, model_validator

from rlhf_cli.algorithms.estimators.estimator import Advantages, Estimator, Experience
from rlhf_cli.config.policy import PolicyConfig

PRESETS: dict[str, dict[str, object]] = {
    "vapo": {
        "lambd_alpha": 0.05,
        "critic_lambd": 1.0,
        "eps_clip_low_high": (0.2, 0.28),
        "loss_agg": "token_mean",
        "correct_nll_coef": 0.1,
        "init_kl_coef": 0.0,
    },
}
"""Hyperparameters from the papers, without batch sizes, lengths and the iterations that train only the critic."""


class ActorCriticPolicyConfig(PolicyConfig):
    """Policy objective"""

    preset: Literal[*PRESETS] | None = None  # type: ignore[valid-type]
    """Defaults from a paper for lambda, clipping, aggregation, KL and the loss on correct responses. Explicit settings
    take precedence.
    """
    gamma: float = Field(1.0, ge=0, le=1)
    """Discount per token."""
    lambd: float = Field(1.0, ge=0, le=1)
    """GAE's lambda: 1 is Monte Carlo, 0 one-step."""
    lambd_alpha: float | None = Field(None, gt=0)
    """Length-adaptive lambda of the actor, 1 - 1 / (alpha tokens) and at least 0, instead of lambd (VAPO, with 0.05).
    """
    critic_lambd: float | None = Field(None, ge=0, le=1)
    """Lambda of the critic's returns (VAPO: 1). Default: that of the actor."""

    @model_validator(mode="after")
    def _check_lambda(self) -> "ActorCriticPolicyConfig":
        if self.lambd_alpha is not None and self.lambd != 1.0:
            raise ValueError("lambd_alpha sets lambda by length, and lambd for all responses: set only one")
        return self


def ppo(experience: Experience, settings: ActorCriticPolicyConfig) -> Advantages:
    """Return GAE and its returns, which may have a lambda of their own (VAPO, arXiv 2504.05118)."""
    from rlhf_cli.algorithms.advantages import adaptive_lambdas, gae

    assert experience.values_N is not None, "GAE needs a critic"
    cu, values_N = experience.cu, experience.values_N
    given: dict[str, Any] = {"gamma": settings.gamma, "bootstrap_B": experience.bootstrap_B}
    alpha = settings.lambd_alpha
    lambd = settings.lambd if alpha is None else adaptive_lambdas(cu, alpha=alpha)
    advantages_N, returns_N = gae(experience.rewards_N, values_N, cu, lambd=lambd, **given)
    if settings.critic_lambd is not None:
        _, returns_N = gae(experience.rewards_N, values_N, cu, lambd=settings.critic_lambd, **given)
    return Advantages(advantages_N, returns_N)


def gae_formula(experience: Experience, settings: ActorCriticPolicyConfig, sample: int, token: int) -> list[str]:
    """Return the formula of GAE with numbers."""
    from rlhf_cli.algorithms.formulas import number

    assert experience.values_N is not None, "GAE needs a critic"
    first, end = experience.cu[sample : sample + 2].tolist()
    rewards, values = experience.rewards_N[first:end].tolist(), experience.values_N[first:end].tolist()
    values.append(0.0 if experience.bootstrap_B is None else float(experience.bootstrap_B[sample]))
    gamma, lambd, alpha = settings.gamma, settings.lambd, settings.lambd_alpha
    adaptive = ""
    if alpha is not None:
        lambd = max(0.0, 1 - 1 / (alpha * (end - first)))
        adaptive = f"; lambda = 1 - 1 / ({number(alpha)} x {end - first} tokens), VAPO, arXiv 2504.05118"
    deltas = [reward + gamma * values[t + 1] - values[t] for t, reward in enumerate(rewards)]
    total = sum((gamma * lambd) ** later * delta for later, delta in enumerate(deltas[token:]))
    return [
        f"delta = r + gamma V' - V = {number(rewards[token])} + {number(gamma)} x {number(values[token + 1])} - "
        f"{number(values[token])} = {number(deltas[token])}",
        f"A = sum of (gamma lambda)^s delta_(t+s) over {end - first - token} tokens, lambda {number(lambd)} = "
        f"{number(total)}",
        f"GAE, arXiv 1506.02438, eq. 16{adaptive}",
    ]


PPO = Estimator("ppo", ppo, critic=True, whiten=True, steps="tokens", formula=gae_formula)
