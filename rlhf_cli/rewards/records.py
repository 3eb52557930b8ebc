"""Reward requests and scores."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

# Reward workers must start fast, so nothing here imports torch at run time.
if TYPE_CHECKING:
    from rlhf_cli.models.vision.pictures import Picture

Status = Literal["correct", "wrong", "invalid", "failed", "scored"]

FailureKind = Literal["raised", "bad_result", "timeout", "crashed", "unreachable", "load", "unjudged", "environment"]
"""Why a reward is missing:

- `raised`: the reward function raised, or the server returned an error status.
- `bad_result`: the result is not a valid reward.
- `timeout`: no result within the time limit.
- `crashed`: the process exited or the connection dropped.
- `unreachable`: the connection could not be opened.
- `load`: the reward file could not be loaded.
- `unjudged`: the label is unusable or the sandbox broke.
- `environment`: the environment broke during the episode, or returned no reward.
"""


@dataclass(frozen=True, slots=True)
class ScoreRequest:
    """One response to score.

    - `query`: prompt and response concatenated.
    - `label`: ground truth, if any.
    - `num_tokens`: sampled tokens, including the end-of-sequence token.
    - `truncated`: the response reached the token limit.
    - `group`: ID shared by the samples for one prompt. A prompt that is sampled twice makes two groups.
    - `sample`, `group_size`: index within the group, and samples per group.
    - `source`: dataset name from the row.
    - `row`: JSON object with `prompt` and `columns`, for reward files.
    - `token_ids`: sampled tokens; for episodes, observations too.
    - `pictures`: images from the prompt, in order.
    - `messages`: turns and observations, for episodes.
    - `episode_reward`: sum over the environment's rewards.
    - `episode_failure`: completes a sentence about an environment that broke.
    - `lacks_reward`: the environment returned no reward during the episode.

    Example: the third of four responses to a prompt: `ScoreRequest("2+3=5", "2+3=", "5", label="5", num_tokens=2,
    truncated=False, group="340", sample=2, group_size=4)`.
    """

    query: str
    prompt: str
    response: str
    label: str | None
    num_tokens: int
    truncated: bool
    group: str
    sample: int
    group_size: int
    source: str | None = None
    row: str | None = None
    token_ids: Sequence[int] = field(default_factory=list)
    pictures: "tuple[Picture, ...]" = ()
    episode_reward: float | None = None
    episode_failure: str | None = None
    messages: tuple[dict[str, object], ...] = ()
    lacks_reward: bool = False


@dataclass(frozen=True, slots=True)
class Score:
    """Unclipped score for one response, by one reward or by all.

    - `value`: weighted sum; None exactly if the status is "failed". A failed reward is never a score of 0.
    - `status`: "correct", "wrong" or "invalid" (no answer found) if a verifier ran, "scored" otherwise.
    - `detail`: the extracted answer, or the failure reason.
    - `parts`: unweighted value by reward name.
    - `answer`: normalized answer for majority voting; equal answers are equal strings. None without an answer.
    - `failure`: failure kind if the status is "failed".
    - `filter`: value for dynamic filtering; None uses `value`.
    - `metrics`: extra metrics reported by rewards, by name.
    - `judgements`: verdicts of judges as JSON values, each with a `reason`, or why there is none in `failed`.

    Example of a right answer in a wrong format:
    `Score(1.0, "correct", "5", {"exact": 1.0, "format": 0.0}, answer="5")`.
    """

    value: float | None
    status: Status
    detail: str = ""
    parts: dict[str, float] = field(default_factory=dict)
    answer: str | None = None
    failure: FailureKind | None = None
    filter: float | None = None
    metrics: dict[str, float] = field(default_factory=dict)
    judgements: list[dict[str, object]] = field(default_factory=list)


class BadResult(Exception):
    """Invalid reward result. The message completes a sentence about the reward."""
