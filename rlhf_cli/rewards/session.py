"""Responses that are scored while others are still being generated."""

import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from types import TracebackType
from typing import Any, Self

from rlhf_cli.config.online import ScoringConfig
from rlhf_cli.rewards.functions import resolve
from rlhf_cli.rewards.parts import (
    FILE_PART,
    REMOTE_PART,
    Part,
    file_parts,
    is_correct,
    join,
    judged_part,
    remote_part,
    stop_if_too_many_failed,
    worker_part,
)
from rlhf_cli.rewards.pool import Failure, Feed, WorkerPool
from rlhf_cli.rewards.records import Score, ScoreRequest
from rlhf_cli.rewards.remote import RemoteFeed, RemoteRewards

logger = logging.getLogger(__name__)

_OPENED = "<think>"  # templates that make a model think end in it, so that responses begin behind it


class ScoringSession:
    """One round of scoring; a context manager that leaves no work behind it.

    Workers and servers begin with a response when it is added, whatever the caller does meanwhile; which responses come
    to a server in one request depends on when they are added. The reward file and rewards that compare the responses to
    a prompt are asked at the end; with one of them no score is complete before `finish`.
    """

    def __init__(
        self,
        config: ScoringConfig,
        *,
        weights: Mapping[str, float],
        workers: WorkerPool | None,
        file: WorkerPool | None,
        servers: RemoteRewards | None,
    ) -> None:
        self._config, self._weights, self._file = config, weights, file
        calls = config.rewards
        others = {FILE_PART: file, REMOTE_PART: servers}
        self._names = [*(call.name for call in calls), *(name for name, source in others.items() if source is not None)]
        self._verifier = next((call.name for call in calls if call.row.kind == "verifier"), None)
        self._of_workers = [call for call in calls if call.row.in_worker]
        self._of_length = [(call, resolve(call)) for call in calls if call.row.kind == "length"]
        self._of_groups = [(call, resolve(call)) for call in calls if call.row.kind == "group"]
        self._requests: list[ScoreRequest] = []
        self._parts: list[dict[str, Part]] = []  # of each response, by name of the reward
        self._scores: dict[int, Score] = {}
        self._unreported: list[int] = []  # of the scores
        self._failures: list[Failure] = []
        with ExitStack() as stack:
            self._feed: Feed | None = stack.enter_context(workers.feed()) if workers is not None else None
            self._remote: RemoteFeed | None = stack.enter_context(servers.feed()) if servers is not None else None
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
            places = range(len(self._of_workers))
            self._feed.add(self._item(request, place) for request in requests for place in places)
        else:
            for number in numbers:
                self._judge_length(number)
                self._conclude_if_complete(number)
        if self._remote is not None:
            self._remote.add(requests)
        return numbers

    def ready(self) -> list[tuple[int, Score]]:
        """Scores that are complete since the last call, each with the number of its response. Never waits."""
        self._collect()
        numbers, self._unreported = self._unreported, []
        return [(number, self._scores[number]) for number in numbers]

    def finish(self, order: Sequence[int] | None = None) -> list[Score]:
        """Wait for all scores; they come in the order of adding.

        Rewards that see several responses get them in `order` of their numbers, that of adding if it is not given:
        what they say must not depend on which response was finished first.

        Raises RunError if the share of failed ones is above reward_max_failures.
        """
        if self._feed is not None:
            self._feed.finish()
        if self._remote is not None:
            self._remote.finish()
        self._collect()
        if (self._file is not None or self._of_groups) and self._requests:
            numbers = range(len(self._requests)) if order is None else order
            self._compare_groups(numbers)
            if self._file is not None:
                for number, part in zip(numbers, self._ask_file(self._file, numbers), strict=True):
                    self._parts[number][FILE_PART] = part
            for number in numbers:
                self._conclude_if_complete(number)
        self._log()
        scores = [self._scores[number] for number in range(len(self._requests))]
        stop_if_too_many_failed(scores, self._config.reward_max_failures)
        return scores

    def _item(self, request: ScoreRequest, place: int) -> list[Any]:
        """What a worker is told: of a text reward the response as it reads behind its prompt's last tag."""
        opened = self._of_workers[place].row.kind == "text" and request.prompt.rstrip().endswith(_OPENED)
        return [place, (_OPENED if opened else "") + request.response, request.label]

    def _collect(self) -> None:
        """Take what workers and servers have found."""
        for item, outcome in self._feed.ready() if self._feed is not None else []:
            number, place = divmod(item, len(self._of_workers))
            call = self._of_workers[place]
            self._parts[number][call.name] = worker_part(call, outcome)
            self._failures += [outcome.failure] if outcome.failure is not None else []
            if all(call.name in self._parts[number] for call in self._of_workers):
                self._judge_length(number)
                self._conclude_if_complete(number)
        for number, outcome in self._remote.ready() if self._remote is not None else []:
            self._parts[number][REMOTE_PART] = remote_part(outcome)
            self._failures += [outcome.failure] if outcome.failure is not None else []
            self._conclude_if_complete(number)

    def _verdict(self, number: int) -> Part | None:
        return None if self._verifier is None else self._parts[number][self._verifier]

    def _judge_length(self, number: int) -> None:
        """Add the parts that go by the length of a response and by what the workers found."""
        verdict = self._verdict(number)
        for call, function in self._of_length:
            value = function(self._requests[number], is_correct(verdict))
            self._parts[number][call.name] = judged_part(call, value, verdict)

    def _conclude_if_complete(self, number: int) -> None:
        """Make the score of a response whose last part has just come."""
        parts = self._parts[number]
        if len(parts) == len(self._names):
            self._scores[number] = join({name: parts[name] for name in self._names}, self._weights)
            self._unreported.append(number)

    def _compare_groups(self, order: Sequence[int]) -> None:
        """Add the parts of rewards that compare the responses to a prompt."""
        groups: dict[str, list[int]] = {}
        for number in order:
            groups.setdefault(self._requests[number].group, []).append(number)
        for call, function in self._of_groups:
            for numbers in groups.values():
                verdicts = [self._verdict(number) for number in numbers]
                values = function([self._requests[number] for number in numbers], [*map(is_correct, verdicts)])
                for number, value, verdict in zip(numbers, values, verdicts, strict=True):
                    self._parts[number][call.name] = judged_part(call, value, verdict)

    def _ask_file(self, pool: WorkerPool, numbers: Sequence[int]) -> list[Part]:
        """Parts from the reward file; where it failed, it is asked about all responses again."""
        requests = [self._requests[number] for number in numbers]
        batch = {
            "queries": [request.query for request in requests],
            "prompts": [request.prompt for request in requests],
            "labels": [request.label for request in requests],
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
