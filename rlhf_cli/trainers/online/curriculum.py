"""Curriculum that follows the run: prompts or sources whose rewards varied are drawn more often (`--prompt_sampling`).

A group with equal rewards teaches nothing with a group baseline. The variance of a reward of 0 or 1, p * (1 - p), is
largest for prompts that are right half of the time (Foster et al. 2025, arXiv 2502.12272). Pure functions of seed,
iteration and the variances so far, so that a resumed run draws the same prompts.

Variances are by key: of each prompt, its index as text; or of all prompts of a source, its name.
"""

from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np

from rlhf_cli.config.rollout import PromptSampling
from rlhf_cli.data.prompts import Prompt
from rlhf_cli.data.sampling import SEED_MASK
from rlhf_cli.rewards.records import Score

FLOOR = 0.1
"""Smallest weight, as a fraction of the mean positive variance: prompts that were all right or wrong come back."""
MEMORY = 0.8
"""Weight of earlier iterations in the variance of a source, whose prompts are rarely sampled twice."""


def curriculum_keys(prompts: Sequence[Prompt], sampling: PromptSampling) -> list[str]:
    """Return the key of each prompt."""
    if sampling == "source_variance":
        return [prompt.data_source or prompt.source for prompt in prompts]
    return [str(number) for number in range(len(prompts))]


def reward_variance(scores: Sequence[Score]) -> float | None:
    """Return the population variance of a group's rewards; None for fewer than two valid rewards."""
    known = [score for score in scores if score.value is not None]
    values = [score.value if score.filter is None else score.filter for score in known]
    return float(np.var(np.array(values, dtype=np.float64))) if len(values) > 1 else None


def draw_prompts(
    variances: Mapping[str, float], keys: Sequence[str], *, size: int, seed: int, iteration: int
) -> np.ndarray:
    """Return distinct prompt indices, int64 [size], drawn in proportion to the variances of their keys.

    Keys without a variance have the weight of the largest one, so that all are tried early. Prompts with the same key
    share its weight.
    """
    positive = [value for value in variances.values() if value > 0]
    largest, floor = max(positive, default=1.0), FLOOR * float(np.mean(positive)) if positive else 1.0
    sizes = Counter(keys)
    of_key = {key: max(variances[key], floor) if key in variances else largest for key in sizes}
    weights = np.array([of_key[key] / sizes[key] for key in keys])
    # The smallest of exponential variables with these rates are a draw without replacement (Efraimidis and Spirakis
    # 2006).
    times = np.random.default_rng([seed & SEED_MASK, iteration]).exponential(size=len(keys)) / weights
    return np.argsort(times, kind="stable")[:size]


def variances_after(
    variances: Mapping[str, float], found: Mapping[str, Sequence[float]], sampling: PromptSampling
) -> dict[str, float]:
    """Return the variances after an iteration whose groups had those in `found`, by key.

    That of a prompt is replaced. That of a source is a moving average over iterations.
    """
    means = {key: float(np.mean(values)) for key, values in found.items()}
    if sampling == "source_variance":
        means = {
            key: MEMORY * variances[key] + (1 - MEMORY) * mean if key in variances else mean
            for key, mean in means.items()
        }
    return {**variances, **means}


def curriculum_metrics(variances: Mapping[str, float], chosen: Sequence[str], *, num_keys: int) -> dict[str, float]:
    """Return how the keys of the chosen prompts were known: `variances` are those before they were sampled."""
    known = [variances[key] for key in chosen if key in variances]
    metrics = {
        "curriculum/new": 1 - len(known) / len(chosen),
        "curriculum/known_prompts": len(variances) / num_keys,
    }
    return metrics | ({"curriculum/variance": float(np.mean(known))} if known else {})


def source_shares(chosen: Sequence[str], keys: Sequence[str]) -> dict[str, float]:
    """Return the share of each source in the chosen prompts."""
    counts = Counter(chosen)
    return {f"curriculum/share/{source}": counts[source] / len(chosen) for source in dict.fromkeys(keys)}
