"""Scoring overlapped with generation."""

import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from types import TracebackType
from typing import Self

from rlhf_cli.config.plugins import called_name
from rlhf_cli.config.row_rewards import verifier_of
from rlhf_cli.config.scoring import RewardConfig
from rlhf_cli.rewards.file_feed import Decode, FileFeed
from rlhf_cli.rewards.judge.feed import JudgeFeed
from rlhf_cli.rewards.judge.judge import JUDGE_PART
from rlhf_cli.rewards.parts import (
    FILE_PART,
    REMOTE_PART,
    is_correct,
    join,
    judged_part,
    remote_part,
    stop_if_too_many_failed,
    unless_broken,
    unless_unrewarded,
    worker_part,
)
from rlhf_cli.rewards.records import Score, ScoreRequest
from rlhf_cli.rewards.remote.client import RemoteFeed, RemoteRewards
from rlhf_cli.rewards.workers.functions import resolve
from rlhf_cli.rewards.workers.pool import Failure, Feed, WorkerPool

logger = logging.getLogger(__name__)

# Reasoning chat templates put the opening tag into the prompt, so the response starts after it.
_OPENED = "<think>"


@dataclass(eq=False)
class _Group:
    """Responses to one prompt: `size` expected, `num_judged` with all worker results."""

    size: int
    numbers: list[int] = field(default_factory=list)
    num_judged: int = 0

    @property
    def is_complete(self) -> bool:
        return len(self.numbers) == self.size


class ScoringSession:
    """One scoring round; a context manager that cancels unfinished work on exit.

    - Workers and servers start on a response when it is added, in the background. How responses are batched for a
      server depends on timing.
    - The reward file and group rewards receive a complete group in sample order, so their values do not depend on the
      completion order.
    - Incomplete groups are never scored.
    """

    def __init__(
        self,
        config: RewardConfig,
        *,
        weights: Mapping[str, float],
        workers: WorkerPool | None,
        file: WorkerPool | None,
        servers: RemoteRewards | None,
        judges: Callable[[], JudgeFeed] | None,
        decode: Decode | None = None,
        needs_environment: bool = False,
    ) -> None:
        self._config, self._weights, self._needs_environment = config, weights, needs_environment
        self._sources = config.own_sources
        calls = config.rewards
        others = {FILE_PART: file, REMOTE_PART: servers, JUDGE_PART: judges}
        self._names = [*(call.name for call in calls), *(name for name, source in others.items() if source is not None)]
        self._verifier = next((call.name for call in calls if call.row.kind == "verifier"), None)
        self._of_workers = [call for call in calls if call.row.in_worker]
        self._of_episodes = [(call, resolve(call)) for call in calls if call.row.kind == "episode"]
        self._of_length = [(call, resolve(call)) for call in calls if call.row.kind == "length"]
        self._of_groups = [(call, resolve(call)) for call in calls if call.row.kind == "group"]
        self._requests: list[ScoreRequest] = []
        self._groups: dict[str, _Group] = {}
        # Results so far: for each response, by reward name.
        self._parts: list[dict[str, Score]] = []
        self._scores: dict[int, Score] = {}
        self._num_failed = 0
        # Response numbers that `ready` has not returned yet.
        self._unreported: list[int] = []
        self._failures: list[Failure] = []
        # If opening one feed fails, the stack closes the feeds opened before it.
        with ExitStack() as stack:
            self._feed: Feed | None = stack.enter_context(workers.feed()) if workers is not None else None
            self._file: FileFeed | None = None
            if file is not None:
                self._file = stack.enter_context(FileFeed(file, retries=config.reward_retries, decode=decode))
            self._remote: RemoteFeed | None = stack.enter_context(servers.feed()) if servers is not None else None
            self._judges = stack.enter_context(judges()) if judges is not None else None
            self._resources = stack.pop_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._resources.close()

    def add(self, requests: Sequence[ScoreRequest]) -> range:
        """Submit responses and return the assigned numbers, counted from 0. Never blocks."""
        numbers = range(len(self._requests), len(self._requests) + len(requests))
        self._requests += requests
        self._parts += [{} for _ in requests]
        for number in numbers:
            group = self._group(number)
            assert not group.is_complete, f"group {self._requests[number].group} has more responses than group_size"
            group.numbers.append(number)
        if self._feed is not None:
            places = range(len(self._of_workers))
            self._feed.add(self._item(request, place) for request in requests for place in places)
        else:
            for number in numbers:
                self._judge(number)
        if self._remote is not None:
            self._remote.add(requests)
        if self._judges is not None:
            self._judges.add(requests)
        if self._file is not None:
            # Retries failed calls now instead of when the caller next collects.
            self._collect_from_file(self._file)
            for group in dict.fromkeys(map(self._group, numbers)):
                if group.is_complete:
                    self._ask_file(self._file, group)
        return numbers

    def ready(self) -> list[tuple[int, Score]]:
        """Return new scores as (response number, score) pairs. Never blocks."""
        self._collect()
        numbers, self._unreported = self._unreported, []
        return [(number, self._scores[number]) for number in numbers]

    async def finish(self, *, is_all: bool = False) -> dict[int, Score]:
        """Wait until all scores are complete and return them by response number.

        `is_all`: no more responses will be added. Then RunError is raised as soon as the failure limit is exceeded.
        """
        try:
            # Servers last: they run in their own thread, and waiting for them first would delay file retries.
            for feed in (self._feed, self._file):
                while feed is not None and feed.is_open:
                    await feed.wait()
                    self._collect()
                    if is_all and self._num_failed > self._config.reward_max_failures * len(self._requests):
                        scores = list(self._scores.values())
                        to_come = len(self._requests) - len(scores)
                        stop_if_too_many_failed(scores, self._config.reward_max_failures, num_to_come=to_come)
            for remote in (self._remote, self._judges):
                if remote is not None:
                    await remote.finish()
            self._collect()
        finally:
            self._log()
        return self._scores

    def _item(self, request: ScoreRequest, place: int) -> list[object]:
        """Build a worker item. For text rewards, an opening tag at the end of the prompt is moved to the response."""
        row = self._of_workers[place].row
        opened = row.kind == "text" and request.prompt.rstrip().endswith(_OPENED)
        item = [place, (_OPENED if opened else "") + request.response, request.label]
        return [*item, self._verifier_of_row(request)] if row.by_row else item

    def _verifier_of_row(self, request: ScoreRequest) -> str | None:
        return None if request.source is None else verifier_of(request.source, self._sources)

    def _group(self, number: int) -> _Group:
        request = self._requests[number]
        return self._groups.setdefault(request.group, _Group(request.group_size))

    def _in_order(self, group: _Group) -> list[int]:
        return sorted(group.numbers, key=lambda number: self._requests[number].sample)

    def _ask_file(self, file: FileFeed, group: _Group) -> None:
        numbers = self._in_order(group)
        file.add(numbers, [self._requests[number] for number in numbers])

    def _collect(self) -> None:
        """Collect results from workers, servers and the reward file."""
        for item, outcome in self._feed.ready() if self._feed is not None else []:
            # `add` submits one item per worker reward for each response, in this order.
            number, place = divmod(item, len(self._of_workers))
            call = self._of_workers[place]
            part = worker_part(call, outcome)
            if call.row.by_row and part.value is not None:
                named = called_name(str(self._verifier_of_row(self._requests[number]))).rpartition(":")[2]
                part = replace(part, metrics={f"{call.name}/{named}": part.value})
            self._parts[number][call.name] = part
            self._failures += [outcome.failure] if outcome.failure is not None else []
            if all(call.name in self._parts[number] for call in self._of_workers):
                self._judge(number)
        for number, outcome in self._remote.ready() if self._remote is not None else []:
            self._failures += [outcome.failure] if outcome.failure is not None else []
            self._take(number, REMOTE_PART, remote_part(outcome))
        for number, part in self._judges.ready() if self._judges is not None else []:
            self._take(number, JUDGE_PART, part)
        if self._file is not None:
            self._collect_from_file(self._file)

    def _collect_from_file(self, file: FileFeed) -> None:
        for number, part in file.ready():
            self._take(number, FILE_PART, part)

    def _verdict(self, number: int) -> Score | None:
        return None if self._verifier is None else self._parts[number][self._verifier]

    def _judge(self, number: int) -> None:
        """Add the rewards that depend on a verdict. All worker results for this response must be complete."""
        verdict = self._verdict(number)
        for call, function in self._of_episodes:
            self._parts[number][call.name] = function(self._requests[number])
        for call, function in self._of_length:
            value = function(self._requests[number], is_correct(verdict))
            self._parts[number][call.name] = judged_part(call, value, verdict)
        self._conclude_if_complete(number)
        group = self._group(number)
        group.num_judged += 1
        self._compare_if_judged(group)

    def _compare_if_judged(self, group: _Group) -> None:
        """Add group rewards if every response in the group is judged."""
        if group.num_judged < group.size:
            return
        numbers = self._in_order(group)
        for call, function in self._of_groups:
            verdicts = [self._verdict(number) for number in numbers]
            values = function([self._requests[number] for number in numbers], [*map(is_correct, verdicts)])
            for number, value, verdict in zip(numbers, values, verdicts, strict=True):
                self._take(number, call.name, judged_part(call, value, verdict))

    def _take(self, number: int, name: str, part: Score) -> None:
        self._parts[number][name] = part
        self._conclude_if_complete(number)

    def _conclude_if_complete(self, number: int) -> None:
        """Compute the score if this was the last component."""
        parts = self._parts[number]
        if len(parts) == len(self._names):
            # Sum in the order of the settings, not of arrival: float addition is not associative.
            score, request = join({name: parts[name] for name in self._names}, self._weights), self._requests[number]
            if self._needs_environment:
                score = unless_unrewarded(score, request)
            self._scores[number] = score = unless_broken(score, request)
            self._num_failed += score.value is None
            self._unreported.append(number)

    def _log(self) -> None:
        """Log each distinct failure once, with traceback and count."""
        sources = [source for source in (self._file, self._judges) if source is not None]
        failures = self._failures + [failure for source in sources for failure in source.failures]
        for failure, count in Counter(failures).items():
            logger.warning("%d rewards failed: %s\n%s", count, failure.reason, failure.trace)
