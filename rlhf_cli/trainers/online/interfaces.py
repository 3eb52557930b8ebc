"""Interfaces of the online loop: roles, engines, rewards and tracker."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar, runtime_checkable

import numpy as np

from rlhf_cli.algorithms.objective import LossWeights
from rlhf_cli.data.packing.packs import TokenSequence
from rlhf_cli.data.rollouts import Generation, GenerationRequest, SamplingParams
from rlhf_cli.data.stored_arrays import Column
from rlhf_cli.rewards.records import Score, ScoreRequest
from rlhf_cli.trainers.online.lent_actor import LentActor
from rlhf_cli.trainers.online.samples import Sample


class Sampled(Protocol):
    """A trained model that the engines sample from.

    Roles that share GPUs wake for each call and sleep after it; only an update leaves the weights on the GPU, because
    the engines receive them next.
    """

    def wake_weights(self) -> None:
        """Move only the weights to the GPU."""

    def sleep(self) -> None: ...


class Actor(Sampled, Protocol):
    """Policy in training."""

    def logprobs(self, sequences: Sequence[TokenSequence]) -> Sequence[Column]: ...

    def update(
        self, samples: Sequence[TokenSequence], steps: Sequence[np.ndarray], *, on_policy: bool, weights: LossWeights
    ) -> list[dict[str, float]]: ...


class Student(Sampled, Protocol):
    """Student model, trained on a teacher's distributions."""

    def learn(self, sequences: Sequence[TokenSequence], steps: Sequence[np.ndarray]) -> list[dict[str, float]]:
        """Train, and return the metrics per optimizer step; a step is an array of indices."""


class _Critic(Protocol):
    """Value model in training."""

    def values(self, sequences: Sequence[TokenSequence]) -> Sequence[Column]: ...

    def update(self, samples: Sequence[TokenSequence], steps: Sequence[np.ndarray]) -> list[dict[str, float]]: ...


class FrozenPolicy(Protocol):
    """Policy that is not trained: the reference of the KL divergence, or a teacher."""

    def logprobs(self, sequences: Sequence[TokenSequence]) -> Sequence[Column]: ...


class RewardModel(Protocol):
    """Frozen model that scores full responses."""

    def scores(self, sequences: Sequence[TokenSequence]) -> list[float]: ...


class ProcessRewardModel(Protocol):
    """Frozen model that scores response steps at their last tokens."""

    def step_scores(self, sequences: Sequence[TokenSequence]) -> list[np.ndarray]: ...


class _Steps(Protocol):
    """Scores the steps of sampled responses."""

    def rewards(self, samples: Sequence[Sample]) -> list[np.ndarray]:
        """Return each step's reward at its last token and NaN elsewhere, one value per response token."""


class SamplingEngines(Protocol):
    """Rollout engine methods used to sample a batch."""

    def begin(self, requests: list[GenerationRequest], sampling: SamplingParams) -> None:
        """Start a batch. Collect its responses with `collect`."""

    @property
    def is_generating(self) -> bool:
        """Whether responses in the batch are pending."""

    async def collect(self, timeout: float | None = None) -> list[tuple[int, Generation]]:
        """Return finished responses with request numbers. Waits for at least one, at most `timeout` seconds."""
        ...

    def cut(self, max_tokens: int) -> None:
        """Drop responses that exceed `max_tokens`."""

    def wake_cache(self) -> None:
        """Prepare to generate. The weights must be loaded."""

    def sleep(self) -> None: ...


class Engines(SamplingEngines, Protocol):
    """All rollout engines."""

    def receive_weights(self, version: int) -> dict[str, float]:
        """Load the actor's current weights. Returns transfer metrics."""


@runtime_checkable
class TurnEngines(Engines, Protocol):
    """Engines that accept additional requests during a batch."""

    def add(self, requests: list[GenerationRequest]) -> None:
        """Add requests to the batch, even if all its responses have finished. Request numbers continue.

        They use the batch's sampling parameters, and go to the engine with the start of their episode, or to the least
        loaded one.
        """


class ScoringSession(Protocol):
    """Responses being scored."""

    def add(self, requests: Sequence[ScoreRequest]) -> range: ...

    def ready(self) -> list[tuple[int, Score]]:
        """Return newly completed scores with response numbers, without waiting."""

    async def finish(self, *, is_all: bool = False) -> dict[int, Score]:
        """Return all scores by response number. Incomplete groups are omitted if a reward compares responses.

        Raises:
            RunError: with `is_all`, if too many scores failed.
        """


class Scoring(Protocol):
    """Scores responses."""

    def session(self) -> AbstractContextManager[ScoringSession]:
        """Open a scoring session. Only one may be open at a time."""


class RunTracker(Protocol):
    """Tracker interface used by the loop."""

    def log(self, step: int, metrics: dict[str, float], phases: dict[str, float]) -> None: ...

    def samples(self, step: int, rows: list[dict[str, object]]) -> None: ...

    def message(self, text: str) -> None: ...

    @property
    def phase(self) -> Callable[[str | None], None]: ...


Cells = dict[str, list[float | None]]
"""Values of samples by name of the column."""

BySample = Callable[[Callable[[Mapping[str, Sequence[Column]]], Cells], Mapping[str, Sequence[Column]]], list[Cells]]


def by_all_samples(
    call: Callable[[Mapping[str, Sequence[Column]]], Cells], columns: Mapping[str, Sequence[Column]]
) -> list[Cells]:
    """Call a function of columns in this process, once."""
    return [call(columns)]


_SampledT_co = TypeVar("_SampledT_co", bound=Sampled, covariant=True)
SampledT = TypeVar("SampledT", bound=Sampled)


@dataclass(frozen=True, kw_only=True)
class Roles(Generic[_SampledT_co]):
    """All models and services of the loop.

    - `frozen_policies`: by role, `{"ref": ..., "teacher": ...}`.
    - `move_reference`: updates the reference toward the actor, which must be idle; None if the reference is fixed.
    - `store`: returns the sequences with tokens and images where all ranks read them, so that calls send them once.
    - `store_column`: returns the arrays of a column there.
    - `by_sample`: calls a function of columns with one array per sample where stored arrays are read without passing
      through the driver. Returns the results for consecutive samples.
    - `lent_actor`: through which restarted engines read the actor, never in the middle of an update.
    """

    actor: _SampledT_co
    engines: Engines
    scorer: Scoring
    critic: _Critic | None = None
    frozen_policies: Mapping[str, FrozenPolicy] = field(default_factory=dict)
    reward_model: RewardModel | None = None
    move_reference: Callable[[], None] | None = None
    steps: _Steps | None = None
    store: Callable[[Sequence[TokenSequence]], list[TokenSequence]] = list
    store_column: Callable[[Sequence[np.ndarray]], Sequence[Column]] = list
    by_sample: BySample = by_all_samples
    lent_actor: LentActor = field(default_factory=LentActor)
