"""Groups of scored responses, and their selection for dynamic sampling (DAPO, arXiv 2503.14476).

Pure functions: the selection depends on responses, scores and prompt order, never on arrival order.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from rlhf_cli.algorithms.groups import is_alike
from rlhf_cli.config.rollout import DynamicSamplingConfig
from rlhf_cli.rewards.records import Score
from rlhf_cli.trainers.online.samples import Group, scores_of

_Usefulness = Literal["useful", "too_hard", "too_easy", "alike", "failed"]
"""Usefulness of a prompt. Groups that are too_hard, too_easy or alike have no learning signal with a group baseline."""


def longest(group: Group) -> int:
    """Return the number of tokens in the longest response, over all branches of episodes."""
    return max(sample.response.longest for sample in group)


def usefulness(scores: Sequence[Score], config: DynamicSamplingConfig) -> _Usefulness:
    """Classify a group by its scores.

    With a reward range, the mean score must be inside it. Otherwise the scores must differ, and a verifier must accept
    only some responses. A reward may report a separate score for filtering. Failed scores are ignored; fewer than two
    scores count as failed.
    """
    # A failed reward says nothing about the prompt.
    known = [score for score in scores if score.value is not None]
    values = [score.value if score.filter is None else score.filter for score in known if score.value is not None]
    if len(values) < 2:
        return "failed"
    if config.dynamic_filtering_reward_range is not None:
        low, high = config.dynamic_filtering_reward_range
        mean = sum(values) / len(values)
        return "too_hard" if mean <= low else "too_easy" if mean >= high else "useful"
    # Rewards without verdicts are compared by value below.
    judged = [score.status for score in known if score.status in ("correct", "wrong", "invalid")]
    if judged and judged.count("correct") in (0, len(judged)):
        return "too_easy" if "correct" in judged else "too_hard"
    return "alike" if is_alike(min(values), max(values)) else "useful"


def longest_needed(groups: Iterable[Group | None], missing: int, config: DynamicSamplingConfig) -> int | None:
    """Return the longest response up to the group that completes the batch, in tokens; None while it is incomplete.

    Args:
        groups: in prompt order, None for incomplete groups; not read beyond the first of these.
        missing: number of useful groups that the batch requires.
    """
    needed = 0
    for group in groups:
        if group is None:
            return None
        needed = max(needed, longest(group))
        # `True` counts as 1.
        missing -= usefulness(scores_of(group), config) == "useful"
        if missing == 0:
            return needed
    return None


@dataclass(frozen=True)
class _RoundSplit:
    """Result of a round: groups for the batch, surplus groups, and prompts to sample again.

    `judged` are the groups with counted usefulness; groups at `postponed` positions are not judged.
    """

    accepted: list[Group]
    surplus: list[Group]
    postponed: list[int]
    judged: list[Group]


def sort_round(
    places: Sequence[int], groups: Sequence[Group | None], *, missing: int, config: DynamicSamplingConfig
) -> _RoundSplit:
    """Split a round for a batch that requires `missing` groups.

    Useful groups are selected in prompt order. When the batch is full, a later group becomes surplus only if all its
    responses are at most as long as the longest response that the batch waited for. Longer ones were included only by
    chance of arrival, which would bias the next batch toward them, so their prompts are postponed.
    """
    needed = longest_needed(groups, missing, config)
    accepted: list[Group] = []
    surplus: list[Group] = []
    postponed: list[int] = []
    judged: list[Group] = []
    for place, group in zip(places, groups, strict=True):
        # Check before adding: the group that completes the batch is accepted.
        is_full = len(accepted) == missing
        if group is None or (is_full and needed is not None and longest(group) > needed):
            postponed.append(place)
            continue
        judged.append(group)
        if usefulness(scores_of(group), config) == "useful":
            (surplus if is_full else accepted).append(group)
    return _RoundSplit(accepted, surplus, postponed, judged)
