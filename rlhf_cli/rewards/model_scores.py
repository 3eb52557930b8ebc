"""Adds weighted reward model scores to other rewards. The reward model runs as a separate role (backends/roles)."""

import math
from collections.abc import Sequence
from dataclasses import replace

from rlhf_cli.config.scoring import RewardConfig
from rlhf_cli.rewards.records import Score
from rlhf_cli.rewards.scorer import weights_of_parts

_MODEL_PART = "reward_model"
"""Name of the reward model component in a score."""


def weights_of_all_parts(reward: RewardConfig) -> dict[str, float]:
    """Return all reward weights by component name, including the reward model's."""
    return weights_of_parts(reward) | {_MODEL_PART: reward.reward_model_weight}


def with_model_scores(scores: Sequence[Score], values: Sequence[float], *, weight: float) -> list[Score]:
    """Add `weight` times the reward model's value to each score. Verdicts do not change.

    Failed scores stay failed. A non-finite value fails the score.
    """
    return [_joined(score, float(value), weight) for score, value in zip(scores, values, strict=True)]


def _joined(score: Score, value: float, weight: float) -> Score:
    total = None if score.value is None else score.value + weight * value
    if total is not None and not math.isfinite(total):
        what = "the rewards sum to" if math.isfinite(value) else "the reward model's score is"
        infinite = total if math.isfinite(value) else value
        return replace(score, value=None, status="failed", detail=f"{what} {infinite}", failure="bad_result")
    if not math.isfinite(value):
        return score
    return replace(score, value=total, parts=score.parts | {_MODEL_PART: value})
