"""GiGPO: compares episodes within the group, and turns that follow the same observation."""

from typing import TYPE_CHECKING

from rlhf_cli.algorithms.estimators.estimator import Advantages, Estimator, Experience
from rlhf_cli.algorithms.estimators.group import GroupPolicyConfig, grpo

if TYPE_CHECKING:
    from torch import Tensor


def gigpo(experience: Experience, settings: GroupPolicyConfig) -> Advantages:
    """Return the response's advantage as in `grpo`, plus `gigpo_weight` times the turn's (arXiv 2505.10978, eq. 8).

    The turn's advantage is `(R - mean) / std` with its discounted return, over the turns in the group that follow the
    same observation, or `R - mean` with `advantage_std none`; 0 for a single turn.
    """
    import torch

    from rlhf_cli.algorithms.ragged import segment_ids

    turns = experience.turns
    assert turns is not None, "GiGPO compares turns"
    turns_U, _ = _turn_advantages(experience, settings)
    added_N = turns_U[segment_ids(turns.cu, int(turns.cu[-1]))]
    episodes_N = grpo(experience, settings).at_tokens(experience.cu)
    _, state_U, counts = torch.unique(turns.states_U, return_inverse=True, return_counts=True)
    repeated = float((counts[state_U] > 1).double().mean()) if len(state_U) else 0.0
    return Advantages(episodes_N + settings.gigpo_weight * added_N, metrics={"repeated_states": repeated})


def _turn_advantages(experience: Experience, settings: GroupPolicyConfig) -> "tuple[Tensor, Tensor]":
    """Return the turns' advantages and discounted returns, both `[U]`."""
    from rlhf_cli.algorithms.advantages import turn_returns
    from rlhf_cli.algorithms.groups import group_normalised, less_group_mean

    assert experience.turns is not None, "GiGPO compares turns"
    returns_U = turn_returns(experience.rewards_N, experience.turns, gamma=settings.gigpo_gamma)
    compare = less_group_mean if settings.advantage_std == "none" else group_normalised
    return compare(returns_U, experience.turns.states_U), returns_U


def gigpo_formula(experience: Experience, settings: GroupPolicyConfig, sample: int, token: int) -> list[str]:
    """Return the `gigpo` formula with numbers."""
    from rlhf_cli.algorithms.formulas import group_of, number, shown_group

    turns = experience.turns
    assert turns is not None, "GiGPO compares turns"
    place = int(experience.cu[sample]) + token
    turn = int((turns.cu[1:] <= place).sum())
    turns_U, returns_U = _turn_advantages(experience, settings)
    returns, own = group_of(returns_U, turns.states_U, turn)
    episode = float(grpo(experience, settings).at_tokens(experience.cu)[place])
    weight, value = settings.gigpo_weight, float(turns_U[turn])
    first = int(turns.cu_responses[sample])
    rewards, at = group_of(experience.rewards_B, experience.groups_B, sample)
    discount = f"discounted by {number(settings.gigpo_gamma)} per turn"
    return [
        f"episode: {shown_group(rewards, at)}, normalized {number(episode)}",
        f"turn {turn - first}: returns after the same observation, {discount}: {' '.join(map(number, returns))}; "
        f"this one {number(returns[own])}, normalized {number(value)}",
        f"A = episode + {number(weight)} x turn = {number(episode)} + {number(weight)} x {number(value)} = "
        f"{number(episode + weight * value)}",
        "GiGPO, arXiv 2505.10978, eq. 8",
    ]


GIGPO = Estimator("gigpo", gigpo, min_group=2, steps="tokens", turns=True, formula=gigpo_formula)
