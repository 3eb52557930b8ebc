"""A run of the online loop with fakes, for controller_time.py and async_overlap.py: ranks, engines and rewards.

Answers are constants, or were drawn before. Time spent in fakes is kept apart, but for the driver's own work for a
call: dealing values to ranks, and making bytes of them.
"""

import io
import pickle
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
from ray import cloudpickle
from rich.console import Console

from rlhf_cli.backends.roles.serialization import UpdateSteps
from rlhf_cli.backends.rollout.engine_shares import balanced_shares
from rlhf_cli.config.train import TrackingConfig
from rlhf_cli.data.prompts import Prompt
from rlhf_cli.data.rollouts import Generation, GenerationRequest, SamplingParams
from rlhf_cli.rewards.records import Score, ScoreRequest
from rlhf_cli.tracking.tracker import Tracker
from rlhf_cli.trainers.online.interfaces import Roles
from rlhf_cli.trainers.online.loop import OnlineHooks, train_online
from rlhf_cli.trainers.online.state import OnlineSettings, first_state

ARRIVING = 16  # responses that come back from an engine together
POLICY_MOMENTS = ("x_mean", "y_mean", "xx_mean", "yy_mean", "xy_mean")
VALUE_MOMENTS = ("return_mean", "return_square", "error_mean", "error_square")


class Elsewhere:
    """Seconds that are not the driver's own: `with elsewhere: ...`."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._since = 0.0

    def __enter__(self) -> None:
        self._since = time.perf_counter()

    def __exit__(self, *failure: object) -> None:
        self.seconds += time.perf_counter() - self._since


class FakeRanks:
    """Ranks of a role; their arguments and results become bytes in the driver, as under Ray."""

    def __init__(self, elsewhere: Elsewhere, *, moments: Sequence[str] = ()) -> None:
        self._elsewhere = elsewhere
        self._metrics = {"entropy": 1.0} | {f"moment/{name}": 1.0 for name in moments}

    def all_each(self, call: Callable[..., Any], work: Sequence[Any]) -> list[Any]:
        """Return the answers of all ranks: metrics of optimizer steps, or a number for each trained token."""
        for share in work:
            cloudpickle.dumps((call, share))
        with self._elsewhere:
            answer = self._updated if isinstance(work[0], UpdateSteps) else _numbers
            answers = [pickle.dumps(answer(share), pickle.HIGHEST_PROTOCOL) for share in work]
        return [pickle.loads(one) for one in answers]

    def _updated(self, steps: Sequence[Any]) -> list[dict[str, float]]:
        return [self._metrics] * len(steps)


def _numbers(micro_batches: Sequence[Sequence[Any]]) -> list[np.ndarray]:
    return [np.full(sum(sequence.num_trained for sequence in batch), -1.0, np.float32) for batch in micro_batches]


class FakeEngines:
    """Engines that have answered before they are asked: request after request gets the next of the responses."""

    def __init__(self, elsewhere: Elsewhere, *, num_engines: int, responses: Sequence[Generation]) -> None:
        self._elsewhere = elsewhere
        self._num_engines = num_engines
        self._responses = responses
        self._left: list[bytes] = []

    def begin(self, requests: list[GenerationRequest], sampling: SamplingParams) -> None:
        """Deal the requests to the engines, whose responses come back in turns."""
        shares = balanced_shares(requests, self._num_engines)
        for share in shares:
            pickle.dumps([requests[number] for number in share], pickle.HIGHEST_PROTOCOL)
        with self._elsewhere:
            numbers = [number for share in shares for number in share]
            answers = [(number, self._responses[number % len(self._responses)]) for number in numbers]
            pieces = (answers[first : first + ARRIVING] for first in range(0, len(answers), ARRIVING))
            self._left = [pickle.dumps(piece, pickle.HIGHEST_PROTOCOL) for piece in pieces]

    @property
    def is_generating(self) -> bool:
        """Whether responses are still to come."""
        return bool(self._left)

    def collect(self, timeout: float | None = None) -> list[tuple[int, Generation]]:
        """Some of the responses with the numbers of their requests."""
        arrived: list[tuple[int, Generation]] = pickle.loads(self._left.pop())
        return arrived

    def generate(self, requests: list[GenerationRequest], sampling: SamplingParams) -> list[Generation]:
        """All responses in the order of the requests."""
        self.begin(requests, sampling)
        found: dict[int, Generation] = {}
        while self.is_generating:
            found |= self.collect()
        return [found[number] for number in range(len(requests))]

    def cut(self, max_tokens: int) -> None:
        """Nothing: every response is finished."""

    def wake_cache(self) -> None:
        """Nothing."""

    def sleep(self) -> None:
        """Nothing."""

    def receive_weights(self, version: int) -> dict[str, float]:
        """Metrics of a push that did not happen."""
        return {"weight_version": float(version)}


class FakeScorer:
    """Finds every second response right."""

    def __init__(self, elsewhere: Elsewhere) -> None:
        self.elsewhere = elsewhere

    def score(self, requests: list[ScoreRequest]) -> list[Score]:
        """A score for each response."""
        return [Score(float(number % 2), "correct" if number % 2 else "wrong") for number in range(len(requests))]

    def session(self) -> AbstractContextManager["FakeSession"]:
        """Responses on their way to a score."""
        return nullcontext(FakeSession(self))


class FakeSession:
    """Scores that are ready when the last response is there."""

    def __init__(self, scorer: FakeScorer) -> None:
        self._scorer = scorer
        self._requests: list[ScoreRequest] = []

    def add(self, requests: Sequence[ScoreRequest]) -> range:
        """The numbers of the responses."""
        self._requests += requests
        return range(len(self._requests) - len(requests), len(self._requests))

    def ready(self) -> list[tuple[int, Score]]:
        """None before all are asked for."""
        return []

    def finish(self, *, is_all: bool = False) -> dict[int, Score]:
        """All scores by number of the response."""
        with self._scorer.elsewhere:
            return dict(enumerate(self._scorer.score(self._requests)))


def run_loop(
    roles: Roles,
    settings: OnlineSettings,
    folder: Path,
    *,
    prompts: Sequence[Prompt],
    decode: Callable[[Sequence[int]], str],
    iterations: int,
    after_each: Callable[[], None],
) -> None:
    """Run the loop without checkpoints; metrics and samples go to the folder, the terminal's lines nowhere.

    Args:
        after_each: called at the end of each iteration.
    """
    tracker = Tracker(
        TrackingConfig(),
        folder,
        command=settings.algorithm.name,
        total_steps=iterations,
        console=Console(file=io.StringIO()),
        resume_step=None,
        unit="iteration",
    )
    with tracker:
        train_online(
            roles,
            settings,
            prompts=prompts,
            decode=decode,
            state=first_state(settings.policy),
            total_iterations=iterations,
            save_steps=-1,
            hooks=OnlineHooks(
                tracker,
                save_checkpoint=lambda state: None,
                should_stop=lambda: False,
                evaluate=lambda iteration, is_last: after_each(),
            ),
        )
        tracker.close()
