"""Groups of scored responses, and which of them an iteration trains on under dynamic sampling (DAPO, arXiv 2503.14476).

Pure: what is kept depends on responses, scores and the order of the prompts, never on what arrived first.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from rlhf_cli.config.online import DynamicSamplingConfig
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
    questions: list[ScoreRequest]
    scores: list[Score]

    @property
    def longest(self) -> int:
        """Tokens of the longest response."""
        return max(len(generation.token_ids) for generation in self.generations)


@dataclass(frozen=True)
class ScoredResponses:
    """Responses of several groups end to end; `groups` says which group each belongs to."""

    prompts: list[Prompt]
    generations: list[Generation]
    questions: list[ScoreRequest]
    scores: list[Score]
    groups: list[int]


def flat(groups: Sequence[PromptGroup]) -> ScoredResponses:
    """The responses of all groups."""
    return ScoredResponses(
        [group.prompt for group in groups for _ in group.scores],
        [generation for group in groups for generation in group.generations],
        [question for group in groups for question in group.questions],
        [score for group in groups for score in group.scores],
        [number for number, group in enumerate(groups) for _ in group.scores],
    )


def usefulness(scores: Sequence[Score], config: DynamicSamplingConfig) -> Usefulness:
    """What the scores of a group say of its prompt.

    With a range it is useful where their mean lies between its ends. Without one, where a verifier found some
    responses right and others not, and the scores differ. A reward may report another score to filter by. Failed
    scores are left out; fewer than two say nothing.
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
    return "alike" if min(values) == max(values) else "useful"


def longest_needed(groups: Iterable[PromptGroup | None], missing: int, config: DynamicSamplingConfig) -> int | None:
    """Tokens of the longest response up to the group that makes the batch full; None as long as it is not.

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
    """A round of prompts: the groups for the batch, those for the next iteration, and prompts to ask once more.

    `judged` are the groups whose usefulness counted; those of `postponed` places were not looked at.
    """

    accepted: list[PromptGroup]
    surplus: list[PromptGroup]
    postponed: list[int]
    judged: list[PromptGroup]


def sort_round(
    places: Sequence[int], groups: Sequence[PromptGroup | None], *, missing: int, config: DynamicSamplingConfig
) -> RoundSplit:
    """What becomes of a round of which the batch needs `missing` groups.

    Useful groups are taken in the order of the prompts. Behind the one that makes the batch full, a group counts if
    none of its responses is longer than the longest that had to be waited for: what is useful of these is surplus,
    which a longer one, finished or not, could only be by chance. Such prompts are postponed.
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
