"""Rollouts: sends prompts to the engines, and each finished response to the scorer."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Self

import numpy as np

from rlhf_cli.data.prompts import Prompt
from rlhf_cli.data.rollouts import Generation, GenerationRequest, SamplingParams, scattered_seed
from rlhf_cli.rewards.records import Score
from rlhf_cli.tracking.phases import PhaseTimer
from rlhf_cli.trainers.online.interfaces import SamplingEngines, Scoring
from rlhf_cli.trainers.online.samples import Group, Sample
from rlhf_cli.trainers.online.scoring import score_request, text_of_response

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
        self._responses: dict[int, tuple[Generation, str]] = {}
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

    @property
    def _num_samples(self) -> int:
        return self._sampler.num_samples

    def group(self, slot: int) -> Group | None:
        """Return the samples of prompt `slot`; None while a response or score is missing."""
        first = slot * self._num_samples
        return self._group(slot, range(first, first + self._num_samples))

    def groups(self) -> list[Group | None]:
        """Return the responses to all prompts."""
        return [self.group(slot) for slot in range(len(self._asked))]

    def greedy_groups(self) -> list[Group]:
        """Return the greedy response per prompt, if enabled."""
        first = len(self._requests)
        numbers = range(len(self._asked)) if self._sampler.greedy else range(0)
        found = (self._group(slot, range(first + slot, first + slot + 1)) for slot in numbers)
        return [group for group in found if group is not None]

    def _group(self, slot: int, numbers: range) -> Group | None:
        if not all(number in self._scores for number in numbers):
            return None
        asked = self._asked[slot]
        return [
            Sample(asked.prompt, asked.place, self._index(number), *self._responses[number], self._scores[number])
            for number in numbers
        ]

    def _take(self, arrived: list[tuple[int, Generation]]) -> None:
        score_requests = []
        for number, response in arrived:
            text = text_of_response(response, self._sampler.decode)
            self._responses[number] = response, text
            self._added.append(number)
            asked, index = self._asked[self._slot(number)], self._index(number)
            # A greedy response is a group of its own: group rewards compare samples.
            group, size = (f"{asked.place} greedy", 1) if index is None else (str(asked.place), self._num_samples)
            score_requests.append(score_request(asked.prompt, response, text, group=group, index=index or 0, size=size))
        self._session.add(score_requests)

    def _slot(self, number: int) -> int:
        sampled = len(self._requests)
        return number - sampled if number >= sampled else number // self._num_samples

    def _index(self, number: int) -> int | None:
        """Return the index of a sample in its group, None for a greedy response."""
        return number % self._num_samples if number < len(self._requests) else None

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

    groups: list[Group]
    greedy: list[Group]
    filtered: list[Group]
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
