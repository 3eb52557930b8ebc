"""RLOO: reward minus the mean reward of the other responses (arXiv 2402.14740)."""

from statistics import fmean

from rlhf_cli.algorithms.estimators.estimator import Advantages, Estimator, Experience


def rloo(experience: Experience, _: object) -> Advantages:
    """Return `R_i - mean`, with the mean over the other responses in the group, at every token."""
    from rlhf_cli.algorithms.groups import less_mean_of_others

    return Advantages(per_response_B=less_mean_of_others(experience.rewards_B, experience.groups_B))


def rloo_formula(experience: Experience, _: object, sample: int, token: int) -> list[str]:
    """Return the formula of `rloo` with numbers."""
    from rlhf_cli.algorithms.formulas import group_of, number, shown_group

    rewards, place = group_of(experience.rewards_B, experience.groups_B, sample)
    own, rest = rewards[place], [*rewards[:place], *rewards[place + 1 :]]
    mean = fmean(rest) if rest else own
    return [
        shown_group(rewards, place),
        f"A = R - mean of the others = {number(own)} - {number(mean)} = {number(own - mean)}",
        "RLOO, arXiv 2402.14740, eq. 8",
    ]


RLOO = Estimator("rloo", rloo, min_group=2, steps="groups", formula=rloo_formula)
