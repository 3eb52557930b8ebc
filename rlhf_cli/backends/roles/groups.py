"""The roles of online training as the loop sees them: whole batches in, whole results out.

Sequences go to the ranks of a role as packed micro-batches (planner.py); results come back in the order of the
sequences.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import numpy as np
import ray
import torch
from ray.exceptions import RayTaskError

from rlhf_cli.algorithms.objective import LossWeights, finish_policy_metrics, finish_value_metrics
from rlhf_cli.algorithms.shaping import normalised_scores
from rlhf_cli.backends.cluster.ray_cluster import PROCESS_DEATHS, death_reason
from rlhf_cli.backends.roles.planner import MicroBatchPlanner
from rlhf_cli.backends.roles.serialization import RankWork
from rlhf_cli.backends.roles.settings import RoleSettings
from rlhf_cli.data.packing.packs import TokenSequence, only_end
from rlhf_cli.errors import (
    OutOfMemory,
    ProcessDied,
    RunError,
    UsageError,
    first_line,
    full_memory,
    memory_sentence,
)
from rlhf_cli.models.reward_model import ScoreStatistics

if TYPE_CHECKING:  # only the process of a rank imports DeepSpeed
    from rlhf_cli.backends.roles.ranks import ActorRank, CriticRank, FrozenPolicyRank, RewardRank
    from rlhf_cli.backends.roles.student_rank import StudentRank

DEATH_SECONDS = 5.0
"""How long after a rank's failure others are given to turn out dead: Ray takes about a second to notice."""

HeldT = TypeVar("HeldT")
Work = TypeVar("Work")
Result = TypeVar("Result")
RankT = TypeVar("RankT", bound="ActorRank | CriticRank | StudentRank | FrozenPolicyRank | RewardRank")
TrainedT = TypeVar("TrainedT", bound="ActorRank | CriticRank | StudentRank")


class WorkerGroup(Generic[HeldT]):
    """The workers of one role by rank, each of which holds an object of type `HeldT`.

    A call is a function of that object, usually a lambda, so that types are checked and a rename reaches it. Ray sends
    the function with the values that it uses: a lambda must name `rank` and plain values, never `self`.
    """

    def __init__(self, role: str, workers: list[Any], log_dir: Path) -> None:
        self.role = role
        self._workers = workers
        self._log_dir = log_dir

    def __len__(self) -> int:
        return len(self._workers)

    def start(self, call: Callable[[HeldT], object]) -> list[object]:
        """Begin the same call on every rank; `wait` for the results."""
        return [worker.call.remote(call) for worker in self._workers]

    def start_each(self, call: Callable[[HeldT, Work], object], work: Sequence[Work]) -> list[Any]:
        """Begin a call with its own work on every rank; `wait` for the results."""
        return [worker.call.remote(call, share) for worker, share in zip(self._workers, work, strict=True)]

    def wait(self, calls: list[object]) -> list[Any]:
        """Return the results of the calls by rank.

        Raises:
            UsageError, RunError: as raised in the worker.
            RunError: a worker died or failed; names the rank, the reason and its log file.
        """
        pending = {call: rank for rank, call in enumerate(calls)}
        while pending:  # one at a time, so that a dead rank is noticed while others still wait for it
            done, _ = ray.wait(list(pending), num_returns=1)
            rank = pending.pop(done[0])
            try:
                ray.get(done[0])
            except RayTaskError as error:
                if not isinstance(error.cause, UsageError | RunError):
                    self._raise_if_one_died(pending)
                raise self._failure(rank, error) from error
            except PROCESS_DEATHS as error:
                raise self._death(rank, error) from error
        return list(ray.get(calls))

    def _raise_if_one_died(self, pending: dict[object, int]) -> None:
        """Raise ProcessDied if a rank is gone: ranks that were waiting for it fail too, perhaps earlier."""
        done, _ = ray.wait(list(pending), num_returns=len(pending), timeout=DEATH_SECONDS) if pending else ([], [])
        for call in done:
            try:
                ray.get(call)
            except PROCESS_DEATHS as error:
                raise self._death(pending[call], error) from error
            except RayTaskError:
                continue

    def address(self) -> tuple[str, int]:
        """Return (IP address of rank 0's node, a free port there)."""
        return self.wait([self._workers[0].address.remote()])[0]

    def visible_gpus(self) -> list[str]:
        """Return CUDA_VISIBLE_DEVICES of every rank."""
        return self.wait([worker.visible_gpus.remote() for worker in self._workers])

    def build(self, rank_class: str, settings: RoleSettings, *, local_size: int) -> list[object]:
        """Begin making the role in every rank; `wait` for the calls.

        Args:
            rank_class: "module:class" of a rank.
            local_size: ranks on a node.
        """
        host, port = self.address()
        size = {"WORLD_SIZE": str(len(self)), "LOCAL_RANK": "0", "LOCAL_SIZE": str(local_size)}
        common = size | {"MASTER_ADDR": host, "MASTER_PORT": str(port)}
        return [
            worker.build.remote(common | {"RANK": str(rank)}, rank_class, settings)
            for rank, worker in enumerate(self._workers)
        ]

    def all(self, call: Callable[[HeldT], Result]) -> list[Result]:
        """Return the results of the same call on every rank."""
        return self.wait(self.start(call))

    def all_each(self, call: Callable[[HeldT, Work], Result], work: Sequence[Work]) -> list[Result]:
        """Return the results of a call with its own work on every rank."""
        return self.wait([worker.call.remote(call, share) for worker, share in zip(self._workers, work, strict=True)])

    def log_file(self, rank: int) -> Path:
        """Return the file of a rank's output."""
        return self._log_dir / f"{self.role}-{rank}.log"

    def _death(self, rank: int, error: Exception) -> ProcessDied:
        return ProcessDied(f"{self.role} rank {rank} died ({death_reason(error)}); its log is {self.log_file(rank)}")

    def _failure(self, rank: int, error: RayTaskError) -> Exception:
        if isinstance(error.cause, OutOfMemory):
            return OutOfMemory(f"{self.role} rank {rank}: {error.cause}; its log is {self.log_file(rank)}")
        if isinstance(error.cause, UsageError | RunError):
            return error.cause
        with self.log_file(rank).open("a") as log:
            log.write(f"{error}\n")
        if (kind := full_memory(error.cause)) is not None:
            return OutOfMemory(
                f"{self.role} rank {rank}: {memory_sentence(kind, '')}; its log is {self.log_file(rank)}"
            )
        reason = f"{type(error.cause).__name__}: {first_line(error.cause)}"
        return RunError(f"{self.role} rank {rank} failed ({reason}); the full trace is in {self.log_file(rank)}")


class RoleGroup(Generic[RankT]):
    """All ranks of a role; with `takes_turns` they leave the accelerators to others in between."""

    def __init__(self, group: WorkerGroup[RankT], planner: MicroBatchPlanner, *, takes_turns: bool) -> None:
        self.group = group
        self.planner = planner
        self._takes_turns = takes_turns

    def wake(self) -> None:
        """Be ready to compute; does nothing for a role that never sleeps."""
        if self._takes_turns:
            self.group.all(lambda rank: rank.wake())

    def sleep(self) -> None:
        """Leave the accelerators to others."""
        if self._takes_turns:
            self.group.all(lambda rank: rank.sleep())

    @contextmanager
    def awake(self) -> Iterator[None]:
        """Hold the role on its accelerators for the block."""
        self.wake()
        yield
        self.sleep()

    def forward(
        self,
        call: Callable[[RankT, list[list[TokenSequence]]], list[np.ndarray]],
        sequences: Sequence[TokenSequence],
    ) -> list[np.ndarray]:
        """Return the results of a forward method, float32 [trained tokens] for each sequence, in their order."""
        plan = self.planner.plan(sequences)
        work = [RankWork([[[sequences[i] for i in members] for members in bins]]) for bins in plan]
        results: list[np.ndarray] = [np.zeros(0, np.float32)] * len(sequences)
        found = self.group.all_each(lambda rank, share: call(rank, *share.steps), work)
        for bins, arrays in zip(plan, found, strict=True):
            for members, values_K in zip(bins, arrays, strict=True):
                bounds = np.cumsum([sequences[i].num_trained for i in members])[:-1]
                for i, values in zip(members, np.split(values_K, bounds) if members else [], strict=True):
                    results[i] = values
        return results


class TrainedRole(RoleGroup[TrainedT]):
    """A model in training: the part that actor and critic share."""

    def sleep_optimizer(self) -> None:
        """Keep the weights alone on the accelerators."""
        if self._takes_turns:
            self.group.all(lambda rank: rank.sleep_optimizer())

    def checkpoint_bytes(self) -> int:
        """Return the bytes of a checkpoint, as an estimate."""
        return self.group.all(lambda rank: rank.checkpoint_bytes())[0]

    def save(self, directory: Path) -> None:
        """Write everything that shapes the future of this role."""
        directory.mkdir(parents=True, exist_ok=True)
        with self.awake():
            self.group.all(lambda rank: rank.save(directory))

    def load(self, directory: Path) -> None:
        """Restore what `save` wrote."""
        with self.awake():
            self.group.all(lambda rank: rank.load(directory))

    def save_model(self, directory: Path) -> None:
        """Write the model in Hugging Face format."""
        with self.awake():
            self.group.all(lambda rank: rank.save_model(directory))

    def save_average(self, directory: Path) -> None:
        """Write the moving average of the weights in Hugging Face format."""
        with self.awake():
            self.group.all(lambda rank: rank.save_average(directory))


class ActorRole(TrainedRole["ActorRank"]):
    """The policy in training."""

    def logprobs(self, sequences: Sequence[TokenSequence]) -> list[np.ndarray]:
        """Return the log-probs of each sequence's trained tokens, in nats."""
        return self.forward(lambda rank, micro_batches: rank.logprobs(micro_batches), sequences)

    def update(
        self, samples: Sequence[TokenSequence], steps: Sequence[np.ndarray], *, on_policy: bool, weights: LossWeights
    ) -> list[dict[str, float]]:
        """Return the metrics of each optimizer step."""
        shares = self.planner.steps(samples, steps)
        metrics = self.group.all_each(lambda rank, share: rank.update(share, on_policy, weights), shares)
        return [finish_policy_metrics(of_step) for of_step in metrics[0]]


class StudentRole(TrainedRole["StudentRank"]):
    """The model that learns the distributions of a teacher in its own ranks."""

    def learn(self, sequences: Sequence[TokenSequence], steps: Sequence[np.ndarray]) -> list[dict[str, float]]:
        """Return the metrics of each optimizer step; a step is an array of indices."""
        shares = self.planner.steps(sequences, steps)
        return self.group.all_each(lambda rank, share: rank.learn(share), shares)[0]


SampledRole = ActorRole | StudentRole
"""A model in training whose weights go to the engines."""


class CriticRole(TrainedRole["CriticRank"]):
    """The value model in training."""

    def values(self, sequences: Sequence[TokenSequence]) -> list[np.ndarray]:
        """Return the values of the states before each sequence's trained tokens."""
        return self.forward(lambda rank, micro_batches: rank.values(micro_batches), sequences)

    def update(self, samples: Sequence[TokenSequence], steps: Sequence[np.ndarray]) -> list[dict[str, float]]:
        """Return the metrics of each optimizer step."""
        metrics = self.group.all_each(lambda rank, share: rank.update(share), self.planner.steps(samples, steps))
        return [finish_value_metrics(of_step) for of_step in metrics[0]]


class FrozenPolicyRole(RoleGroup["FrozenPolicyRank"]):
    """The frozen policy that on-policy distillation leads to."""

    def logprobs(self, sequences: Sequence[TokenSequence]) -> list[np.ndarray]:
        """Return the log-probs of each sequence's trained tokens, in nats."""
        return self.forward(lambda rank, micro_batches: rank.logprobs(micro_batches), sequences)


class ReferenceRole(FrozenPolicyRole):
    """The policy that the KL divergence is measured from; it stays, or moves towards the actor."""

    def move(self, actor: ActorRole, alpha: float) -> None:
        """Make the weights `alpha` of the actor's and the rest of their own; they travel in Ray's object store."""
        trained = actor.group
        with self.awake(), actor.awake():
            for number in range(trained.all(lambda rank: rank.num_buckets())[0]):
                bucket = trained.start_each(lambda rank, number: rank.bucket(number), [number] * len(trained))
                trained.wait(bucket)
                # Ray hands the weights of rank 0 to every rank of the reference: they do not pass through the driver.
                self.group.all_each(
                    lambda rank, weights: rank.move(weights.items(), alpha), [bucket[0]] * len(self.group)
                )

    def num_bytes(self) -> int:
        """Return the bytes that `save` writes."""
        return self.group.all(lambda rank: rank.num_bytes())[0]

    def save(self, directory: Path) -> None:
        """Write the weights as they have moved."""
        directory.mkdir(parents=True, exist_ok=True)
        with self.awake():
            self.group.all(lambda rank: rank.save(directory))

    def load(self, directory: Path) -> None:
        """Take the weights that `save` wrote."""
        with self.awake():
            self.group.all(lambda rank: rank.load(directory))


class BaseReference:
    """The model under the actor's adapter as the reference of the KL divergence: there is no second copy of it."""

    def __init__(self, actor: ActorRole) -> None:
        self._actor = actor
        self.wake, self.sleep = actor.wake, actor.sleep

    def logprobs(self, sequences: Sequence[TokenSequence]) -> list[np.ndarray]:
        """Return the log-probs of each sequence's trained tokens, in nats."""
        return self._actor.forward(lambda rank, micro_batches: rank.base_logprobs(micro_batches), sequences)


class RewardRole(RoleGroup["RewardRank"]):
    """The reward model, which scores whole responses."""

    statistics: ScoreStatistics | None = None
    """Mean and deviation by which scores are normalised."""

    def scores(self, sequences: Sequence[TokenSequence]) -> list[float]:
        """Return the score of each sequence, read at its last token; normalised if there are statistics."""
        found = self.step_scores([only_end(sequence) for sequence in sequences])
        scores_B = torch.from_numpy(np.concatenate(found))
        if self.statistics is not None:
            scores_B = normalised_scores(scores_B, mean=self.statistics.mean, std=self.statistics.std)
        return scores_B.tolist()

    def step_scores(self, sequences: Sequence[TokenSequence]) -> list[np.ndarray]:
        """Return the scores of each sequence's steps, float32 [K], read at its marked tokens."""
        return self.forward(lambda rank, micro_batches: rank.scores(micro_batches), sequences)
