"""ReMax: reward minus the reward of the greedy response (arXiv 2310.10505)."""

from rlhf_cli.algorithms.estimators.estimator import Advantages, Estimator, Experience


def remax(experience: Experience, _: object) -> Advantages:
    """Return the reward minus the reward of the greedy response, at every token."""
    assert experience.greedy_B is not None, "ReMax needs greedy responses"
    return Advantages(per_response_B=experience.rewards_B - experience.greedy_B)


def remax_formula(experience: Experience, _: object, sample: int, token: int) -> list[str]:
    """Return the formula of `remax` with numbers."""
    from rlhf_cli.algorithms.formulas import number

    assert experience.greedy_B is not None, "ReMax needs greedy responses"
    own, greedy = float(experience.rewards_B[sample]), float(experience.greedy_B[sample])
    return [
        f"A = R - R of the greedy response = {number(own)} - {number(greedy)} = {number(own - greedy)}",
        "ReMax, arXiv 2310.10505",
    ]


REMAX = Estimator("remax", remax, greedy=True, formula=remax_formula)
