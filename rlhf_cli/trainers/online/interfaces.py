"""The interfaces of the online loop: roles, engines, rewards and the tracker."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

import numpy as np

from rlhf_cli.algorithms.objective import LossWeights
from rlhf_cli.data.packing.packs import TokenSequence
from rlhf_cli.data.packing.samples import Sample
from rlhf_cli.data.prompts import Prompt
from rlhf_cli.data.rollouts import Generation, GenerationRequest, SamplingParams
from rlhf_cli.rewards.records import Score, ScoreRequest
from rlhf_cli.trainers.online.actor_turns import ActorTurns


class Sleeper(Protocol):
    """Something that shares an accelerator and takes turns on it; a role with one to itself does nothing here."""

    def wake(self) -> None: ...

    def sleep(self) -> None: ...


@contextmanager
def awake(role: Sleeper) -> Iterator[None]:
    """Hold a role on its accelerator for the block.

    Do not sleep the role after an error: surviving ranks may wait in a collective for a dead one and never reply.
    """
    role.wake()
    yield
    role.sleep()


class Sampled(Sleeper, Protocol):
    """The model in training, whose responses the engines sample."""

    def sleep_optimizer(self) -> None:
        """Keep the weights alone on the accelerator."""


class Actor(Sampled, Protocol):
    """The policy in training."""

    def logprobs(self, sequences: Sequence[TokenSequence]) -> list[np.ndarray]: ...

    def update(
        self, samples: Sequence[Sample], steps: Sequence[np.ndarray], *, on_policy: bool, weights: LossWeights
    ) -> list[dict[str, float]]: ...


class Student(Sampled, Protocol):
    """The model that learns a teacher's distributions."""

    def learn(self, sequences: Sequence[TokenSequence], steps: Sequence[np.ndarray]) -> list[dict[str, float]]:
        """Return the metrics of each optimizer step; a step is an array of indices."""


class Critic(Sleeper, Protocol):
    """The value model in training."""

    def values(self, sequences: Sequence[TokenSequence]) -> list[np.ndarray]: ...

    def update(self, samples: Sequence[Sample], steps: Sequence[np.ndarray]) -> list[dict[str, float]]: ...


class Reference(Sleeper, Protocol):
    """The policy that the KL divergence is measured from."""

    def logprobs(self, sequences: Sequence[TokenSequence]) -> list[np.ndarray]: ...


class Teacher(Sleeper, Protocol):
    """The frozen policy that on-policy distillation leads to."""

    def logprobs(self, sequences: Sequence[TokenSequence]) -> list[np.ndarray]: ...


class MovingReference(Sleeper, Protocol):
    """A reference that follows the policy in training."""

    def move(self) -> None:
        """Go towards the actor, who must not be asked for anything meanwhile."""


class RewardModel(Sleeper, Protocol):
    """The frozen model that scores whole responses."""

    def scores(self, sequences: Sequence[TokenSequence]) -> list[float]: ...


class ProcessRewardModel(Sleeper, Protocol):
    """The frozen model that scores the steps of responses, each at its last token."""

    def step_scores(self, sequences: Sequence[TokenSequence]) -> list[np.ndarray]: ...


class Steps(Protocol):
    """Scores the steps of sampled responses."""

    def rewards(self, prompts: Sequence[Prompt], generations: Sequence[Generation]) -> list[np.ndarray]:
        """Return the reward of each step at its last token and NaN elsewhere, one value a token of each response."""


class SamplingEngines(Protocol):
    """The verbs of the rollout engines by which a batch is sampled."""

    def begin(self, requests: list[GenerationRequest], sampling: SamplingParams) -> None:
        """Start a batch, whose responses are to be collected."""

    @property
    def is_generating(self) -> bool:
        """Whether responses of the batch are still to come."""

    def collect(self, timeout: float | None = None) -> list[tuple[int, Generation]]:
        """Return finished responses, each with the number of its request. Wait for one, at most `timeout` seconds."""

    def cut(self, max_tokens: int) -> None:
        """Give up the responses of the batch that have, or get, more than so many tokens."""

    def wake_cache(self) -> None:
        """Be ready to generate, after the weights are there."""

    def sleep(self) -> None: ...


class Engines(SamplingEngines, Protocol):
    """All rollout engines."""

    def generate(self, requests: list[GenerationRequest], sampling: SamplingParams) -> list[Generation]: ...

    def receive_weights(self, version: int) -> dict[str, float]:
        """Take the actor's present weights; metrics of the transfer."""


class TurnEngines(Engines, Protocol):
    """Engines whose batch takes further requests."""

    def add(self, requests: list[GenerationRequest]) -> None:
        """Join requests to the batch, also when all its responses have come; their numbers go on from the batch's.

        They are sampled like the others, and go where the beginning of their episode is.
        """


class ScoringSession(Protocol):
    """Responses on their way through the scorer."""

    def add(self, requests: Sequence[ScoreRequest]) -> range: ...

    def ready(self) -> list[tuple[int, Score]]:
        """Return the complete scores since the last call, each with the number of its response. Never wait."""

    def finish(self, *, is_all: bool = False) -> dict[int, Score]:
        """Return all scores by number of the response, except groups that stayed incomplete if responses are compared.

        Raises:
            RunError: these are all scores and too many failed.
        """


class Scoring(Protocol):
    """Turns responses into scores."""

    def session(self) -> AbstractContextManager[ScoringSession]: ...

    def score(self, requests: list[ScoreRequest]) -> list[Score]: ...


class RunTracker(Protocol):
    """The tracker as the loop uses it."""

    def log(self, step: int, metrics: dict[str, float], phases: dict[str, float]) -> None: ...

    def samples(self, step: int, rows: list[dict[str, object]]) -> None: ...

    def message(self, text: str) -> None: ...

    @property
    def phase(self) -> Callable[[str | None], None]: ...


SampledT_co = TypeVar("SampledT_co", bound=Sampled, covariant=True)
SampledT = TypeVar("SampledT", bound=Sampled)


@dataclass(frozen=True)
class Roles(Generic[SampledT_co]):
    """Everything heavy that takes part; `moving_reference` is the reference if it moves.

    `turns` keeps engines that are started again from an actor in training.
    """

    actor: SampledT_co
    critic: Critic | None
    reference: Reference | None
    reward_model: RewardModel | None
    engines: Engines
    scorer: Scoring
    moving_reference: MovingReference | None = None
    teacher: Teacher | None = None
    steps: Steps | None = None
    turns: ActorTurns = field(default_factory=ActorTurns)
