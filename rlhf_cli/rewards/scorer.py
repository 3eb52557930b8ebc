"""Scores of responses from the built-in verifiers and the user's reward file.

Several rewards are added up with their weights. A reward that failed is no score of 0: the sample is marked, and the
run stops when too many are. Clipping and shaping of scores is left to algorithms.shaping.
"""

import logging
import os
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Self

from rlhf_cli.config.online import ScoringConfig
from rlhf_cli.errors import UsageError
from rlhf_cli.rewards.parts import FILE_PART, verdict_part
from rlhf_cli.rewards.pool import WorkerPool
from rlhf_cli.rewards.records import Score, ScoreRequest
from rlhf_cli.rewards.session import ScoringSession

logger = logging.getLogger(__name__)

# Verifications that travel to a worker together: enough to hide the way there, few enough to balance workers.
VERIFIER_CHUNK = 64
MAX_VERIFIER_WORKERS = 4


def weights_of_parts(config: ScoringConfig) -> dict[str, float]:
    """The weight of each reward of verifiers and file by the name of its part of a score."""
    weights = dict.fromkeys(config.reward_funcs, 1.0) | {FILE_PART: 1.0}
    return weights | dict(zip(config.reward_funcs, config.reward_weights, strict=False))


class Scorer:
    """All rewards of a run; a context manager that owns their worker processes and leaves none behind.

    Raises UsageError on construction if the reward file is missing, cannot be imported or has no `reward_func`.
    """

    def __init__(self, config: ScoringConfig) -> None:
        self._config = config
        self._weights = weights_of_parts(config)
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
        for name in self._config.reward_funcs:
            assert self._verifiers is not None
            outcomes = self._verifiers.map([[name, "", label] for label in labels])
            bad = [part.detail for part in (verdict_part(name, outcome) for outcome in outcomes) if part.value is None]
            if len(bad) > self._config.reward_max_failures * len(labels):
                raise UsageError(
                    f"--reward_funcs {name}: {len(bad)} of {len(labels)} prompts have no label it can use; "
                    f"the first: {bad[0]}"
                )

    def session(self) -> ScoringSession:
        """A round of scoring whose responses come bit by bit; one at a time."""
        return ScoringSession(self._config, weights=self._weights, verifiers=self._verifiers, file=self._file)

    def score(self, requests: Sequence[ScoreRequest]) -> list[Score]:
        """The score of each response, in order; failed ones have been retried `reward_retries` times.

        Raises RunError if the share of failed ones is above reward_max_failures.
        """
        with self.session() as session:
            session.add(requests)
            return session.finish()


def _verifier_pool(config: ScoringConfig) -> WorkerPool:
    return WorkerPool(
        "rlhf_cli.rewards.verifiers:load",
        None,
        limit=config.reward_timeout,
        num_workers=min(MAX_VERIFIER_WORKERS, os.cpu_count() or 1),
        chunk_size=VERIFIER_CHUNK,
        retries=config.reward_retries,
    )


def _file_pool(reward_func: str, config: ScoringConfig) -> WorkerPool:
    """A worker that has loaded the user's file."""
    path = Path(reward_func).expanduser().resolve()
    if not path.is_file():
        raise UsageError(f"--reward_func {reward_func}: there is no such file")
    pool = WorkerPool("rlhf_cli.rewards.user_file:load", str(path), limit=config.reward_timeout)
    failure = pool.start()
    if failure is not None:
        logger.warning("%s %s\n%s", path, failure.reason, failure.trace)
        raise UsageError(f"--reward_func {reward_func} {failure.reason}")
    return pool
