"""ReMax: reward minus the reward of the greedy response (arXiv 2310.10505)."""

from rlhf_cli.algorithms.estimators.estimator import Advantages, Estimator, Experience


def remax(experience: Experience, _: object) -> Advantages:
    """Return the reward minus the reward of the greedy response, at every token."""
    assert experience.greedy_B is not None, "ReMax needs greedy responses"
    return Advantages(per_response_B=experience.rewards_B - experience.greedy_B)


REMAX = Estimator("remax", remax, greedy=True)
