"""Scores of responses from the built-in verifiers and the user's reward file.

Several rewards are added up with their weights. A reward that failed is no score of 0: the sample is marked, and the
run stops when too many are. Clipping and shaping of scores is left to algorithms.shaping.
"""

import logging
import os
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from rlhf_cli.config.online import ScoringConfig
from rlhf_cli.errors import RunError, UsageError
from rlhf_cli.rewards.pool import Failure, Outcome, WorkerPool
from rlhf_cli.rewards.records import Score, ScoreRequest, Status

logger = logging.getLogger(__name__)

FILE_PART = "reward_func"  # name of the reward file's part of a score

# Verifications that travel to a worker together: enough to hide the way there, few enough to balance workers.
VERIFIER_CHUNK = 64
MAX_VERIFIER_WORKERS = 4

VERDICT_VALUES: dict[Status, float | None] = {"correct": 1.0, "wrong": 0.0, "invalid": 0.0, "failed": None}

_TRACE_LINES = 12  # of a user's traceback kept with a failed score


@dataclass(frozen=True, slots=True)
class _Part:
    """What one reward said of one response; `value` is None exactly where it failed."""

    value: float | None
    status: Status
    detail: str
    answer: str | None = None


class Scorer:
    """All rewards of a run; a context manager that owns their worker processes and leaves none behind.

    Raises UsageError on construction if the reward file is missing, cannot be imported or has no `reward_func`.
    """

    def __init__(self, config: ScoringConfig) -> None:
        self._config = config
        self._weights = dict.fromkeys(config.reward_funcs, 1.0) | {FILE_PART: 1.0}
        self._weights |= dict(zip(config.reward_funcs, config.reward_weights, strict=False))
        with ExitStack() as stack:
            self._verifiers = stack.enter_context(_verifier_pool(config)) if config.reward_funcs else None
            self._file = stack.enter_context(_file_pool(config.reward_func, config)) if config.reward_func else None
            self._processes = stack.pop_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End all worker processes."""
        self._processes.close()

    def check_labels(self, labels: Sequence[str | None]) -> None:
        """See before anything heavy starts that the verifiers can use the labels.

        Raises UsageError if the share of prompts without a usable label is above reward_max_failures.
        """
        requests = [ScoreRequest(query="", prompt="", response="", label=label) for label in labels]
        for name, parts in self._verify(requests).items():
            bad = [part.detail for part in parts if part.value is None]
            if len(bad) > self._config.reward_max_failures * len(labels):
                raise UsageError(
                    f"--reward_funcs {name}: {len(bad)} of {len(labels)} prompts have no label it can use; "
                    f"the first: {bad[0]}"
                )

    def score(self, requests: Sequence[ScoreRequest]) -> list[Score]:
        """The score of each response, in order; failed ones have been retried `reward_retries` times.

        Raises RunError if the share of failed ones is above reward_max_failures.
        """
        columns = self._verify(requests)
        if self._file is not None and requests:
            columns[FILE_PART] = self._ask_file(self._file, requests)
        scores = [self._join({name: parts[i] for name, parts in columns.items()}) for i in range(len(requests))]
        stop_if_too_many_failed(scores, self._config.reward_max_failures)
        return scores

    def _verify(self, requests: Sequence[ScoreRequest]) -> dict[str, list[_Part]]:
        """Parts of all responses by the name of the verifier."""
        names = self._config.reward_funcs
        if self._verifiers is None:
            return {}
        items = [[name, request.response, request.label] for name in names for request in requests]
        outcomes = self._verifiers.map(items)
        for _ in range(self._config.reward_retries):
            again = [i for i, outcome in enumerate(outcomes) if outcome.failure]
            for i, outcome in zip(again, self._verifiers.map([items[i] for i in again]), strict=True):
                outcomes[i] = outcome
        _log([outcome.failure for outcome in outcomes if outcome.failure])
        size = len(requests)
        return {
            name: [_verdict_part(name, outcome) for outcome in outcomes[k * size : (k + 1) * size]]
            for k, name in enumerate(names)
        }

    def _ask_file(self, pool: WorkerPool, requests: Sequence[ScoreRequest]) -> list[_Part]:
        """Parts from the reward file. It is always asked about the whole batch, whose responses it may compare."""
        batch = {
            "queries": [request.query for request in requests],
            "prompts": [request.prompt for request in requests],
            "labels": [request.label for request in requests],
        }
        parts = _file_parts(pool.map([batch])[0], len(requests))
        for _ in range(self._config.reward_retries):
            if all(part.value is not None for part in parts):
                break
            again = _file_parts(pool.map([batch])[0], len(requests))
            parts = [old if old.value is not None else new for old, new in zip(parts, again, strict=True)]
        return parts

    def _join(self, parts: dict[str, _Part]) -> Score:
        """One score of all parts. Its verdict is that of the first verifier named in reward_funcs.

        Without verifiers and file, where a reward model alone is asked, it is 0.
        """
        if not parts:
            return Score(0.0, "scored")
        values = {name: part.value for name, part in parts.items() if part.value is not None}
        if len(values) < len(parts):
            failed = next(part for part in parts.values() if part.value is None)
            return Score(None, "failed", failed.detail, values)
        first = next(iter(parts.values()))
        total = sum(self._weights[name] * value for name, value in values.items())
        return Score(total, first.status, first.detail, values, first.answer)


def stop_if_too_many_failed(scores: Sequence[Score], limit: float) -> None:
    """Raise RunError, with the most frequent reason, if more than this share of the scores failed."""
    failed = [score.detail.partition("\n")[0] for score in scores if score.value is None]
    if len(failed) > limit * len(scores):
        reason, _ = Counter(failed).most_common(1)[0]
        raise RunError(
            f"{len(failed)} of {len(scores)} rewards failed, more than --reward_max_failures {limit:g} allows: {reason}"
        )


def _verifier_pool(config: ScoringConfig) -> WorkerPool:
    return WorkerPool(
        "rlhf_cli.rewards.verifiers:load",
        None,
        limit=config.reward_timeout,
        num_workers=min(MAX_VERIFIER_WORKERS, os.cpu_count() or 1),
        chunk_size=VERIFIER_CHUNK,
    )


def _file_pool(reward_func: str, config: ScoringConfig) -> WorkerPool:
    """A worker that has loaded the user's file."""
    path = Path(reward_func).expanduser().resolve()
    if not path.is_file():
        raise UsageError(f"--reward_func {reward_func}: there is no such file")
    pool = WorkerPool("rlhf_cli.rewards.user_file:load", str(path), limit=config.reward_timeout)
    failure = pool.start()
    if failure is not None:
        _log([failure])
        raise UsageError(f"--reward_func {reward_func} {failure.reason}")
    return pool


def _verdict_part(name: str, outcome: Outcome) -> _Part:
    if outcome.failure is not None:
        return _Part(None, "failed", f"{name} {outcome.failure.reason}")
    status, detail, answer = outcome.value
    return _Part(VERDICT_VALUES[status], status, f"{name}: {detail}" if status == "failed" else detail, answer)


def _file_parts(outcome: Outcome, num_responses: int) -> list[_Part]:
    failure = outcome.failure
    if failure is not None:
        _log([failure])
        trace = "\n".join(failure.trace.splitlines()[:_TRACE_LINES])
        return [_Part(None, "failed", f"{FILE_PART} {failure.reason}\n{trace}".strip())] * num_responses
    rows: list[tuple[Any, str]] = outcome.value
    return [
        _Part(value, "failed" if value is None else "scored", f"{FILE_PART} {problem}" if problem else "")
        for value, problem in rows
    ]


def _log(failures: Sequence[Failure]) -> None:
    """Each kind of failure once and in full; the person at the terminal gets one sentence if it matters."""
    for failure, count in Counter(failures).items():
        logger.warning("%d rewards failed: %s\n%s", count, failure.reason, failure.trace)
