"""Requests to rewards and their scores."""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:  # reward workers import no torch
    from rlhf_cli.models.vision.pictures import Picture

Status = Literal["correct", "wrong", "invalid", "failed", "scored"]

FailureKind = Literal["raised", "bad_result", "timeout", "crashed", "unreachable", "load", "unjudged", "environment"]
"""Why there is no reward: an exception or an error of a server, an answer that is no reward, no answer in time, a
process or connection that ended, no connection, a file that cannot be loaded, a label or sandbox that is of no use, an
environment that broke in an episode."""


@dataclass(frozen=True, slots=True)
class ScoreRequest:
    """One response to score.

    `query` is prompt and response together; `label` the prompt's ground truth, if any; `num_tokens` counts the sampled
    tokens, including the end of sequence; `truncated` marks a response that was cut at the limit; responses of the same
    `group` are the samples of one prompt (a prompt that is sampled twice makes two groups): `sample` is the index in
    the group, `group_size` the number of samples.

    `source` is the row's name of its data set; `row` is JSON for reward files with `prompt` and `columns`; `token_ids`
    are the sampled tokens, `pictures` the pictures of the prompt in their order. Of an episode, `token_ids` have the
    observations too, `messages` are its turns and observations, `episode_reward` is the sum of the environment's
    rewards, and `episode_failure` completes a sentence about an environment that broke. The environment of an episode
    that `lacks_reward` has given none at all.
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
    token_ids: list[int] = field(default_factory=list)
    pictures: "tuple[Picture, ...]" = ()
    episode_reward: float | None = None
    episode_failure: str | None = None
    messages: tuple[dict[str, Any], ...] = ()
    lacks_reward: bool = False


@dataclass(frozen=True, slots=True)
class Score:
    """The score of one response, not clipped.

    `value` is None exactly if the status is "failed": the reward broke or ran out of time, which is not a score of 0.
    "correct", "wrong" and "invalid" (no answer to judge) come from a verifier, "scored" from a file alone. `detail` is
    the answer found, or why the reward failed; `parts` the unweighted value of each reward by its name. `answer` is the
    verifier's normalized answer (equal answers are equal texts), None if there is none: the key of a majority vote.
    `failure` is the kind of failure if the status is "failed". `filter` is the number for dynamic filtering, None if
    that is `value`; `metrics` are numbers that rewards report besides, by name.
    """

    value: float | None
    status: Status
    detail: str = ""
    parts: dict[str, float] = field(default_factory=dict)
    answer: str | None = None
    failure: FailureKind | None = None
    filter: float | None = None
    metrics: dict[str, float] = field(default_factory=dict)


class BadResult(Exception):
    """A reward gave an invalid answer; the message completes a sentence about the reward."""
