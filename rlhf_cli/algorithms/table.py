"""Table of online algorithms: one row per algorithm, and no other module branches on an algorithm name.

A row declares what an algorithm requires (a critic, a group of responses, a greedy response per prompt) and how it
computes advantages. Each command selects a row and sets the defaults; the KL placement and the policy loss are separate
settings.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from rlhf_cli.algorithms.advantages import at_every_token, gae, returns_to_go, step_advantages, whiten
from rlhf_cli.algorithms.groups import best_over_second, group_normalised, less_group_mean, less_mean_of_others
from rlhf_cli.algorithms.ragged import segment_ids, segment_sum
from rlhf_cli.config.plugins import load_target, without_folder
from rlhf_cli.config.policy import ActorCriticPolicyConfig, GroupPolicyConfig, ReinforcePolicyConfig
from rlhf_cli.errors import RunError, UsageError


@dataclass(frozen=True)
class Experience:
    """Inputs for advantage estimation: all responses from a rollout, with tokens concatenated.

    - `rewards_N`: shaped token rewards.
    - `parts`: (weight, clipped values `[B]`) for each reward, for estimators with `rewards_apart`.
    - `values_N`: critic values; None without a critic.
    - `bootstrap_B`: value of the final state of each truncated response, 0 for a finished one; None treats every
      response as finished.
    - `cu`: response boundaries, int64 `[B+1]`.
    - `groups_B`: prompt index per response, int64. Group sizes may differ when samples fail.
    - `trained_B`: bool, True for responses that are trained on.
    - `greedy_B`: reward for the greedy response to the same prompt; None without greedy responses.
    - `steps_N`: step reward at the last token of each step, NaN elsewhere; None without a process reward model.
    - `step_weight`: multiplier for step advantages.
    - `scale`: score range before the KL penalty is added; None uses the range of `rewards_N`.
    """

    rewards_N: Tensor
    parts: tuple[tuple[float, Tensor], ...]
    values_N: Tensor | None
    bootstrap_B: Tensor | None
    cu: Tensor
    groups_B: Tensor
    trained_B: Tensor
    greedy_B: Tensor | None
    steps_N: Tensor | None = None
    step_weight: float = 1.0
    scale: float | None = None

    @property
    def rewards_B(self) -> Tensor:
        """Total reward per response."""
        return segment_sum(self.rewards_N, self.cu)


# (experience, the command's policy settings) -> (advantages_N before whitening, returns_N for a critic or None)
AdvantageFunction = Callable[[Experience, Any], tuple[Tensor, Tensor | None]]


@dataclass(frozen=True)
class Algorithm:
    """An online algorithm.

    - `advantages`: the estimator; None for losses without advantages, such as a divergence.
    - `min_group`: minimum number of responses per prompt.
    - `whiten`: whether to whiten advantages over the trained tokens of the rollout.
    - `greedy`: whether to generate and score a greedy response per prompt, which is not trained on.
    - `rewards_apart`: whether the estimator normalizes each reward separately instead of their sum.
    - `steps`: "tokens" adds step rewards to token rewards, "groups" normalizes them within the group; None if step
      rewards are not supported.
    """

    name: str
    advantages: AdvantageFunction | None
    critic: bool = False
    min_group: int = 1
    whiten: bool = False
    greedy: bool = False
    rewards_apart: bool = False
    steps: Literal["tokens", "groups"] | None = None


def algorithm_by_code(code: str, row: Algorithm) -> Algorithm:
    """Load an algorithm from user code. A plain function inherits the requirements of the command's row.

    Raises UsageError if only one of the two has a critic.
    """
    loaded, name = load_target(code), without_folder(code)
    algorithm = loaded if isinstance(loaded, Algorithm) else replace(row, advantages=loaded)
    # The command has already parsed its critic settings, so a row cannot add or remove the critic here.
    if algorithm.critic != row.critic:
        has = "trains a critic" if row.critic else "has no critic"
        raise UsageError(
            f"--advantage_estimator {code}: this command {has}, and critic is {algorithm.critic} in the row"
        )
    return replace(algorithm, name=name, advantages=_checked(name, algorithm))


def _checked(name: str, algorithm: Algorithm) -> AdvantageFunction:
    """Wrap a user-defined estimator: allow it to omit the returns, and check result shapes."""
    function = algorithm.advantages
    assert function is not None, f"{name} has no advantages"

    def advantages(experience: Experience, settings: object) -> tuple[Tensor, Tensor | None]:
        result = function(experience, settings)
        advantages_N, returns_N = result if isinstance(result, tuple) and len(result) == 2 else (result, None)
        shape = experience.rewards_N.shape
        for label, values_N in {"advantages": advantages_N, "returns": returns_N}.items():
            is_needed = label == "advantages" or algorithm.critic
            if is_needed and (not isinstance(values_N, Tensor) or values_N.shape != shape):
                raise RunError(f"--advantage_estimator {name} must return {label} of shape {tuple(shape)}")
        return advantages_N, returns_N if algorithm.critic else None

    return advantages


def compute_advantages(
    algorithm: Algorithm, experience: Experience, *, settings: object
) -> tuple[Tensor, Tensor | None]:
    """Compute (advantages_N for the policy loss, returns_N for the critic or None).

    Advantages are 0 for responses that are not trained on.
    """
    assert algorithm.advantages is not None, f"{algorithm.name} has no advantages"
    advantages_N, returns_N = algorithm.advantages(experience, settings)
    if experience.steps_N is not None and algorithm.steps == "groups":
        compared_N = step_advantages(experience.steps_N, experience.cu, experience.groups_B)
        advantages_N = advantages_N + experience.step_weight * compared_N
    # Whiten over trained tokens only: a dropped response, such as a truncated one, must not shift the mean.
    trained_N = experience.trained_B[segment_ids(experience.cu)]
    chosen = advantages_N[trained_N]
    final_N = torch.zeros_like(advantages_N)
    final_N[trained_N] = whiten(chosen, scale=experience.scale) if algorithm.whiten else chosen
    return final_N, returns_N


def _gae(experience: Experience, settings: ActorCriticPolicyConfig) -> tuple[Tensor, Tensor | None]:
    assert experience.values_N is not None, "GAE needs a critic"
    return gae(
        experience.rewards_N,
        experience.values_N,
        experience.cu,
        gamma=settings.gamma,
        lambd=settings.lambd,
        bootstrap_B=experience.bootstrap_B,
    )


def _returns(experience: Experience, settings: ReinforcePolicyConfig) -> tuple[Tensor, None]:
    return returns_to_go(experience.rewards_N, experience.cu, gamma=settings.gamma), None


def _centred(experience: Experience, _: object) -> tuple[Tensor, None]:
    return at_every_token(less_group_mean(experience.rewards_B, experience.groups_B), experience.cu), None


def _grpo(experience: Experience, settings: GroupPolicyConfig) -> tuple[Tensor, None]:
    # Dr. GRPO (arXiv 2503.20783): dividing by the std overweights prompts that are almost always or almost never
    # solved.
    if settings.advantage_std == "none":
        return _centred(experience, settings)
    advantages_B = group_normalised(experience.rewards_B, experience.groups_B, scale=experience.scale)
    return at_every_token(advantages_B, experience.cu), None


def _passk(experience: Experience, _: object) -> tuple[Tensor, None]:
    advantages_B = best_over_second(experience.rewards_B, experience.groups_B, scale=experience.scale)
    return at_every_token(advantages_B, experience.cu), None


def _gdpo(experience: Experience, _: object) -> tuple[Tensor, None]:
    # Normalize each reward before adding: in a sum, the reward with the largest range would dominate.
    apart_B = [weight * group_normalised(part_B, experience.groups_B) for weight, part_B in experience.parts]
    return at_every_token(whiten(torch.stack(apart_B).sum(0)), experience.cu), None


def _rloo(experience: Experience, _: object) -> tuple[Tensor, None]:
    return at_every_token(less_mean_of_others(experience.rewards_B, experience.groups_B), experience.cu), None


def _remax(experience: Experience, _: object) -> tuple[Tensor, None]:
    assert experience.greedy_B is not None, "ReMax needs greedy responses"
    return at_every_token(experience.rewards_B - experience.greedy_B, experience.cu), None


# The run identity stores the row name: renaming a row makes existing checkpoints of that algorithm refuse to resume.
ROWS = (
    Algorithm("ppo", _gae, critic=True, whiten=True, steps="tokens"),
    Algorithm("reinforce++", _returns, whiten=True, steps="tokens"),
    Algorithm("reinforce++_group", _centred, min_group=2, whiten=True, steps="groups"),
    Algorithm("grpo", _grpo, min_group=2, steps="groups"),
    Algorithm("grpo_passk", _passk, min_group=2),
    Algorithm("gdpo", _gdpo, min_group=2, rewards_apart=True),
    Algorithm("rloo", _rloo, min_group=2, steps="groups"),
    Algorithm("remax", _remax, greedy=True),
    Algorithm("gkd", None),
)

ALGORITHMS = {row.name: row for row in ROWS}
