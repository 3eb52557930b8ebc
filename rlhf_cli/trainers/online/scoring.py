"""Scoring of responses: requests to the rewards, and reward model scores."""

from collections.abc import Callable, Sequence
from dataclasses import replace

from rlhf_cli.config.scoring import RewardConfig
from rlhf_cli.data.prompts import Prompt
from rlhf_cli.data.rollouts import Generation
from rlhf_cli.rewards.model_scores import with_model_scores
from rlhf_cli.rewards.parts import stop_if_too_many_failed
from rlhf_cli.rewards.records import Score, ScoreRequest
from rlhf_cli.trainers.online.interfaces import RewardModel, Scoring, awake
from rlhf_cli.trainers.online.samples import Sample, scores_of

ZERO = Score(0.0, "scored")
"""Score of a response without rewards."""


def text_of_response(response: Generation, decode: Callable[[Sequence[int]], str]) -> str:
    """Return the text of a response without special tokens.

    An episode's text is that of its last turn without calls, so that a verifier never finds an answer in tool output or
    call arguments; "" for an episode that failed before its first turn.
    """
    if response.episode is None:
        return decode(response.token_ids)
    return str(response.episode.messages[-1]["content"]) if response.episode.messages else ""


def score_request(
    prompt: Prompt, response: Generation, text: str, *, group: str, index: int, size: int
) -> ScoreRequest:
    """Build the score request for sample `index` of a group with `size` samples."""
    episode = response.episode
    return ScoreRequest(
        query=prompt.text + text,
        prompt=prompt.text,
        response=text,
        label=prompt.label,
        num_tokens=response.num_sampled,
        truncated=response.finish_reason == "length",
        group=group,
        sample=index,
        group_size=size,
        source=prompt.data_source,
        row=prompt.row,
        token_ids=response.token_ids,
        pictures=tuple(placed.picture for placed in prompt.pictures),
        episode_reward=sum(episode.turn_rewards) if episode and episode.turn_rewards else None,
        episode_failure=episode.failure if episode else None,
        messages=episode.messages if episode else (),
        lacks_reward=episode is not None and episode.lacks_reward,
    )


def scored_samples(
    prompts: Sequence[Prompt],
    responses: Sequence[Generation],
    decode: Callable[[Sequence[int]], str],
    scorer: Scoring | None,
    *,
    num_samples: int,
    first: int = 0,
) -> list[Sample]:
    """Score responses, with samples of a prompt adjacent. Scores are 0 without a scorer.

    Args:
        prompts: prompt per response.
        first: number of the first group.
    """
    samples = [
        Sample(
            prompt,
            first + place // num_samples,
            place % num_samples,
            response,
            text_of_response(response, decode),
            ZERO,
        )
        for place, (prompt, response) in enumerate(zip(prompts, responses, strict=True))
    ]
    if scorer is None:
        return samples
    requests = [
        score_request(
            one.prompt, one.response, one.text, group=str(one.group - first), index=one.index or 0, size=num_samples
        )
        for one in samples
    ]
    scores = scorer.score(requests)
    return [replace(sample, score=score) for sample, score in zip(samples, scores, strict=True)]


def judged(samples: Sequence[Sample], model: RewardModel | None, reward: RewardConfig) -> list[Sample]:
    """Add all remaining rewards to the samples' scores.

    Raises:
        RunError: too many rewards failed.
    """
    if model is None:
        return list(samples)
    scored = add_model_scores(model, reward, samples)
    stop_if_too_many_failed(scores_of(scored), reward.reward_max_failures)
    return scored


def add_model_scores(model: RewardModel, reward: RewardConfig, samples: Sequence[Sample]) -> list[Sample]:
    """Add reward model scores, which cover the full response even if it is truncated."""
    with awake(model):
        values = model.scores([sample.sequence for sample in samples])
    scores = with_model_scores(scores_of(samples), values, weight=reward.reward_model_weight)
    return [replace(sample, score=score) for sample, score in zip(samples, scores, strict=True)]
