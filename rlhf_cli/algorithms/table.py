"""The table of online algorithms: one row each, and nothing elsewhere branches on a name.

A row says what an algorithm needs (a critic, a group of responses, where the KL divergence enters) and how its
advantages are computed. Defaults of settings belong to the command; losses are chosen by settings.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from rlhf_cli.algorithms.advantages import gae, whiten
from rlhf_cli.config.online import PolicyConfig


@dataclass(frozen=True)
class Experience:
    """What advantages are computed from: all responses of one rollout, tokens end to end.

    `rewards_N` shaped token rewards; `values_N` the critic's, None without one; `cu` int64 `[B+1]` bounds of the
    responses; `groups_B` int64, which prompt each response answers (groups may differ in size where samples failed).
    """

    rewards_N: Tensor
    values_N: Tensor | None
    cu: Tensor
    groups_B: Tensor


# (experience, settings) -> (advantages_N before whitening, returns_N for the critic or None)
AdvantageFunction = Callable[[Experience, PolicyConfig], tuple[Tensor, Tensor | None]]


@dataclass(frozen=True)
class Algorithm:
    """One online algorithm.

    `kl_in`: whether the KL divergence is taken off the reward or added to the loss; `min_group`: fewest responses per
    prompt; `whiten`: whether advantages are normalised over all tokens of the rollout.
    """

    name: str
    advantages: AdvantageFunction
    critic: bool
    kl_in: Literal["reward", "loss"]
    min_group: int
    whiten: bool


def compute_advantages(
    algorithm: Algorithm, experience: Experience, *, settings: PolicyConfig
) -> tuple[Tensor, Tensor | None]:
    """(advantages_N as the policy loss takes them, returns_N for the critic or None)."""
    advantages_N, returns_N = algorithm.advantages(experience, settings)
    return (whiten(advantages_N) if algorithm.whiten else advantages_N), returns_N


def _gae(experience: Experience, settings: PolicyConfig) -> tuple[Tensor, Tensor | None]:
    assert experience.values_N is not None, "GAE needs a critic"
    return gae(experience.rewards_N, experience.values_N, experience.cu, gamma=settings.gamma, lambd=settings.lambd)


ALGORITHMS = {
    row.name: row
    for row in (Algorithm(name="ppo", advantages=_gae, critic=True, kl_in="reward", min_group=1, whiten=True),)
}
