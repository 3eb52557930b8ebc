"""Groups of scored responses, and the choice among them under dynamic sampling (DAPO, arXiv 2503.14476).

Pure: the choice depends on responses, scores and the order of the prompts, never on the order of arrival.
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
"""What a prompt is to the policy: too_hard, too_easy and alike teach a group's baseline nothing."""


@dataclass(frozen=True)
class PromptGroup:
    """All responses to one prompt, lists by response; `place` is the prompt's in the order of the run."""

    place: int
    prompt: Prompt
    generations: list[Generation]
    score_requests: list[ScoreRequest]
    scores: list[Score]

    @property
    def longest(self) -> int:
        """Tokens of the longest response, of all branches of episodes."""
        return max(generation.longest for generation in self.generations)


def usefulness(scores: Sequence[Score], config: DynamicSamplingConfig) -> Usefulness:
    """Return whether the scores of a group make its prompt worth training on.

    With a range, the mean score must lie inside it. Without a range, the scores must differ, and a verifier must find
    some responses right and others wrong. A reward may report another score to filter by. Failed scores are ignored;
    fewer than two scores decide nothing.
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
    """Return the tokens of the longest response up to the group that makes the batch full; None as long as it is not.

    Args:
        groups: in the order of the prompts, None for one that is not complete yet; not read beyond the first such.
        missing: useful groups that the batch needs.
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
    """A round of prompts: groups for the batch, groups for the next iteration, and prompts to ask once more.

    `judged` are the groups whose usefulness counted; groups of `postponed` places were not looked at.
    """

    accepted: list[PromptGroup]
    surplus: list[PromptGroup]
    postponed: list[int]
    judged: list[PromptGroup]


def sort_round(
    places: Sequence[int], groups: Sequence[PromptGroup | None], *, missing: int, config: DynamicSamplingConfig
) -> RoundSplit:
    """Split a round of which the batch needs `missing` groups.

    Useful groups are taken in the order of the prompts. Once the batch is full, a later group is kept as surplus only
    if all its responses are no longer than the longest response that was waited for. A longer response would be there
    by chance of arrival, which would bias the next batch, so its prompt is postponed.
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
