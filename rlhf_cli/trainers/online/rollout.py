"""The responses of an iteration: prompts go to the engines, each response to the scorer as soon as it is finished."""

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

_LOOK_SECONDS = 0.1  # between looks at scores that may make the batch full, and at whether it is wanted


@dataclass(frozen=True)
class AskedPrompt:
    """A prompt at its place in the order of the run; `expected_tokens` is a guess of its responses' length."""

    place: int
    prompt: Prompt
    expected_tokens: int


@dataclass(frozen=True)
class Sampler:
    """Turns prompts into scored groups. `greedy` asks for a greedy response to each prompt too.

    `check_wanted` raises, and so ends the sampling, when nobody needs the responses any more.
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
    """One batch of prompts on its way through engines and scorer; a context manager."""

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
        self._added: list[int] = []  # numbers of the requests, in the order in which the scorer got their responses

    def __enter__(self) -> Self:
        self._context = self._sampler.scorer.session()
        self._session = self._context.__enter__()
        return self

    def __exit__(self, *failure: object) -> None:
        self._context.__exit__(*failure)  # type: ignore[arg-type]

    def generate(self, *, enough: Callable[["Round"], int | None] | None = None) -> None:
        """Ask the engines and pass finished responses to the scorer, until the last response.

        As soon as `enough` returns a number of tokens, longer responses are given up.
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
        """Wait for the missing scores. Raise RunError if they complete an iteration and too many failed."""
        found = self._session.finish(is_all=is_all)
        self._scores |= {self._added[number]: score for number, score in found.items()}

    def group(self, slot: int) -> PromptGroup | None:
        """Return the responses to the prompt of that number; None if one of them, or its score, is not there."""
        first = slot * self._sampler.num_samples
        return self._group(slot, range(first, first + self._sampler.num_samples))

    def groups(self) -> list[PromptGroup | None]:
        """Return the responses to all prompts."""
        return [self.group(slot) for slot in range(len(self._asked))]

    def greedy_groups(self) -> list[PromptGroup]:
        """Return the greedy response to each prompt, if they were asked for."""
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
        """Return the place of a response in its group; a greedy one is a group of its own."""
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
    """The groups of an iteration.

    `greedy` are the greedy responses to the same prompts; `filtered` the groups that taught nothing; `num_carried`
    counts the first of the groups, which an earlier policy sampled.
    """

    groups: list[PromptGroup]
    greedy: list[PromptGroup]
    filtered: list[PromptGroup]
    num_carried: int
    metrics: dict[str, float]


def sample_once(sampler: Sampler, asked: Sequence[AskedPrompt], timer: PhaseTimer) -> Rollout:
    """Return every prompt's group, whatever its scores are."""
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
    """Return the request for a response to the prompt, whose samples share the seed of their environments."""
    return GenerationRequest(
        prompt.prompt_ids,
        seed,
        expected_tokens,
        prompt.pictures,
        row=prompt.row,
        environment_seed=environment_seed,
    )


def request_seed(seed: int, place: int, sample: int, *, num_samples: int) -> int:
    """Return the seed of one request; requests are counted through the run by the place of their prompt."""
    return scattered_seed(seed, place * num_samples + sample)


def mean_lengths(groups: Sequence[PromptGroup]) -> dict[str, float]:
    """Return the mean response length in tokens by source of the prompts."""
    lengths: dict[str, list[int]] = {}
    for group in groups:
        found = [len(generation.token_ids) for generation in group.generations]
        lengths.setdefault(group.prompt.source, []).extend(found)
    return {source: float(np.mean(found)) for source, found in lengths.items()}


def prompt_lengths(known: Mapping[str, Mapping[str, int]], groups: Sequence[PromptGroup]) -> dict[str, dict[str, int]]:
    """Return the known mean response length of each prompt in tokens, by source and number of the row.

    Numbers are texts, as JSON has them.
    """
    lengths = {source: dict(found) for source, found in known.items()}
    for group in groups:
        mean = np.mean([len(generation.token_ids) for generation in group.generations])
        lengths.setdefault(group.prompt.source, {})[str(group.prompt.index)] = round(mean)
    return lengths
