"""Groups of scored responses, and their selection for dynamic sampling (DAPO, arXiv 2503.14476).

Pure functions: the selection depends on responses, scores and prompt order, never on arrival order.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from rlhf_cli.algorithms.groups import is_alike
from rlhf_cli.config.rollout import DynamicSamplingConfig
from rlhf_cli.data.prompts import Prompt
from rlhf_cli.data.rollouts import Generation
from rlhf_cli.rewards.records import Score, ScoreRequest

Usefulness = Literal["useful", "too_hard", "too_easy", "alike", "failed"]
"""Usefulness of a prompt. Groups that are too_hard, too_easy or alike have no learning signal with a group baseline."""


@dataclass(frozen=True)
class PromptGroup:
    """All responses to a prompt. `place` is the prompt's position in the run's order."""

    place: int
    prompt: Prompt
    generations: list[Generation]
    score_requests: list[ScoreRequest]
    scores: list[Score]

    @property
    def longest(self) -> int:
        """Number of tokens in the longest response, over all branches of episodes."""
        return max(generation.longest for generation in self.generations)


def usefulness(scores: Sequence[Score], config: DynamicSamplingConfig) -> Usefulness:
    """Classify a group by its scores.

    With a reward range, the mean score must be inside it. Otherwise the scores must differ, and a verifier must accept
    only some responses. A reward may report a separate score for filtering. Failed scores are ignored; fewer than two
    scores count as failed.
    """
    known = [score for score in scores if score.value is not None]
    values = [score.value if score.filter is None else score.filter for score in known if score.value is not None]
    if len(values) < 2:
        return "failed"
    if config.dynamic_filtering_reward_range is not None:
        low, high = config.dynamic_filtering_reward_range
        mean = sum(values) / len(values)
        return "too_hard" if mean <= low else "too_easy" if mean >= high else "useful"
    judged = [score.status for score in known if score.status in ("correct", "wrong", "invalid")]
    if judged and judged.count("correct") in (0, len(judged)):
        return "too_easy" if "correct" in judged else "too_hard"
    return "alike" if is_alike(min(values), max(values)) else "useful"


def longest_needed(groups: Iterable[PromptGroup | None], missing: int, config: DynamicSamplingConfig) -> int | None:
    """Return the longest response up to the group that completes the batch, in tokens; None while it is incomplete.

    Args:
        groups: in prompt order, None for incomplete groups; not read beyond the first of these.
        missing: number of useful groups that the batch requires.
    """
    longest = 0
    for group in groups:
        if group is None:
            return None
        longest = max(longest, group.longest)
        missing -= usefulness(group.scores, config) == "useful"
        if missing == 0:
            return longest
    return None


@dataclass(frozen=True)
class RoundSplit:
    """Result of a round: groups for the batch, surplus groups, and prompts to sample again.

    `judged` are the groups with counted usefulness; groups at `postponed` positions are not judged.
    """

    accepted: list[PromptGroup]
    surplus: list[PromptGroup]
    postponed: list[int]
    judged: list[PromptGroup]


def sort_round(
    places: Sequence[int], groups: Sequence[PromptGroup | None], *, missing: int, config: DynamicSamplingConfig
) -> RoundSplit:
    """Split a round for a batch that requires `missing` groups.

    Useful groups are selected in prompt order. When the batch is full, a later group becomes surplus only if all its
    responses are at most as long as the longest response that the batch waited for. Longer ones were included only by
    chance of arrival, which would bias the next batch toward them, so their prompts are postponed.
    """
    longest = longest_needed(groups, missing, config)
    accepted: list[PromptGroup] = []
    surplus: list[PromptGroup] = []
    postponed: list[int] = []
    judged: list[PromptGroup] = []
    for place, group in zip(places, groups, strict=True):
        is_full = len(accepted) == missing
        if group is None or (is_full and longest is not None and group.longest > longest):
            postponed.append(place)
            continue
        judged.append(group)
        if usefulness(group.scores, config) == "useful":
            (surplus if is_full else accepted).append(group)
    return RoundSplit(accepted, surplus, postponed, judged)
