"""RLOO: reward minus the mean reward of the other responses (arXiv 2402.14740)."""

from rlhf_cli.algorithms.estimators.estimator import Advantages, Estimator, Experience


def rloo(experience: Experience, _: object) -> Advantages:
    """Return `R_i - mean`, with the mean over the other responses in the group, at every token."""
    from rlhf_cli.algorithms.groups import less_mean_of_others

    return Advantages(per_response_B=less_mean_of_others(experience.rewards_B, experience.groups_B))


RLOO = Estimator("rloo", rloo, min_group=2, steps="groups")
