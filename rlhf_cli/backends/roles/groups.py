"""Roles of online training as called by the loop, in the driver: full batches in, results in the same order out.

Sequences are sent to the ranks as micro-batches (planner.py).
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import accumulate, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import numpy as np
import ray
import torch

from rlhf_cli.algorithms.gradient_share import Projection
from rlhf_cli.algorithms.objective import LossWeights, finish_policy_metrics, finish_value_metrics
from rlhf_cli.algorithms.shaping import normalised_scores
from rlhf_cli.backends.roles.planner import MicroBatchPlanner
from rlhf_cli.backends.roles.serialization import RankWork, store, store_arrays
from rlhf_cli.backends.roles.watch import Place, Watch, joined_projections, joined_trace, with_place
from rlhf_cli.backends.roles.worker_group import WorkerGroup
from rlhf_cli.data.packing.packs import TokenSequence, only_end
from rlhf_cli.data.stored_arrays import Column
from rlhf_cli.models.reward_model import ScoreStatistics

# Only ranks import DeepSpeed.
if TYPE_CHECKING:
    from rlhf_cli.backends.roles.ranks import (
        ActorRank,
        CriticRank,
        FrozenPolicyRank,
        RewardRank,
        SampledRank,
        TrainedRank,
    )
    from rlhf_cli.backends.roles.student_rank import StudentRank

Result = TypeVar("Result")
_RankT = TypeVar("_RankT", bound="TrainedRank | FrozenPolicyRank | RewardRank")
_SampledT = TypeVar("_SampledT", bound="ActorRank | StudentRank")
_TrainedT = TypeVar("_TrainedT", bound="ActorRank | CriticRank | StudentRank")


def store_sequences(sequences: Sequence[TokenSequence]) -> list[TokenSequence]:
    """Return the sequences with tokens and images in Ray's object store, so that calls send them only once."""
    return store(sequences, ray.put)


def store_column(arrays: Sequence[np.ndarray]) -> list[Column]:
    """Return a column in Ray's object store."""
    return list(store_arrays(arrays, ray.put))


class RoleGroup(Generic[_RankT]):
    """All ranks of a role. With `takes_turns`, they sleep between calls, so that roles can share GPUs."""

    def __init__(self, group: WorkerGroup[_RankT], planner: MicroBatchPlanner, *, takes_turns: bool) -> None:
        self.group = group
        self.planner = planner
        self._takes_turns = takes_turns

    def wake(self) -> None:
        """Move the models to the GPUs. No-op without `takes_turns`."""
        if self._takes_turns:
            self.group.all(lambda rank: rank.wake())

    def sleep(self) -> None:
        """Move the models to host memory. No-op without `takes_turns`."""
        if self._takes_turns:
            self.group.all(lambda rank: rank.sleep())

    @contextmanager
    def awake(self) -> Iterator[None]:
        """Keep the role awake inside the block."""
        self.wake()
        # Not in a `finally`: after an error, ranks may wait in a collective and never reply.
        yield
        self.sleep()

    def run_awake(
        self,
        call: Callable[[_RankT, RankWork], Result],
        work: Sequence[RankWork],
        *,
        rest: Callable[[_RankT], None] = lambda rank: rank.sleep(),
        run: Callable[..., list[Any]] | None = None,
    ) -> list[Result]:
        """Run a call on all ranks, each with its element of `work`. Ranks that take turns wake before it, and `rest`
        after it. `run` is a method of the group, by default `all_each`.
        """
        # In one call: calls of hundreds of ranks are most of the driver's work.
        return (run or self.group.all_each)(_awake(call, rest) if self._takes_turns else call, work)

    def forward(
        self,
        call: Callable[[_RankT, list[list[TokenSequence]]], list[np.ndarray]],
        sequences: Sequence[TokenSequence],
    ) -> list[Column]:
        """Run a forward method. Returns float32 [K] per sequence, one value per trained token.

        With Ray, the values stay in its object store until the driver reads them.
        """
        return self._forward(call, sequences, self.group.all_stored)

    def _plan(self, sequences: Sequence[TokenSequence]) -> list[list[list[int]]]:
        """Return sequence indices per rank and micro-batch of a forward pass."""
        return self.planner.plan(sequences)

    def _forward(
        self,
        call: Callable[[_RankT, list[list[TokenSequence]]], list[np.ndarray]],
        sequences: Sequence[TokenSequence],
        run: Callable[..., list[Any]],
    ) -> list[Any]:
        plan = self._plan(sequences)
        work = [RankWork([[[sequences[i] for i in members] for members in bins]]) for bins in plan]
        results = dict[int, Any]()
        found: list[Any] = self.run_awake(lambda rank, share: call(rank, *share.steps), work, run=run)
        for bins, arrays in zip(plan, found, strict=True):
            for members, values_K in zip(bins, arrays, strict=True):
                bounds = accumulate((sequences[i].num_trained for i in members), initial=0)
                for i, (start, stop) in zip(members, pairwise(bounds), strict=True):
                    results[i] = values_K[start:stop]
        return [results[i] for i in range(len(sequences))]


def _awake(call: Callable[..., Result], rest: Callable[[_RankT], None]) -> Callable[..., Result]:
    def run(rank: _RankT, *work: object) -> Result:
        rank.wake()
        result = call(rank, *work)
        # Not in a `finally`: after an error, other ranks may wait in a collective, and this rank must report it.
        rest(rank)
        return result

    return run


def _keep_weights(rank: "TrainedRank") -> None:
    rank.sleep_optimizer()


class TrainedRole(RoleGroup[_TrainedT]):
    """A trained model: shared methods of actor, critic and student."""

    def wake_weights(self) -> None:
        """Move only the weights to the GPUs. No-op without `takes_turns`."""
        if self._takes_turns:
            self.group.all(_awake(lambda rank: None, _keep_weights))

    def checkpoint_bytes(self) -> int:
        """Estimate the size of a checkpoint in bytes."""
        return self.group.all(lambda rank: rank.checkpoint_bytes())[0]

    def save(self, directory: Path) -> None:
        """Save weights, optimizer, schedule and RNG states."""
        directory.mkdir(parents=True, exist_ok=True)
        with self.awake():
            self.group.all(lambda rank: rank.save(directory))

    def load(self, directory: Path) -> None:
        """Load a state written by `save`."""
        with self.awake():
            self.group.all(lambda rank: rank.load(directory))

    def save_model(self, directory: Path) -> None:
        """Save the model in Hugging Face format."""
        with self.awake():
            self.group.all(lambda rank: rank.save_model(directory))

    def save_average(self, directory: Path) -> None:
        """Save the moving average of the weights in Hugging Face format."""
        with self.awake():
            self.group.all(lambda rank: rank.save_average(directory))


class _WatchedRole(TrainedRole[_SampledT]):
    """A trained model whose weights are pushed to the engines.

    - `watch`: what updates record.
    - `trace`: columns of the tokens of the last watched update, one mapping per optimizer step
      (algorithms/token_trace.py). `projections`: gradients of its watched tokens.
    """

    watch: Watch | None = None
    trace: Sequence[dict[str, np.ndarray]] = ()
    projections: Sequence[Mapping[Place, Projection]] = ()

    def gradient(self) -> dict[str, torch.Tensor]:
        """Return the gradient of the first optimizer step of the last watched update, by parameter; {} if not kept."""
        names = self.group.all(_gradient_names)[0]
        # One at a time: a model's worth would fill Ray's object store.
        return {name: self.group.all(partial(_gradient_of, name))[0] for name in names}

    def _placed(self, sequences: Sequence[TokenSequence]) -> Sequence[TokenSequence]:
        """Return the sequences of an update, with their place in it if it is watched."""
        if self.watch is None:
            return sequences
        return [with_place(sequence, number) for number, sequence in enumerate(sequences)]

    def _take_records(self) -> None:
        """Take over what the ranks have recorded."""
        if self.watch is not None:
            records = self.group.all(_recorded)
            self.trace = joined_trace([trace for trace, _ in records])
            self.projections = joined_projections([found for _, found in records])


def _recorded(rank: "SampledRank") -> tuple[list[list[dict[str, torch.Tensor]]], list[dict[Place, Projection]]]:
    """Return what a rank has recorded, except the gradient."""
    assert rank.record is not None, "the update had no watch"
    return rank.record.trace.steps, rank.record.projections


def _gradient_names(rank: "SampledRank") -> list[str]:
    return [] if rank.record is None else list(rank.record.gradient)


def _gradient_of(name: str, rank: "SampledRank") -> torch.Tensor | None:
    """Return the gradient of a parameter on the rank that keeps it."""
    return None if rank.record is None else rank.record.gradient.get(name)


class ActorRole(_WatchedRole["ActorRank"]):
    """The trained policy."""

    def logprobs(self, sequences: Sequence[TokenSequence]) -> list[Column]:
        """Return the log-probs of trained tokens per sequence, in nats."""
        return self.forward(lambda rank, micro_batches: rank.logprobs(micro_batches), sequences)

    def update(
        self, samples: Sequence[TokenSequence], steps: Sequence[np.ndarray], *, on_policy: bool, weights: LossWeights
    ) -> list[dict[str, float]]:
        """Run optimizer steps, each an array of sample indices, and keep only the weights on the GPUs.

        Returns metrics per step.
        """
        shares, watch = self.planner.steps(self._placed(samples), steps), self.watch
        metrics = self.run_awake(
            lambda rank, share: rank.update(share, on_policy, weights, watch=watch), shares, rest=_keep_weights
        )
        self._take_records()
        return [finish_policy_metrics(of_step) for of_step in metrics[0]]


class StudentRole(_WatchedRole["StudentRank"]):
    """A policy that is trained on the distributions of a teacher in the same ranks."""

    def learn(self, sequences: Sequence[TokenSequence], steps: Sequence[np.ndarray]) -> list[dict[str, float]]:
        """Run optimizer steps, each an array of sequence indices, and keep only the weights on the GPUs.

        Returns metrics per step.
        """
        shares, watch = self.planner.steps(self._placed(sequences), steps), self.watch
        metrics = self.run_awake(lambda rank, share: rank.learn(share, watch=watch), shares, rest=_keep_weights)
        self._take_records()
        return metrics[0]


SampledRole = ActorRole | StudentRole
"""A trained model whose weights are pushed to the engines."""


class CriticRole(TrainedRole["CriticRank"]):
    """The trained value model."""

    def values(self, sequences: Sequence[TokenSequence]) -> list[Column]:
        """Return the values of the states before trained tokens, per sequence."""
        return self.forward(lambda rank, micro_batches: rank.values(micro_batches), sequences)

    def update(self, samples: Sequence[TokenSequence], steps: Sequence[np.ndarray]) -> list[dict[str, float]]:
        """Run optimizer steps, each an array of sample indices. Returns metrics per step."""
        metrics = self.run_awake(lambda rank, share: rank.update(share), self.planner.steps(samples, steps))
        return [finish_value_metrics(of_step) for of_step in metrics[0]]


class FrozenPolicyRole(RoleGroup["FrozenPolicyRank"]):
    """A frozen policy, such as a teacher."""

    def logprobs(self, sequences: Sequence[TokenSequence]) -> list[Column]:
        """Return the log-probs of trained tokens per sequence, in nats."""
        return self.forward(lambda rank, micro_batches: rank.logprobs(micro_batches), sequences)


class TeacherRole(FrozenPolicyRole):
    """The teachers, all in the same ranks."""

    def logprobs(self, sequences: Sequence[TokenSequence]) -> list[Column]:
        """Return the log-probs of trained tokens per sequence from its teacher, in nats."""
        found: dict[int, Column] = {}
        # One teacher after the other, each with full micro-batches.
        for number in sorted({sequence.teacher for sequence in sequences}):
            places = [place for place, sequence in enumerate(sequences) if sequence.teacher == number]
            values = self.forward(partial(_logprobs_of, number), [sequences[place] for place in places])
            found |= zip(places, values, strict=True)
        return [found[place] for place in range(len(sequences))]

    def _plan(self, sequences: Sequence[TokenSequence]) -> list[list[list[int]]]:
        # In the tokens of a teacher's own tokenizer, a response may be longer than any that the policy reads. The limit
        # of later batches stays the same: a resumed run would not know it, and would pack them in another way.
        return self.planner.with_room_for(max(map(len, sequences))).plan(sequences)


def _logprobs_of(number: int, rank: "FrozenPolicyRank", micro_batches: list[list[TokenSequence]]) -> list[np.ndarray]:
    return rank.logprobs(micro_batches, number)


class ReferenceRole(FrozenPolicyRole):
    """The reference policy of the KL divergence, fixed or updated toward the actor."""

    def move(self, actor: ActorRole, alpha: float) -> None:
        """Interpolate: (1 - alpha) * own weights + alpha * actor weights, transferred through Ray's object store."""
        trained = actor.group
        # In buckets, to limit host memory.
        with self.awake(), actor.awake():
            for number in range(trained.all(lambda rank: rank.num_buckets())[0]):
                bucket = trained.start_each(lambda rank, number: rank.bucket(number), [number] * len(trained))
                trained.wait(bucket)
                # Pass the reference to rank 0's result: Ray resolves it on each rank, without a copy in the driver.
                moves = self.group.start_each(
                    lambda rank, weights: rank.move(weights.items(), alpha), [bucket[0]] * len(self.group)
                )
                self.group.wait(moves)

    def num_bytes(self) -> int:
        """Return the number of bytes that `save` writes."""
        return self.group.all(lambda rank: rank.num_bytes())[0]

    def save(self, directory: Path) -> None:
        """Save the current weights."""
        directory.mkdir(parents=True, exist_ok=True)
        with self.awake():
            self.group.all(lambda rank: rank.save(directory))

    def load(self, directory: Path) -> None:
        """Load weights written by `save`."""
        with self.awake():
            self.group.all(lambda rank: rank.load(directory))


class BaseReference:
    """The actor's base model as the reference policy, computed with the adapter disabled instead of a second model."""

    def __init__(self, actor: ActorRole) -> None:
        self._actor = actor
        self.wake, self.sleep = actor.wake, actor.sleep

    def logprobs(self, sequences: Sequence[TokenSequence]) -> list[Column]:
        """Return the log-probs of trained tokens per sequence, in nats."""
        return self._actor.forward(lambda rank, micro_batches: rank.base_logprobs(micro_batches), sequences)


class RewardRole(RoleGroup["RewardRank"]):
    """The reward model."""

    statistics: ScoreStatistics | None = None
    """Mean and standard deviation for normalizing scores."""

    def scores(self, sequences: Sequence[TokenSequence]) -> list[float]:
        """Return one score per sequence, read at the last token, and normalized if statistics are set."""
        found = self.step_scores([only_end(sequence) for sequence in sequences])
        scores_B = torch.from_numpy(np.concatenate(found))
        if self.statistics is not None:
            scores_B = normalised_scores(scores_B, mean=self.statistics.mean, std=self.statistics.std)
        return scores_B.tolist()

    def step_scores(self, sequences: Sequence[TokenSequence]) -> list[np.ndarray]:
        """Return step scores per sequence, float32 [K], read at the marked tokens."""
        # Few values, which the driver reads at once.
        return self._forward(lambda rank, micro_batches: rank.scores(micro_batches), sequences, self.group.all_each)
