"""Curriculum that follows the run: prompts whose rewards varied are drawn more often (`--prompt_sampling variance`).

A group with equal rewards teaches nothing with a group baseline. The variance of a reward of 0 or 1, p * (1 - p), is
largest for prompts that are right half of the time (Foster et al. 2025, arXiv 2502.12272). Pure functions of seed,
iteration and the variances so far, so that a resumed run draws the same prompts.
"""

from collections.abc import Mapping, Sequence

import numpy as np

from rlhf_cli.data.sampling import SEED_MASK
from rlhf_cli.rewards.records import Score

FLOOR = 0.1
"""Smallest weight, as a fraction of the mean positive variance: prompts that were all right or wrong come back."""


def reward_variance(scores: Sequence[Score]) -> float | None:
    """Return the population variance of a group's rewards; None for fewer than two valid rewards."""
    known = [score for score in scores if score.value is not None]
    values = [score.value if score.filter is None else score.filter for score in known]
    return float(np.var(np.array(values, dtype=np.float64))) if len(values) > 1 else None


def draw_prompts(
    variances: Mapping[int, float], *, num_prompts: int, size: int, seed: int, iteration: int
) -> np.ndarray:
    """Return distinct prompt indices, int64 [size], drawn in proportion to the variances.

    Prompts without a variance have the weight of the largest one, so that all prompts are tried early.
    """
    positive = [value for value in variances.values() if value > 0]
    weights = np.full(num_prompts, max(positive, default=1.0))
    floor = FLOOR * float(np.mean(positive)) if positive else 1.0
    for index, value in variances.items():
        weights[index] = max(value, floor)
    # The smallest of exponential variables with these rates are a draw without replacement (Efraimidis and Spirakis
    # 2006).
    times = np.random.default_rng([seed & SEED_MASK, iteration]).exponential(size=num_prompts) / weights
    return np.argsort(times, kind="stable")[:size]


def curriculum_metrics(variances: Mapping[int, float], chosen: Sequence[int], *, num_prompts: int) -> dict[str, float]:
    """Return how the chosen prompts were known: `variances` are those before they were sampled."""
    known = [variances[index] for index in chosen if index in variances]
    metrics = {
        "curriculum/new": 1 - len(known) / len(chosen),
        "curriculum/known_prompts": len(variances) / num_prompts,
    }
    return metrics | ({"curriculum/variance": float(np.mean(known))} if known else {})
