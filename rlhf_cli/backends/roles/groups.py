"""Roles of online training as called by the loop, in the driver: full batches in, results in the same order out.

Sequences are sent to the ranks as micro-batches (planner.py).
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import numpy as np
import ray
import torch
from ray.exceptions import RayTaskError

from rlhf_cli.algorithms.gradient_share import Projection
from rlhf_cli.algorithms.objective import LossWeights, finish_policy_metrics, finish_value_metrics
from rlhf_cli.algorithms.shaping import normalised_scores
from rlhf_cli.backends.cluster.ray_cluster import PROCESS_DEATHS, death_reason
from rlhf_cli.backends.roles.planner import MicroBatchPlanner
from rlhf_cli.backends.roles.serialization import PickledCall, RankWork, SentWork, store
from rlhf_cli.backends.roles.settings import RoleSettings
from rlhf_cli.backends.roles.watch import Place, Watch, joined_projections, joined_trace, with_place
from rlhf_cli.data.packing.packs import TokenSequence, only_end
from rlhf_cli.errors import (
    OutOfMemory,
    ProcessDied,
    RunError,
    Shortage,
    UsageError,
    first_line,
    full_memory,
    one_line,
)
from rlhf_cli.models.reward_model import ScoreStatistics

# Only ranks import DeepSpeed.
if TYPE_CHECKING:
    from rlhf_cli.backends.roles.ranks import ActorRank, CriticRank, FrozenPolicyRank, RewardRank, TrainedRank
    from rlhf_cli.backends.roles.student_rank import StudentRank

_DEATH_SECONDS = 5.0
"""Seconds to wait after a rank's failure for the death of another rank, which Ray reports after about a second."""

_LOOK_SECONDS = 1.0
"""Interval between looks for ranks that died while others compute."""

_HeldT = TypeVar("_HeldT")
_Work = TypeVar("_Work")
Result = TypeVar("Result")
_RankT = TypeVar("_RankT", bound="TrainedRank | FrozenPolicyRank | RewardRank")
_TrainedT = TypeVar("_TrainedT", bound="ActorRank | CriticRank | StudentRank")


def store_sequences(sequences: Sequence[TokenSequence]) -> list[TokenSequence]:
    """Return the sequences with tokens and images in Ray's object store, so that calls send them only once."""
    return store(sequences, ray.put)


class WorkerGroup(Generic[_HeldT]):
    """The workers of a role by rank, each with an object of type `_HeldT`.

    A call is a function of this object, usually a lambda, so that types are checked. Ray pickles the function with all
    values that it refers to. Refer only to the argument and to picklable local variables, never to `self`.
    """

    def __init__(self, role: str, workers: list[Any], log_dir: Path) -> None:
        self.role = role
        self._workers = workers
        self._log_dir = log_dir

    def __len__(self) -> int:
        return len(self._workers)

    def start(self, call: Callable[[_HeldT], object]) -> list[object]:
        """Start a call on all ranks. Pass the result to `wait`."""
        pickled = PickledCall(call)
        return [worker.call.remote(pickled) for worker in self._workers]

    def start_each(self, call: Callable[[_HeldT, _Work], object], work: Sequence[_Work]) -> list[Any]:
        """Start a call on all ranks, each with its element of `work`. Pass the result to `wait`."""
        pickled = PickledCall(call)
        return [worker.call.remote(pickled, share) for worker, share in zip(self._workers, work, strict=True)]

    def wait(self, calls: list[object]) -> list[Any]:
        """Wait for the calls and return the results by rank.

        Raises:
            UsageError, RunError: raised in the worker.
            RunError: a worker died or failed. The message has rank, reason and log file.
        """
        pending = {call: rank for rank, call in enumerate(calls)}
        results = dict[int, Any]()
        while pending:
            # A look costs time for every pending call, so wait for all. But look again every second: after a rank dies,
            # others may wait for it in a collective and never finish.
            done, _ = ray.wait(list(pending), num_returns=len(pending), timeout=_LOOK_SECONDS)
            for call in done:
                rank = pending.pop(call)
                try:
                    results[rank] = ray.get(call)
                except RayTaskError as error:
                    # The error may only be a consequence, such as a closed connection to a rank that died.
                    if not isinstance(error.cause, UsageError | RunError):
                        self._raise_if_one_died(pending)
                    raise self._failure(rank, error) from error
                except PROCESS_DEATHS as error:
                    raise self._death(rank, error) from error
        return [results[rank] for rank in range(len(calls))]

    def _raise_if_one_died(self, pending: dict[object, int]) -> None:
        """Raise ProcessDied if one of these ranks died."""
        done, _ = ray.wait(list(pending), num_returns=len(pending), timeout=_DEATH_SECONDS) if pending else ([], [])
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
        """Start building the role on all ranks. Pass the result to `wait`.

        Args:
            rank_class: "module:class" of a rank.
            local_size: ranks on a node.
        """
        host, port = self.address()
        # Always local rank 0, because Ray shows each process only its own GPU.
        size = {"WORLD_SIZE": str(len(self)), "LOCAL_RANK": "0", "LOCAL_SIZE": str(local_size)}
        common = size | {"MASTER_ADDR": host, "MASTER_PORT": str(port)}
        return [
            worker.build.remote(common | {"RANK": str(rank)}, rank_class, settings)
            for rank, worker in enumerate(self._workers)
        ]

    def all(self, call: Callable[[_HeldT], Result]) -> list[Result]:
        """Run a call on all ranks and return the results by rank."""
        return self.wait(self.start(call))

    def all_each(self, call: Callable[[_HeldT, RankWork], Result], work: Sequence[RankWork]) -> list[Result]:
        """Run a call on all ranks, each with its element of `work`, and return the results by rank."""
        pickled = PickledCall(lambda rank, sent, *chunks: call(rank, sent.work(chunks)))
        pairs = zip(self._workers, work, strict=True)
        # The chunks are arguments of their own: Ray reads such references before the call, without asking the driver.
        return self.wait([worker.call.remote(pickled, SentWork.of(share), *share.chunks) for worker, share in pairs])

    def _log_file(self, rank: int) -> Path:
        """Return a rank's log file."""
        return self._log_dir / f"{self.role}-{rank}.log"

    def _death(self, rank: int, error: Exception) -> ProcessDied:
        reason = death_reason(error, self.role)
        return ProcessDied(f"{self.role} rank {rank} died (", reason, f"); its log is {self._log_file(rank)}")

    def _failure(self, rank: int, error: RayTaskError) -> Exception:
        where, log_file = f"{self.role} rank {rank}: ", f"; its log is {self._log_file(rank)}"
        if isinstance(error.cause, OutOfMemory) and error.cause.shortage is not None:
            return OutOfMemory(where, replace(error.cause.shortage, role=self.role), log_file)
        if isinstance(error.cause, UsageError | RunError):
            return error.cause
        with self._log_file(rank).open("a") as log:
            log.write(f"{error}\n")
        if (kind := full_memory(error.cause)) is not None:
            return OutOfMemory(where, Shortage(kind, role=self.role, detail=one_line(error.cause)), log_file)
        reason = f"{type(error.cause).__name__}: {first_line(error.cause)}"
        return RunError(f"{self.role} rank {rank} failed ({reason}); the full trace is in {self._log_file(rank)}")


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
    ) -> list[Result]:
        """Run a call on all ranks, each with its element of `work`. Ranks that take turns wake before it, and `rest`
        after it.
        """
        # In one call: calls of hundreds of ranks are most of the driver's work.
        return self.group.all_each(_awake(call, rest) if self._takes_turns else call, work)

    def forward(
        self,
        call: Callable[[_RankT, list[list[TokenSequence]]], list[np.ndarray]],
        sequences: Sequence[TokenSequence],
    ) -> list[np.ndarray]:
        """Run a forward method. Returns float32 [K] per sequence, one value per trained token."""
        plan = self.planner.plan(sequences)
        work = [RankWork([[[sequences[i] for i in members] for members in bins]]) for bins in plan]
        results: list[np.ndarray] = [np.zeros(0, np.float32)] * len(sequences)
        found = self.run_awake(lambda rank, share: call(rank, *share.steps), work)
        for bins, arrays in zip(plan, found, strict=True):
            for members, values_K in zip(bins, arrays, strict=True):
                bounds = np.cumsum([sequences[i].num_trained for i in members])[:-1]
                for i, values in zip(members, np.split(values_K, bounds) if members else [], strict=True):
                    results[i] = values
        return results


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


class ActorRole(TrainedRole["ActorRank"]):
    """The trained policy.

    - `watch`: what updates record.
    - `trace`: columns of the tokens of the last watched update, one mapping per optimizer step
      (algorithms/token_trace.py). `projections`: gradients of its watched tokens.
    """

    watch: Watch | None = None
    trace: Sequence[dict[str, np.ndarray]] = ()
    projections: Sequence[Mapping[Place, Projection]] = ()

    def logprobs(self, sequences: Sequence[TokenSequence]) -> list[np.ndarray]:
        """Return the log-probs of trained tokens per sequence, in nats."""
        return self.forward(lambda rank, micro_batches: rank.logprobs(micro_batches), sequences)

    def update(
        self, samples: Sequence[TokenSequence], steps: Sequence[np.ndarray], *, on_policy: bool, weights: LossWeights
    ) -> list[dict[str, float]]:
        """Run optimizer steps, each an array of sample indices, and keep only the weights on the GPUs.

        Returns metrics per step.
        """
        if self.watch is not None:
            samples = [with_place(sample, number) for number, sample in enumerate(samples)]
        shares, watch = self.planner.steps(samples, steps), self.watch
        metrics = self.run_awake(
            lambda rank, share: rank.update(share, on_policy, weights, watch=watch), shares, rest=_keep_weights
        )
        if watch is not None:
            records = self.group.all(_recorded)
            self.trace = joined_trace([trace for trace, _ in records])
            self.projections = joined_projections([found for _, found in records])
        return [finish_policy_metrics(of_step) for of_step in metrics[0]]


def _recorded(rank: "ActorRank") -> tuple[list[list[dict[str, torch.Tensor]]], list[dict[Place, Projection]]]:
    """Return what a rank has recorded, except gradients: a model's worth would fill Ray's object store."""
    assert rank.record is not None, "the update had no watch"
    return rank.record.trace.steps, rank.record.projections


class StudentRole(TrainedRole["StudentRank"]):
    """A policy that is trained on the distributions of a teacher in the same ranks."""

    def learn(self, sequences: Sequence[TokenSequence], steps: Sequence[np.ndarray]) -> list[dict[str, float]]:
        """Run optimizer steps, each an array of sequence indices, and keep only the weights on the GPUs.

        Returns metrics per step.
        """
        shares = self.planner.steps(sequences, steps)
        return self.run_awake(lambda rank, share: rank.learn(share), shares, rest=_keep_weights)[0]


SampledRole = ActorRole | StudentRole
"""A trained model whose weights are pushed to the engines."""


class CriticRole(TrainedRole["CriticRank"]):
    """The trained value model."""

    def values(self, sequences: Sequence[TokenSequence]) -> list[np.ndarray]:
        """Return the values of the states before trained tokens, per sequence."""
        return self.forward(lambda rank, micro_batches: rank.values(micro_batches), sequences)

    def update(self, samples: Sequence[TokenSequence], steps: Sequence[np.ndarray]) -> list[dict[str, float]]:
        """Run optimizer steps, each an array of sample indices. Returns metrics per step."""
        metrics = self.run_awake(lambda rank, share: rank.update(share), self.planner.steps(samples, steps))
        return [finish_value_metrics(of_step) for of_step in metrics[0]]


class FrozenPolicyRole(RoleGroup["FrozenPolicyRank"]):
    """A frozen policy, such as a teacher."""

    def logprobs(self, sequences: Sequence[TokenSequence]) -> list[np.ndarray]:
        """Return the log-probs of trained tokens per sequence, in nats."""
        return self.forward(lambda rank, micro_batches: rank.logprobs(micro_batches), sequences)


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

    def logprobs(self, sequences: Sequence[TokenSequence]) -> list[np.ndarray]:
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
        return self.forward(lambda rank, micro_batches: rank.scores(micro_batches), sequences)
