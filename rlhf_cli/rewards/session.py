"""Responses that are scored while others are still being generated."""

import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from types import TracebackType
from typing import Self

from rlhf_cli.config.online import ScoringConfig
from rlhf_cli.rewards.parts import FILE_PART, Part, file_parts, join, stop_if_too_many_failed, verdict_part
from rlhf_cli.rewards.pool import Failure, Feed, WorkerPool
from rlhf_cli.rewards.records import Score, ScoreRequest

logger = logging.getLogger(__name__)


class ScoringSession:
    """One round of scoring; a context manager that leaves no work behind it.

    Workers begin with a response when it is added, whatever the caller does meanwhile. The reward file may compare
    responses and is asked about all of them at the end; with one, no score is complete before `finish`.
    """

    def __init__(
        self,
        config: ScoringConfig,
        *,
        weights: Mapping[str, float],
        verifiers: WorkerPool | None,
        file: WorkerPool | None,
    ) -> None:
        self._config, self._weights, self._file = config, weights, file
        self._requests: list[ScoreRequest] = []
        self._parts: list[dict[str, Part]] = []  # of each response, by name of the reward
        self._scores: dict[int, Score] = {}
        self._unreported: list[int] = []  # of the scores
        self._failures: list[Failure] = []
        with ExitStack() as stack:
            self._feed: Feed | None = stack.enter_context(verifiers.feed()) if verifiers else None
            self._resources = stack.pop_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._resources.close()

    def add(self, requests: Sequence[ScoreRequest]) -> range:
        """Begin to score more responses; their numbers, counted from 0. Returns at once."""
        numbers = range(len(self._requests), len(self._requests) + len(requests))
        self._requests += requests
        self._parts += [{} for _ in requests]
        if self._feed is not None:
            names = self._config.reward_funcs
            self._feed.add([name, request.response, request.label] for request in requests for name in names)
        for number in numbers:
            self._conclude_if_complete(number)
        return numbers

    def ready(self) -> list[tuple[int, Score]]:
        """Scores that are complete since the last call, each with the number of its response. Never waits."""
        self._collect()
        numbers, self._unreported = self._unreported, []
        return [(number, self._scores[number]) for number in numbers]

    def finish(self) -> list[Score]:
        """Wait for all scores; they come in the order of adding.

        Raises RunError if the share of failed ones is above reward_max_failures.
        """
        if self._feed is not None:
            self._feed.finish()
            self._collect()
        if self._file is not None and self._requests:
            for number, part in enumerate(self._ask_file(self._file)):
                self._parts[number][FILE_PART] = part
                self._conclude_if_complete(number)
        self._log()
        scores = [self._scores[number] for number in range(len(self._requests))]
        stop_if_too_many_failed(scores, self._config.reward_max_failures)
        return scores

    def _collect(self) -> None:
        """Take what the verifiers have found."""
        names = self._config.reward_funcs
        for item, outcome in self._feed.ready() if self._feed is not None else []:
            number, place = divmod(item, len(names))
            self._parts[number][names[place]] = verdict_part(names[place], outcome)
            self._failures += [outcome.failure] if outcome.failure is not None else []
            self._conclude_if_complete(number)

    def _conclude_if_complete(self, number: int) -> None:
        """Make the score of a response once all of its parts are there."""
        wanted = [*self._config.reward_funcs, *([FILE_PART] if self._file is not None else [])]
        parts = self._parts[number]
        if number not in self._scores and len(parts) == len(wanted):
            self._scores[number] = join({name: parts[name] for name in wanted}, self._weights)
            self._unreported.append(number)

    def _ask_file(self, pool: WorkerPool) -> list[Part]:
        """Parts from the reward file; where it failed, it is asked about all responses again."""
        batch = {
            "queries": [request.query for request in self._requests],
            "prompts": [request.prompt for request in self._requests],
            "labels": [request.label for request in self._requests],
        }
        parts: list[Part] = []
        for _ in range(1 + self._config.reward_retries):
            outcome = pool.map([batch])[0]
            self._failures += [outcome.failure] if outcome.failure is not None else []
            new = file_parts(outcome, len(self._requests))
            parts = [old if old.value is not None else now for old, now in zip(parts or new, new, strict=True)]
            if all(part.value is not None for part in parts):
                break
        return parts

    def _log(self) -> None:
        """Each kind of failure once and in full; the person at the terminal gets one sentence if it matters."""
        for failure, count in Counter(self._failures).items():
            logger.warning("%d rewards failed: %s\n%s", count, failure.reason, failure.trace)
        self._failures.clear()
