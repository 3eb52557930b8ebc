"""One scoring round with judges."""

import asyncio
from collections.abc import Sequence
from concurrent.futures import Future
from types import TracebackType
from typing import Protocol, Self

from rlhf_cli.rewards.judge.judge import Case, Judge
from rlhf_cli.rewards.judge.wire import Question
from rlhf_cli.rewards.records import Score, ScoreRequest
from rlhf_cli.rewards.workers.pool import Failure, ItemOutcome


class Judges(Protocol):
    """Servers or engines that answer questions."""

    def submit(self, questions: Sequence[Question]) -> "list[Future[ItemOutcome]]":
        """Queue questions and return their futures."""
        ...


class JudgeFeed:
    """Questions about responses, like `RemoteFeed` for reward servers; a context manager.

    - `waits`: whether `finish` asks all questions, in the order of groups and samples, instead of `add`.
    - `failures`: failed calls so far.

    On exit, queued questions are cancelled.
    """

    def __init__(self, judge: Judge, judges: Judges, *, waits: bool = False) -> None:
        self._judge, self._judges, self._waits = judge, judges, waits
        # Cases that are not asked yet, with group and first sample, and the numbers of their responses.
        self._held: list[tuple[tuple[str, int], list[int], Case]] = []
        self._count = 0
        # Incomplete groups of a judge that compares responses, with the numbers of their responses.
        self._groups: dict[str, list[tuple[int, ScoreRequest]]] = {}
        # Cases without a score yet, with the numbers of their responses.
        self._open: list[tuple[list[int], Case, list[Future[ItemOutcome]]]] = []
        self.failures: list[Failure] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for _, _, futures in self._open:
            for future in futures:
                future.cancel()

    def add(self, requests: Sequence[ScoreRequest]) -> None:
        """Queue responses, numbered from 0. Never blocks."""
        for request in requests:
            own = [(self._count, request)]
            self._count += 1
            if self._judge.by_group:
                own = self._groups.setdefault(request.group, [])
                own.append((self._count - 1, request))
                if len(own) < request.group_size:
                    continue
                del self._groups[request.group]
                # In sample order, so that questions do not depend on the order of arrival.
                own.sort(key=lambda entry: entry[1].sample)
            numbers, case = [number for number, _ in own], self._judge.case([request for _, request in own])
            self._held.append(((own[0][1].group, own[0][1].sample), numbers, case))
        if not self._waits:
            self._ask()

    def _ask(self) -> None:
        held, self._held = self._held, []
        # Together, and not in the order of arrival: the batches of engines depend on both.
        held.sort(key=lambda one: one[0])
        futures = iter(self._judges.submit([question for _, _, case in held for question in case.questions]))
        self._open += [(numbers, case, [next(futures) for _ in case.questions]) for _, numbers, case in held]

    def ready(self) -> list[tuple[int, Score]]:
        """Return new scores as (response number, score) pairs. Never blocks."""
        found: list[tuple[int, Score]] = []
        still_open = []
        for entry in self._open:
            numbers, case, futures = entry
            if not all(future.done() for future in futures):
                still_open.append(entry)
                continue
            outcomes = [future.result() for future in futures]
            self.failures += [outcome.failure for outcome in outcomes if outcome.failure is not None]
            found += zip(numbers, case.conclude(outcomes), strict=True)
        self._open = still_open
        return found

    async def finish(self) -> None:
        """Wait until all scores are complete."""
        self._ask()
        await asyncio.gather(*(asyncio.wrap_future(future) for _, _, futures in self._open for future in futures))
