"""Rollouts: sends prompts to the engines, and each finished response to the scorer."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Self

import numpy as np

from rlhf_cli.data.prompts import Prompt
from rlhf_cli.data.rollouts import Generation, GenerationRequest, SamplingParams, scattered_seed
from rlhf_cli.rewards.records import Score, ScoreRequest
from rlhf_cli.tracking.phases import PhaseTimer
from rlhf_cli.trainers.online.groups import PromptGroup
from rlhf_cli.trainers.online.interfaces import SamplingEngines, Scoring
from rlhf_cli.trainers.online.scoring import GroupPlace, make_score_requests

_LOOK_SECONDS = 0.1  # polling interval for scores that may complete the batch, and for cancellation


@dataclass(frozen=True)
class AskedPrompt:
    """A prompt with its position in the run's order; `expected_tokens` estimates its response length."""

    place: int
    prompt: Prompt
    expected_tokens: int


@dataclass(frozen=True)
class Sampler:
    """Converts prompts to scored groups. `greedy` adds a greedy response per prompt.

    `check_wanted` raises to stop sampling when responses are no longer needed.
    """

    engines: SamplingEngines
    scorer: Scoring
    decode: Callable[[Sequence[int]], str]
    sampling: SamplingParams
    num_samples: int
    greedy: bool
    seed: int
    check_wanted: Callable[[], None] = lambda: None


class Round:
    """A batch of prompts processed by engines and scorer. Use as a context manager."""

    def __init__(self, sampler: Sampler, asked: Sequence[AskedPrompt]) -> None:
        self._sampler = sampler
        self._asked = asked
        self._requests = [
            request_of(
                one.prompt,
                request_seed(sampler.seed, one.place, sample, num_samples=sampler.num_samples),
                one.expected_tokens,
                scattered_seed(sampler.seed, one.place),
            )
            for one in asked
            for sample in range(sampler.num_samples)
        ]
        self._generations: dict[int, Generation] = {}
        self._score_requests: dict[int, ScoreRequest] = {}
        self._scores: dict[int, Score] = {}
        self._added: list[int] = []  # request numbers, in scoring order

    def __enter__(self) -> Self:
        self._context = self._sampler.scorer.session()
        self._session = self._context.__enter__()
        return self

    def __exit__(self, *failure: object) -> None:
        self._context.__exit__(*failure)  # type: ignore[arg-type]

    def generate(self, *, enough: Callable[["Round"], int | None] | None = None) -> None:
        """Generate responses, and pass finished ones to the scorer.

        As soon as `enough` returns a number of tokens, longer responses are dropped.
        """
        sampler, is_cut = self._sampler, enough is None
        sampler.engines.begin(self._requests, sampler.sampling)
        while sampler.engines.is_generating:
            sampler.check_wanted()
            self._take(sampler.engines.collect(_LOOK_SECONDS))
            if not is_cut and enough is not None and self._has_new_scores():
                longest = enough(self)
                if longest is not None and sampler.engines.is_generating:
                    sampler.engines.cut(longest)
                    is_cut = True
        if sampler.greedy:
            likeliest = [
                request_of(one.prompt, 0, one.expected_tokens, scattered_seed(sampler.seed, one.place))
                for one in self._asked
            ]
            sampler.engines.begin(likeliest, replace(sampler.sampling, greedy=True))
            while sampler.engines.is_generating:
                sampler.check_wanted()
                found = sampler.engines.collect(_LOOK_SECONDS)
                self._take([(len(self._requests) + number, generation) for number, generation in found])

    def finish(self, *, is_all: bool) -> None:
        """Wait for remaining scores. Raises RunError if they complete an iteration and too many failed."""
        found = self._session.finish(is_all=is_all)
        self._scores |= {self._added[number]: score for number, score in found.items()}

    def group(self, slot: int) -> PromptGroup | None:
        """Return the responses to prompt `slot`; None while a response or score is missing."""
        first = slot * self._sampler.num_samples
        return self._group(slot, range(first, first + self._sampler.num_samples))

    def groups(self) -> list[PromptGroup | None]:
        """Return the responses to all prompts."""
        return [self.group(slot) for slot in range(len(self._asked))]

    def greedy_groups(self) -> list[PromptGroup]:
        """Return the greedy response per prompt, if enabled."""
        first = len(self._requests)
        numbers = range(len(self._asked)) if self._sampler.greedy else range(0)
        found = (self._group(slot, range(first + slot, first + slot + 1)) for slot in numbers)
        return [group for group in found if group is not None]

    def _group(self, slot: int, numbers: range) -> PromptGroup | None:
        if not all(number in self._scores for number in numbers):
            return None
        return PromptGroup(
            self._asked[slot].place,
            self._asked[slot].prompt,
            [self._generations[number] for number in numbers],
            [self._score_requests[number] for number in numbers],
            [self._scores[number] for number in numbers],
        )

    def _take(self, arrived: list[tuple[int, Generation]]) -> None:
        asked = [self._asked[self._slot(number)] for number, _ in arrived]
        score_requests = make_score_requests(
            [one.prompt for one in asked],
            [generation for _, generation in arrived],
            self._sampler.decode,
            places=[self._place(number) for number, _ in arrived],
        )
        self._session.add(score_requests)
        for (number, generation), request in zip(arrived, score_requests, strict=True):
            self._generations[number], self._score_requests[number] = generation, request
            self._added.append(number)

    def _slot(self, number: int) -> int:
        sampled = len(self._requests)
        return number - sampled if number >= sampled else number // self._sampler.num_samples

    def _place(self, number: int) -> GroupPlace:
        """Return a response's position in its group. A greedy response forms a separate group."""
        place, num_samples = self._asked[self._slot(number)].place, self._sampler.num_samples
        if number >= len(self._requests):
            return GroupPlace(f"{place} greedy", 0, 1)
        return GroupPlace(str(place), number % num_samples, num_samples)

    def _has_new_scores(self) -> bool:
        ready = self._session.ready()
        self._scores |= {self._added[number]: score for number, score in ready}
        return bool(ready)


@dataclass(frozen=True)
class Rollout:
    """Groups of an iteration.

    - `greedy`: greedy responses to the same prompts.
    - `filtered`: groups without a learning signal.
    - `num_carried`: number of leading groups, sampled by an earlier policy.
    """

    groups: list[PromptGroup]
    greedy: list[PromptGroup]
    filtered: list[PromptGroup]
    num_carried: int
    metrics: dict[str, float]


def sample_once(sampler: Sampler, asked: Sequence[AskedPrompt], timer: PhaseTimer) -> Rollout:
    """Return each prompt's group, regardless of scores."""
    with Round(sampler, asked) as one:
        with timer("generate"):
            sampler.engines.wake_cache()
            one.generate()
            sampler.engines.sleep()
        with timer("reward"):
            one.finish(is_all=True)
        groups = [group for group in one.groups() if group is not None]
        return Rollout(groups, one.greedy_groups(), [], 0, {})


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


def request_seed(seed: int, place: int, sample: int, *, num_samples: int) -> int:
    """Return a request's seed, determined by the prompt's position in the run and the sample number."""
    return scattered_seed(seed, place * num_samples + sample)


def mean_lengths(groups: Sequence[PromptGroup]) -> dict[str, float]:
    """Return the mean response length in tokens per prompt source."""
    lengths: dict[str, list[int]] = {}
    for group in groups:
        found = [len(generation.token_ids) for generation in group.generations]
        lengths.setdefault(group.prompt.source, []).extend(found)
    return {source: float(np.mean(found)) for source, found in lengths.items()}


def prompt_lengths(known: Mapping[str, Mapping[str, int]], groups: Sequence[PromptGroup]) -> dict[str, dict[str, int]]:
    """Update the mean response lengths in tokens, by source and row number.

    Row numbers are strings, as JSON requires.
    """
    lengths = {source: dict(found) for source, found in known.items()}
    for group in groups:
        mean = np.mean([len(generation.token_ids) for generation in group.generations])
        lengths.setdefault(group.prompt.source, {})[str(group.prompt.index)] = round(mean)
    return lengths
