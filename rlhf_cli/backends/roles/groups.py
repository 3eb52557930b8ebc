"""The roles of online training as the loop sees them: whole batches in, whole results out.

Deals sequences to the ranks of a role as packed micro-batches within the token bound and puts results back in order.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

import numpy as np
import torch

from rlhf_cli.algorithms.aggregation import StepTotals
from rlhf_cli.algorithms.objective import LossWeights, finish_policy_metrics, finish_value_metrics
from rlhf_cli.algorithms.shaping import normalised_scores
from rlhf_cli.backends.roles.serialization import MicroBatches, UpdateSteps
from rlhf_cli.backends.roles.settings import UpdateStep
from rlhf_cli.backends.roles.worker_group import RankT, WorkerGroup
from rlhf_cli.config.train import BatchConfig
from rlhf_cli.data.packing.packs import TokenSequence, only_end, plan_packs
from rlhf_cli.data.packing.shared_prompts import plan_groups
from rlhf_cli.models.reward_model import ScoreStatistics

if TYPE_CHECKING:  # only the process of a rank imports DeepSpeed
    from rlhf_cli.backends.roles.ranks import (
        ActorRank,
        CriticRank,
        ReferenceRank,
        RewardRank,
        TrainedRank,
    )
    from rlhf_cli.backends.roles.student_rank import StudentRank


@dataclass(frozen=True)
class Dealer:
    """Cuts batches into packed micro-batches for the ranks of a role.

    Neighbouring ranks that share sequences or split layers get the same micro-batches, the former of as many times the
    tokens.
    `do_share_prompts` asks the ranks whether they compute the common prompt of neighbours in a micro-batch once.
    """

    num_ranks: int
    batch: BatchConfig
    quadratic_cost: float
    do_share_prompts: Callable[[], bool] = lambda: False
    ranks_per_sequence: int = 1
    ranks_per_layer: int = 1

    @cached_property
    def _shares_prompts(self) -> bool:
        return self.do_share_prompts()

    @property
    def _ranks_per_pack(self) -> int:
        return self.ranks_per_sequence * self.ranks_per_layer

    def plan(self, sequences: Sequence[TokenSequence]) -> list[list[list[int]]]:
        """Return the indices by rank and micro-batch; ranks that compute packs together have the same ones."""
        shares = self._shares(sequences)
        return [share for share in shares for _ in range(self._ranks_per_pack)]

    def _shares(self, sequences: Sequence[TokenSequence]) -> list[list[list[int]]]:
        """Return the indices by group of ranks that compute packs together, and micro-batch."""
        max_tokens = self.batch.max_tokens * self.ranks_per_sequence
        num_groups = self.num_ranks // self._ranks_per_pack
        if self._shares_prompts:
            return plan_groups(
                sequences,
                max_tokens=max_tokens,
                num_ranks=num_groups,
                max_sequences=self.batch.micro_train_batch_size,
                quadratic_cost=self.quadratic_cost,
            )
        return plan_packs(
            [len(sequence) for sequence in sequences],
            patches=[sequence.patches for sequence in sequences],
            max_tokens=max_tokens,
            num_ranks=num_groups,
            max_sequences=self.batch.micro_train_batch_size,
            quadratic_cost=self.quadratic_cost,
        )

    def steps(self, samples: Sequence[TokenSequence], steps: Sequence[np.ndarray]) -> list[UpdateSteps]:
        """Return every rank's share of the optimizer steps, `[rank][step]`; a step is an array of sample indices."""
        shares = [UpdateSteps() for _ in range(self.num_ranks)]
        for indices in steps:
            chosen = [samples[i] for i in indices]
            num_tokens = sum(sample.num_trained for sample in chosen)
            totals = StepTotals(num_tokens=num_tokens, num_sequences=len(chosen))
            for rank, bins in enumerate(self.plan(chosen)):
                shares[rank].append(UpdateStep([[chosen[i] for i in members] for members in bins], totals))
        return shares

    def forward(
        self,
        group: WorkerGroup[RankT],
        call: Callable[[RankT, MicroBatches], list[np.ndarray]],
        sequences: Sequence[TokenSequence],
    ) -> list[np.ndarray]:
        """Return the results of a forward method, float32 [trained tokens] for each sequence, in their order."""
        plan = self.plan(sequences)
        work = [MicroBatches([sequences[i] for i in members] for members in bins) for bins in plan]
        results: list[np.ndarray] = [np.zeros(0, np.float32)] * len(sequences)
        for bins, arrays in zip(plan, group.all_each(call, work), strict=True):
            for members, values_K in zip(bins, arrays, strict=True):
                bounds = np.cumsum([sequences[i].num_trained for i in members])[:-1]
                for i, values in zip(members, np.split(values_K, bounds) if members else [], strict=True):
                    results[i] = values
        return results


class HasTrainedRank(Protocol):
    """A rank of a role in training: `ActorRank`, `StudentRank` or `CriticRank`."""

    role: "TrainedRank"


TrainedT = TypeVar("TrainedT", bound=HasTrainedRank)


class TrainedRole(Generic[TrainedT]):
    """All ranks of a role in training: the part that actor and critic share."""

    def __init__(self, group: WorkerGroup[TrainedT], dealer: Dealer, *, takes_turns: bool) -> None:
        self.group = group
        self.dealer = dealer
        self._takes_turns = takes_turns

    def wake(self) -> None:
        """Be ready to compute; does nothing for a role that never sleeps."""
        if self._takes_turns:
            self.group.all(lambda rank: rank.role.wake())

    def sleep(self) -> None:
        """Leave the accelerators to others."""
        if self._takes_turns:
            self.group.all(lambda rank: rank.role.sleep())

    @contextmanager
    def awake(self) -> Iterator[None]:
        """Hold the role on its accelerators for the block."""
        self.wake()
        yield
        self.sleep()

    def sleep_optimizer(self) -> None:
        """Keep the weights alone on the accelerators."""
        if self._takes_turns:
            self.group.all(lambda rank: rank.role.sleep_optimizer())

    def checkpoint_bytes(self) -> int:
        """Return the bytes of a checkpoint, as an estimate."""
        return self.group.all(lambda rank: rank.role.checkpoint_bytes())[0]

    def save(self, directory: Path) -> None:
        """Write everything that shapes the future of this role."""
        directory.mkdir(parents=True, exist_ok=True)
        with self.awake():
            self.group.all(lambda rank: rank.role.save(directory))

    def load(self, directory: Path) -> None:
        """Restore what `save` wrote."""
        with self.awake():
            self.group.all(lambda rank: rank.role.load(directory))

    def save_model(self, directory: Path) -> None:
        """Write the model in Hugging Face format."""
        with self.awake():
            self.group.all(lambda rank: rank.role.save_model(directory))

    def save_average(self, directory: Path) -> None:
        """Write the moving average of the weights in Hugging Face format."""
        with self.awake():
            self.group.all(lambda rank: rank.role.save_average(directory))


SampledRole = TrainedRole["ActorRank"] | TrainedRole["StudentRank"]
"""A model in training whose weights go to the engines."""


class ActorRole:
    """The policy in training."""

    def __init__(self, trained: TrainedRole["ActorRank"]) -> None:
        self.trained = trained
        self.wake, self.sleep, self.sleep_optimizer = trained.wake, trained.sleep, trained.sleep_optimizer

    def logprobs(self, sequences: Sequence[TokenSequence]) -> list[np.ndarray]:
        """Return the log-probs of each sequence's trained tokens, in nats."""
        return self.trained.dealer.forward(self.trained.group, lambda rank, work: rank.logprobs(work), sequences)

    def update(
        self, samples: Sequence[TokenSequence], steps: Sequence[np.ndarray], *, on_policy: bool, weights: LossWeights
    ) -> list[dict[str, float]]:
        """Return the metrics of each optimizer step."""
        shares = self.trained.dealer.steps(samples, steps)
        metrics = self.trained.group.all_each(lambda rank, share: rank.update(share, on_policy, weights), shares)
        return [finish_policy_metrics(of_step) for of_step in metrics[0]]


class StudentRole:
    """The model that learns the distributions of a teacher in its own ranks."""

    def __init__(self, trained: TrainedRole["StudentRank"]) -> None:
        self.trained = trained
        self.wake, self.sleep, self.sleep_optimizer = trained.wake, trained.sleep, trained.sleep_optimizer

    def learn(self, sequences: Sequence[TokenSequence], steps: Sequence[np.ndarray]) -> list[dict[str, float]]:
        """Return the metrics of each optimizer step; a step is an array of indices."""
        shares = self.trained.dealer.steps(sequences, steps)
        return self.trained.group.all_each(lambda rank, share: rank.learn(share), shares)[0]


class CriticRole:
    """The value model in training."""

    def __init__(self, trained: TrainedRole["CriticRank"]) -> None:
        self.trained = trained
        self.wake, self.sleep = trained.wake, trained.sleep

    def values(self, sequences: Sequence[TokenSequence]) -> list[np.ndarray]:
        """Return the values of the states before each sequence's trained tokens."""
        return self.trained.dealer.forward(self.trained.group, lambda rank, work: rank.values(work), sequences)

    def update(self, samples: Sequence[TokenSequence], steps: Sequence[np.ndarray]) -> list[dict[str, float]]:
        """Return the metrics of each optimizer step."""
        shares = self.trained.dealer.steps(samples, steps)
        metrics = self.trained.group.all_each(lambda rank, share: rank.update(share), shares)
        return [finish_value_metrics(of_step) for of_step in metrics[0]]


class HasSleep(Protocol):
    """A rank of a frozen role: `ReferenceRank` or `RewardRank`."""

    def wake(self) -> None: ...

    def sleep(self) -> None: ...


FrozenT = TypeVar("FrozenT", bound=HasSleep)


class FrozenRole(Generic[FrozenT]):
    """All ranks of a role that is not trained: the part that references, teachers and reward models share."""

    def __init__(self, group: WorkerGroup[FrozenT], dealer: Dealer, *, takes_turns: bool) -> None:
        self.group = group
        self.dealer = dealer
        self._takes_turns = takes_turns

    def wake(self) -> None:
        """Be ready to compute; does nothing for a role that never sleeps."""
        if self._takes_turns:
            self.group.all(lambda rank: rank.wake())

    def sleep(self) -> None:
        """Leave the accelerators to others."""
        if self._takes_turns:
            self.group.all(lambda rank: rank.sleep())


class TeacherRole:
    """The frozen policy that on-policy distillation leads to."""

    def __init__(self, frozen: FrozenRole["ReferenceRank"]) -> None:
        self._frozen = frozen
        self.wake, self.sleep = frozen.wake, frozen.sleep

    def logprobs(self, sequences: Sequence[TokenSequence]) -> list[np.ndarray]:
        """Return the log-probs of each sequence's trained tokens, in nats."""
        return self._frozen.dealer.forward(self._frozen.group, lambda rank, work: rank.logprobs(work), sequences)


class ReferenceRole:
    """The policy that the KL divergence is measured from; it stays, or moves towards the actor."""

    def __init__(self, frozen: FrozenRole["ReferenceRank"], *, actor: TrainedRole["ActorRank"], alpha: float) -> None:
        self._group, self._dealer = frozen.group, frozen.dealer
        self.wake, self.sleep = frozen.wake, frozen.sleep
        self._actor = actor
        self._alpha = alpha

    def logprobs(self, sequences: Sequence[TokenSequence]) -> list[np.ndarray]:
        """Return the log-probs of each sequence's trained tokens, in nats."""
        return self._dealer.forward(self._group, lambda rank, work: rank.logprobs(work), sequences)

    def move(self) -> None:
        """Make the weights `alpha` of the actor's and the rest of their own; they travel in Ray's object store."""
        actor, alpha = self._actor.group, self._alpha
        with self._actor.awake():
            for number in range(actor.all(lambda rank: rank.num_buckets())[0]):
                bucket = actor.start_each(lambda rank, number: rank.bucket(number), [number] * len(actor))
                actor.wait(bucket)
                # Ray hands the weights of rank 0 to every rank of the reference: they do not pass through the driver.
                self._group.all_each(lambda rank, weights: rank.move(weights, alpha), [bucket[0]] * len(self._group))

    def num_bytes(self) -> int:
        """Return the bytes that `save` writes."""
        return self._group.all(lambda rank: rank.num_bytes())[0]

    def save(self, directory: Path) -> None:
        """Write the weights as they have moved."""
        directory.mkdir(parents=True, exist_ok=True)
        self._group.all(lambda rank: rank.save(directory))

    def load(self, directory: Path) -> None:
        """Take the weights that `save` wrote."""
        self._group.all(lambda rank: rank.load(directory))


class BaseReference:
    """The model under the actor's adapter as the reference of the KL divergence: there is no second copy of it."""

    def __init__(self, actor: TrainedRole["ActorRank"]) -> None:
        self._actor = actor
        self.wake, self.sleep = actor.wake, actor.sleep

    def logprobs(self, sequences: Sequence[TokenSequence]) -> list[np.ndarray]:
        """Return the log-probs of each sequence's trained tokens, in nats."""
        return self._actor.dealer.forward(self._actor.group, lambda rank, work: rank.base_logprobs(work), sequences)


class RewardRole:
    """The reward model, which scores whole responses."""

    def __init__(self, frozen: FrozenRole["RewardRank"], *, statistics: ScoreStatistics | None) -> None:
        self._frozen = frozen
        self.wake, self.sleep = frozen.wake, frozen.sleep
        self._statistics = statistics

    def scores(self, sequences: Sequence[TokenSequence]) -> list[float]:
        """Return the score of each sequence, read at its last token; normalised if there are statistics."""
        ends = [only_end(sequence) for sequence in sequences]
        scores_B = torch.from_numpy(
            np.concatenate(self._frozen.dealer.forward(self._frozen.group, lambda rank, work: rank.scores(work), ends))
        )
        if self._statistics is not None:
            scores_B = normalised_scores(scores_B, mean=self._statistics.mean, std=self._statistics.std)
        return scores_B.tolist()

    def step_scores(self, sequences: Sequence[TokenSequence]) -> list[np.ndarray]:
        """Return the scores of each sequence's steps, float32 [K], read at its marked tokens."""
        return self._frozen.dealer.forward(self._frozen.group, lambda rank, work: rank.scores(work), sequences)
