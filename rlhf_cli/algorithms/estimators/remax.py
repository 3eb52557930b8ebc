"""ReMax: reward minus the reward of the greedy response (arXiv 2310.10505)."""

from rlhf_cli.algorithms.estimators.estimator import Advantages, Estimator, Experience


def remax(experience: Experience, _: object) -> Advantages:
    """Return the reward minus the reward of the greedy response, at every token."""
    from rlhf_cli.algorithms.advantages import at_every_token

    assert experience.greedy_B is not None, "ReMax needs greedy responses"
    return Advantages(at_every_token(experience.rewards_B - experience.greedy_B, experience.cu))


REMAX = Estimator("remax", remax, greedy=True)
