"""The roles of online training as the loop sees them: whole batches in, whole results out.

Deals sequences to the ranks of a role as packed micro-batches within the token bound and puts results back in order.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rlhf_cli.algorithms.aggregation import StepTotals
from rlhf_cli.algorithms.objective import LossWeights, finish_policy_metrics, finish_value_metrics
from rlhf_cli.algorithms.shaping import normalised_scores
from rlhf_cli.backends.roles.serialization import MicroBatches, UpdateSteps
from rlhf_cli.backends.roles.settings import UpdateStep
from rlhf_cli.backends.roles.worker_group import WorkerGroup
from rlhf_cli.config.train import BatchConfig
from rlhf_cli.data.packing.packs import TokenSequence, only_end, plan_packs
from rlhf_cli.data.packing.samples import Sample
from rlhf_cli.data.packing.shared_prompts import plan_groups
from rlhf_cli.models.reward_model import ScoreStatistics


@dataclass(frozen=True)
class Dealer:
    """Cuts batches into packed micro-batches for the ranks of a role.

    `do_share_prompts` asks the ranks whether they compute the common prompt of neighbours in a micro-batch once.
    """

    num_ranks: int
    batch: BatchConfig
    quadratic_cost: float
    do_share_prompts: Callable[[], bool] = lambda: False

    @cached_property
    def _shares_prompts(self) -> bool:
        return self.do_share_prompts()

    def plan(self, sequences: Sequence[TokenSequence]) -> list[list[list[int]]]:
        """Indices by rank and micro-batch."""
        if self._shares_prompts:
            return plan_groups(
                sequences,
                max_tokens=self.batch.train_max_tokens_per_gpu,
                num_ranks=self.num_ranks,
                max_sequences=self.batch.micro_train_batch_size,
                quadratic_cost=self.quadratic_cost,
            )
        return plan_packs(
            [len(sequence) for sequence in sequences],
            max_tokens=self.batch.train_max_tokens_per_gpu,
            num_ranks=self.num_ranks,
            max_sequences=self.batch.micro_train_batch_size,
            quadratic_cost=self.quadratic_cost,
        )

    def steps(self, samples: Sequence[Sample], steps: Sequence[np.ndarray]) -> list[UpdateSteps]:
        """Every rank's share of the optimizer steps, `[rank][step]`; a step is an array of sample indices."""
        shares = [UpdateSteps() for _ in range(self.num_ranks)]
        for indices in steps:
            chosen = [samples[i] for i in indices]
            num_tokens = sum(sample.sequence.num_trained for sample in chosen)
            totals = StepTotals(num_tokens=num_tokens, num_sequences=len(chosen))
            for rank, bins in enumerate(self.plan([sample.sequence for sample in chosen])):
                shares[rank].append(UpdateStep([[chosen[i] for i in members] for members in bins], totals))
        return shares

    def forward(self, group: WorkerGroup, method: str, sequences: Sequence[TokenSequence]) -> list[np.ndarray]:
        """Results of a forward method, float32 [trained tokens] for each sequence, in their order."""
        plan = self.plan(sequences)
        work = [(MicroBatches([sequences[i] for i in members] for members in bins),) for bins in plan]
        results: list[np.ndarray] = [np.zeros(0, np.float32)] * len(sequences)
        for bins, arrays in zip(plan, group.wait(group.start_each(method, work)), strict=True):
            for members, values_K in zip(bins, arrays, strict=True):
                bounds = np.cumsum([sequences[i].num_trained for i in members])[:-1]
                for i, values in zip(members, np.split(values_K, bounds) if members else [], strict=True):
                    results[i] = values
        return results


class TrainedRole:
    """All ranks of a role in training: what actor and critic share."""

    def __init__(self, group: WorkerGroup, dealer: Dealer, *, takes_turns: bool) -> None:
        self.group = group
        self.dealer = dealer
        self._takes_turns = takes_turns

    def wake(self) -> None:
        """Be ready to compute; does nothing for a role that never sleeps."""
        if self._takes_turns:
            self.group.all("role.wake")

    def sleep(self) -> None:
        """Leave the accelerators to others."""
        if self._takes_turns:
            self.group.all("role.sleep")

    @contextmanager
    def awake(self) -> Iterator[None]:
        """Hold the role on its accelerators for the block."""
        self.wake()
        yield
        self.sleep()

    def sleep_optimizer(self) -> None:
        """Keep the weights alone on the accelerators."""
        if self._takes_turns:
            self.group.all("role.sleep_optimizer")

    def checkpoint_bytes(self) -> int:
        """Bytes of a checkpoint, as an estimate."""
        return int(self.group.all("role.checkpoint_bytes")[0])

    def save(self, directory: Path) -> None:
        """Write everything that shapes the future of this role."""
        directory.mkdir(parents=True, exist_ok=True)
        with self.awake():
            self.group.all("role.save", directory)

    def load(self, directory: Path) -> None:
        """Restore what `save` wrote."""
        with self.awake():
            self.group.all("role.load", directory)

    def save_model(self, directory: Path) -> None:
        """Write the model in Hugging Face format."""
        with self.awake():
            self.group.all("role.save_model", directory)

    def save_average(self, directory: Path) -> None:
        """Write the moving average of the weights in Hugging Face format."""
        with self.awake():
            self.group.all("role.save_average", directory)

    def update(self, samples: Sequence[Sample], steps: Sequence[np.ndarray], *given: Any) -> list[dict[str, float]]:
        """Metrics of each optimizer step, over all ranks; `given` is the same for every rank."""
        shares = self.dealer.steps(samples, steps)
        return list(self.group.wait(self.group.start_each("update", [(share, *given) for share in shares]))[0])


class ActorRole:
    """The policy in training."""

    def __init__(self, trained: TrainedRole) -> None:
        self.trained = trained
        self.wake, self.sleep, self.sleep_optimizer = trained.wake, trained.sleep, trained.sleep_optimizer

    def logprobs(self, sequences: Sequence[TokenSequence]) -> list[np.ndarray]:
        """Log-probs of each sequence's trained tokens, in nats."""
        return self.trained.dealer.forward(self.trained.group, "logprobs", sequences)

    def update(
        self, samples: Sequence[Sample], steps: Sequence[np.ndarray], *, on_policy: bool, weights: LossWeights
    ) -> list[dict[str, float]]:
        """Metrics of each optimizer step."""
        return [finish_policy_metrics(metrics) for metrics in self.trained.update(samples, steps, on_policy, weights)]


class CriticRole:
    """The value model in training."""

    def __init__(self, trained: TrainedRole) -> None:
        self.trained = trained
        self.wake, self.sleep = trained.wake, trained.sleep

    def values(self, sequences: Sequence[TokenSequence]) -> list[np.ndarray]:
        """Values of the states before each sequence's trained tokens."""
        return self.trained.dealer.forward(self.trained.group, "values", sequences)

    def update(self, samples: Sequence[Sample], steps: Sequence[np.ndarray]) -> list[dict[str, float]]:
        """Metrics of each optimizer step."""
        return [finish_value_metrics(metrics) for metrics in self.trained.update(samples, steps)]


class ReferenceRole:
    """The policy that the KL divergence is measured from; it stays, or moves towards the actor."""

    def __init__(
        self, group: WorkerGroup, dealer: Dealer, *, takes_turns: bool, actor: TrainedRole, alpha: float
    ) -> None:
        self._group = group
        self._dealer = dealer
        self._takes_turns = takes_turns
        self._actor = actor
        self._alpha = alpha

    def wake(self) -> None:
        """Be ready to compute; does nothing for a role that never sleeps."""
        if self._takes_turns:
            self._group.all("wake")

    def sleep(self) -> None:
        """Leave the accelerators to others."""
        if self._takes_turns:
            self._group.all("sleep")

    def logprobs(self, sequences: Sequence[TokenSequence]) -> list[np.ndarray]:
        """Log-probs of each sequence's trained tokens, in nats."""
        return self._dealer.forward(self._group, "logprobs", sequences)

    def move(self) -> None:
        """Make the weights `alpha` of the actor's and the rest of their own; they travel in Ray's object store."""
        with self._actor.awake():
            for number in range(self._actor.group.all("num_buckets")[0]):
                bucket = self._actor.group.start("bucket", number)
                self._actor.group.wait(bucket)
                self._group.all("move", bucket[0], self._alpha)

    def num_bytes(self) -> int:
        """Bytes that `save` writes."""
        return int(self._group.all("num_bytes")[0])

    def save(self, directory: Path) -> None:
        """Write the weights as they have moved."""
        directory.mkdir(parents=True, exist_ok=True)
        self._group.all("save", directory)

    def load(self, directory: Path) -> None:
        """Take the weights that `save` wrote."""
        self._group.all("load", directory)


class BaseReference:
    """The model under the actor's adapter as what the KL divergence is measured from: there is no second copy of it."""

    def __init__(self, actor: TrainedRole) -> None:
        self._actor = actor
        self.wake, self.sleep = actor.wake, actor.sleep

    def logprobs(self, sequences: Sequence[TokenSequence]) -> list[np.ndarray]:
        """Log-probs of each sequence's trained tokens, in nats."""
        return self._actor.dealer.forward(self._actor.group, "base_logprobs", sequences)


class RewardRole:
    """The reward model, which scores whole responses."""

    def __init__(
        self, group: WorkerGroup, dealer: Dealer, *, takes_turns: bool, statistics: ScoreStatistics | None
    ) -> None:
        self._group = group
        self._dealer = dealer
        self._takes_turns = takes_turns
        self._statistics = statistics

    def wake(self) -> None:
        """Be ready to compute; does nothing for a role that never sleeps."""
        if self._takes_turns:
            self._group.all("wake")

    def sleep(self) -> None:
        """Leave the accelerators to others."""
        if self._takes_turns:
            self._group.all("sleep")

    def scores(self, sequences: Sequence[TokenSequence]) -> list[float]:
        """The score of each sequence, read at its last token; normalised where there are statistics."""
        ends = [only_end(sequence) for sequence in sequences]
        scores_B = torch.from_numpy(np.concatenate(self._dealer.forward(self._group, "scores", ends)))
        if self._statistics is not None:
            scores_B = normalised_scores(scores_B, mean=self._statistics.mean, std=self._statistics.std)
        return scores_B.tolist()
