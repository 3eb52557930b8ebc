"""Scoring of responses: requests to the rewards, and reward model scores."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rlhf_cli.config.scoring import RewardConfig
from rlhf_cli.data.prompts import Prompt
from rlhf_cli.data.rollouts import Episode, Generation
from rlhf_cli.rewards.model_scores import with_model_scores
from rlhf_cli.rewards.parts import stop_if_too_many_failed
from rlhf_cli.rewards.records import Score, ScoreRequest
from rlhf_cli.trainers.online.interfaces import RewardModel, Scoring, awake
from rlhf_cli.trainers.online.responses import as_sequence


@dataclass(frozen=True, slots=True)
class GroupPlace:
    """Position of a response, counted from 0, in a group with `size` responses."""

    group: str
    sample: int
    size: int


def whole_groups(num_prompts: int, num_samples: int) -> list[GroupPlace]:
    """Return positions for all samples, grouped by prompt."""
    return [
        GroupPlace(str(group), sample, num_samples) for group in range(num_prompts) for sample in range(num_samples)
    ]


def make_score_requests(
    prompts: Sequence[Prompt],
    generations: Sequence[Generation],
    decode: Callable[[Sequence[int]], str],
    *,
    places: Sequence[GroupPlace],
) -> list[ScoreRequest]:
    """Build score requests with prompt and response text. Special tokens are removed from responses.

    An episode's response is the text of its last turn, so that a verifier never finds an answer in tool output or call
    arguments.

    Args:
        prompts: prompt per response.
        places: position in the group per response; a prompt may be sampled twice in an iteration.
    """
    requests = []
    for prompt, generation, place in zip(prompts, generations, places, strict=True):
        episode = generation.episode
        response = decode(generation.token_ids) if episode is None else _last_words(episode)
        requests.append(
            ScoreRequest(
                query=prompt.text + response,
                prompt=prompt.text,
                response=response,
                label=prompt.label,
                num_tokens=generation.num_sampled,
                truncated=generation.finish_reason == "length",
                group=place.group,
                sample=place.sample,
                group_size=place.size,
                source=prompt.data_source,
                row=prompt.row,
                token_ids=generation.token_ids,
                pictures=tuple(placed.picture for placed in prompt.pictures),
                episode_reward=sum(episode.turn_rewards) if episode and episode.turn_rewards else None,
                episode_failure=episode.failure if episode else None,
                messages=episode.messages if episode else (),
                lacks_reward=episode is not None and episode.lacks_reward,
            )
        )
    return requests


def _last_words(episode: Episode) -> str:
    """Return the text of the last turn without calls; "" for an episode that failed before its first turn."""
    return str(episode.messages[-1]["content"]) if episode.messages else ""


def score_responses(
    scorer: Scoring,
    reward_model: RewardModel | None,
    reward: RewardConfig,
    *,
    asked: Sequence[Prompt],
    generations: Sequence[Generation],
    score_requests: list[ScoreRequest],
) -> list[Score]:
    """Score each response with all rewards.

    Raises:
        RunError: too many rewards failed.
    """
    scores = scorer.score(score_requests)
    if reward_model is None:
        return scores
    joined = add_model_scores(reward_model, reward, asked, generations, scores)
    stop_if_too_many_failed(joined, reward.reward_max_failures)
    return joined


def add_model_scores(
    model: RewardModel,
    reward: RewardConfig,
    prompts: Sequence[Prompt],
    generations: Sequence[Generation],
    scores: Sequence[Score],
) -> list[Score]:
    """Add reward model scores, which cover the full response even if it is truncated."""
    pairs = zip(prompts, generations, strict=True)
    with awake(model):
        values = model.scores([as_sequence(prompt, generation) for prompt, generation in pairs])
    return with_model_scores(scores, values, weight=reward.reward_model_weight)
