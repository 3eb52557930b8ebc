"""Rollouts: sends prompts to the engines, and each finished response to the rewards."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace

import numpy as np

from rlhf_cli.config.scoring import RewardConfig
from rlhf_cli.data.prompts import Prompt
from rlhf_cli.data.rollouts import Generation, GenerationRequest, SamplingParams, scattered_seed
from rlhf_cli.rewards.model_scores import with_model_scores
from rlhf_cli.rewards.parts import stop_if_too_many_failed
from rlhf_cli.rewards.records import Score, ScoreRequest
from rlhf_cli.tracking.phases import PhaseTimer
from rlhf_cli.trainers.online.interfaces import RewardModel, SamplingEngines, Scoring, ScoringSession
from rlhf_cli.trainers.online.samples import Group, Sample, scores_of

_ZERO = Score(0.0, "scored")
"""Score of a response without rewards."""

_LOOK_SECONDS = 0.1  # interval for scores that may complete the batch, for pushes, and for cancellation


@dataclass(frozen=True)
class Sampler:
    """Engines, rewards and settings that convert prompts to scored samples.

    - `scorer`: None without rewards; all scores are 0 then.
    - `seed`: requests and environments use seeds derived from it by group and sample.
    - `greedy`: adds a greedy response per prompt.
    - `expected_tokens`: estimates the response length for a prompt, to balance the load of engines.
    """

    engines: SamplingEngines
    scorer: Scoring | None
    decode: Callable[[Sequence[int]], str]
    sampling: SamplingParams
    num_samples: int
    seed: int
    greedy: bool = False
    expected_tokens: Callable[[Prompt], int] = lambda prompt: 0


class Round:
    """Prompts being sampled and scored. Requests are numbered by prompt, then sample; greedy ones follow."""

    def __init__(self, prompts: Mapping[int, Prompt], sampler: Sampler, session: ScoringSession | None) -> None:
        self._prompts = list(prompts.items())
        self._sampler = sampler
        self._session = session
        self._responses: dict[int, tuple[Generation, str]] = {}
        self._scores: dict[int, Score] = {}
        self._added: list[int] = []  # request numbers, in scoring order

    def requests(self) -> list[GenerationRequest]:
        """Return all requests without greedy ones."""
        seed, num_samples = self._sampler.seed, self._sampler.num_samples
        return [
            self._request(group, prompt, scattered_seed(seed, group * num_samples + index))
            for group, prompt in self._prompts
            for index in range(num_samples)
        ]

    async def generate(self, *, prompts_at_once: int | None, enough: Callable[["Round"], int | None] | None) -> None:
        """Generate responses, and pass finished ones to the scorer.

        As soon as `enough` returns a number of tokens, longer responses are dropped.
        """
        sampler, requests = self._sampler, self.requests()
        size = (prompts_at_once or len(self._prompts)) * sampler.num_samples
        for first in range(0, len(requests), size):
            await self._collect(first, requests[first : first + size], sampler.sampling, enough)
        if sampler.greedy:
            likeliest = [self._request(group, prompt, 0) for group, prompt in self._prompts]
            await self._collect(
                len(requests), likeliest, replace(sampler.sampling, greedy=True, returns_experts=False), None
            )

    async def finish(self, *, is_all: bool) -> None:
        """Wait for remaining scores. Raises RunError if they complete an iteration and too many failed."""
        if self._session is None:
            self._scores = dict.fromkeys(self._added, _ZERO)
        else:
            found = await self._session.finish(is_all=is_all)
            self._scores |= {self._added[number]: score for number, score in found.items()}

    def group(self, slot: int) -> Group | None:
        """Return the samples of prompt `slot`; None while a response or score is missing."""
        first = slot * self._sampler.num_samples
        return self._group(slot, range(first, first + self._sampler.num_samples))

    def groups(self) -> list[Group | None]:
        """Return the samples of each prompt."""
        return [self.group(slot) for slot in range(len(self._prompts))]

    def greedy_groups(self) -> list[Group]:
        """Return the greedy response per prompt, if enabled."""
        numbers = range(len(self._prompts)) if self._sampler.greedy else range(0)
        found = (self._group(slot, range(self._num_sampled + slot, self._num_sampled + slot + 1)) for slot in numbers)
        return [group for group in found if group is not None]

    def whole_groups(self) -> list[Group]:
        """Return the samples of each prompt without missing responses or scores."""
        return [group for group in self.groups() if group is not None]

    def _request(self, group: int, prompt: Prompt, seed: int) -> GenerationRequest:
        sampler = self._sampler
        return request_of(prompt, seed, sampler.expected_tokens(prompt), scattered_seed(sampler.seed, group))

    async def _collect(
        self,
        first: int,
        requests: list[GenerationRequest],
        sampling: SamplingParams,
        enough: Callable[["Round"], int | None] | None,
    ) -> None:
        """Generate a batch whose first request has number `first`."""
        engines, is_cut = self._sampler.engines, enough is None
        engines.begin(requests, sampling)
        while engines.is_generating:
            # Between two looks a push may use the engines, and a cancellation ends the batch.
            await asyncio.sleep(0)
            self._take([(first + number, response) for number, response in await engines.collect(_LOOK_SECONDS)])
            if not is_cut and enough is not None and self._has_new_scores():
                longest = enough(self)
                if longest is not None and engines.is_generating:
                    engines.cut(longest)
                    is_cut = True

    def _take(self, arrived: list[tuple[int, Generation]]) -> None:
        score_requests = []
        for number, response in arrived:
            text = text_of_response(response, self._sampler.decode)
            self._responses[number] = response, text
            self._added.append(number)
            (place, prompt), index = self._prompts[self._slot(number)], self._index(number)
            # A greedy response is a group of its own: group rewards compare samples.
            group, size = (f"{place} greedy", 1) if index is None else (str(place), self._sampler.num_samples)
            score_requests.append(score_request(prompt, response, text, group=group, index=index or 0, size=size))
        if self._session is not None:
            self._session.add(score_requests)

    def _group(self, slot: int, numbers: range) -> Group | None:
        if not all(number in self._scores for number in numbers):
            return None
        place, prompt = self._prompts[slot]
        return [
            Sample(prompt, place, self._index(number), *self._responses[number], self._scores[number])
            for number in numbers
        ]

    @property
    def _num_sampled(self) -> int:
        return len(self._prompts) * self._sampler.num_samples

    def _slot(self, number: int) -> int:
        sampled = self._num_sampled
        return number - sampled if number >= sampled else number // self._sampler.num_samples

    def _index(self, number: int) -> int | None:
        """Return the index of a sample in its group, None for a greedy response."""
        return number % self._sampler.num_samples if number < self._num_sampled else None

    def _has_new_scores(self) -> bool:
        ready = [] if self._session is None else self._session.ready()
        self._scores |= {self._added[number]: score for number, score in ready}
        return bool(ready)


async def sample_and_score(
    prompts: Mapping[int, Prompt],
    sampler: Sampler,
    timer: PhaseTimer,
    *,
    prompts_at_once: int | None = None,
    enough: Callable[[Round], int | None] | None = None,
    wakes_engines: bool = False,
) -> Round:
    """Sample responses to prompts, and score each as soon as it is complete.

    Args:
        prompts: by group number, which is the prompt's position in the run's order.
        prompts_at_once: prompts per engine batch, None for all.
        enough: returns the number of tokens above which responses are dropped, as soon as the batch is known to be
            full. Scores may be missing then.
        wakes_engines: whether to wake the engines first, and let them sleep while remaining scores are computed.

    Raises:
        RunError: too many rewards failed, unless `enough` is given: later rounds count too.
    """
    with nullcontext() if sampler.scorer is None else sampler.scorer.session() as session:
        work = Round(prompts, sampler, session)
        with timer("generate"):
            if wakes_engines:
                sampler.engines.wake_cache()
            await work.generate(prompts_at_once=prompts_at_once, enough=enough)
            if wakes_engines:
                sampler.engines.sleep()
        with timer("reward"):
            await work.finish(is_all=enough is None)
    return work


@dataclass(frozen=True)
class SampledGroups:
    """Groups of an iteration.

    - `greedy`: greedy responses to the same prompts.
    - `filtered`: groups without a learning signal.
    - `num_carried`: number of leading groups, sampled by an earlier policy.

    Example: 4 prompts with 2 samples each: `groups` has 4 lists of 2 samples. With dynamic sampling and one group of
    equal rewards, `groups` has 3 lists, and `filtered` has the other.
    """

    groups: list[Group]
    greedy: list[Group]
    filtered: list[Group]
    num_carried: int
    metrics: dict[str, float]


async def generate(
    engines: SamplingEngines, requests: list[GenerationRequest], sampling: SamplingParams
) -> list[Generation]:
    """Return one response per request, in order."""
    engines.begin(requests, sampling)
    responses: dict[int, Generation] = {}
    while engines.is_generating:
        responses |= await engines.collect()
    return [responses[number] for number in range(len(requests))]


async def sample_once(sampler: Sampler, prompts: Mapping[int, Prompt], timer: PhaseTimer) -> SampledGroups:
    """Return each prompt's group, regardless of scores."""
    work = await sample_and_score(prompts, sampler, timer, wakes_engines=True)
    return SampledGroups(work.whole_groups(), work.greedy_groups(), [], 0, {})


def request_of(prompt: Prompt, seed: int, expected_tokens: int = 0, environment_seed: int = 0) -> GenerationRequest:
    """Return the request for a prompt. All samples of a prompt use the same environment seed."""
    return GenerationRequest(
        prompt.prompt_ids,
        seed,
        expected_tokens,
        prompt.pictures,
        row=prompt.row,
        environment_seed=environment_seed,
    )


def text_of_response(response: Generation, decode: Callable[[Sequence[int]], str]) -> str:
    """Return the text of a response without special tokens, from the engine if it decodes.

    An episode's text is that of its last turn without calls, so that a verifier never finds an answer in tool output or
    call arguments; "" for an episode that failed before its first turn.
    """
    if response.episode is None:
        return decode(response.token_ids) if response.text is None else response.text
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


def scored_by_all(samples: Group, model: RewardModel | None, reward: RewardConfig) -> Group:
    """Add reward model scores if there is a model.

    Raises:
        RunError: too many rewards failed.
    """
    stop_if_too_many_failed(scores_of(samples), reward.reward_max_failures)
    if model is None:
        return samples
    scored = add_model_scores(model, reward, samples)
    stop_if_too_many_failed(scores_of(scored), reward.reward_max_failures)
    return scored


def add_model_scores(model: RewardModel, reward: RewardConfig, samples: Sequence[Sample]) -> list[Sample]:
    """Add reward model scores, which cover the full response even if it is truncated."""
    values = model.scores([sample.sequence for sample in samples])
    scores = with_model_scores(scores_of(samples), values, weight=reward.reward_model_weight)
    return [replace(sample, score=score) for sample, score in zip(samples, scores, strict=True)]


def mean_lengths(groups: Sequence[Group]) -> dict[str, float]:
    """Return the mean response length in tokens per prompt source."""
    lengths: dict[str, list[int]] = {}
    for group in groups:
        found = [len(sample.response.token_ids) for sample in group]
        lengths.setdefault(group[0].prompt.source, []).extend(found)
    return {source: float(np.mean(found)) for source, found in lengths.items()}


def prompt_lengths(known: Mapping[str, Mapping[str, int]], groups: Sequence[Group]) -> dict[str, dict[str, int]]:
    """Update the mean response lengths in tokens, by source and row number.

    Row numbers are strings, as JSON requires.
    """
    lengths = {source: dict(found) for source, found in known.items()}
    for group in groups:
        mean, prompt = np.mean([len(sample.response.token_ids) for sample in group]), group[0].prompt
        lengths.setdefault(prompt.source, {})[str(prompt.index)] = round(mean)
    return lengths
