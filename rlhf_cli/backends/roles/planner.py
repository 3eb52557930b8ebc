"""Cuts a batch into packed micro-batches for the ranks of a role, within the bound on tokens."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from rlhf_cli.algorithms.aggregation import StepTotals
from rlhf_cli.backends.roles.serialization import RankWork
from rlhf_cli.config.train import BatchConfig
from rlhf_cli.data.packing.packs import TokenSequence, plan_packs
from rlhf_cli.data.packing.shared_prompts import plan_groups


@dataclass(frozen=True)
class MicroBatchPlanner:
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

    def steps(self, samples: Sequence[TokenSequence], steps: Sequence[np.ndarray]) -> list[RankWork]:
        """Return every rank's share of the optimizer steps; a step is an array of sample indices."""
        shares = [RankWork([], []) for _ in range(self.num_ranks)]
        for indices in steps:
            chosen = [samples[i] for i in indices]
            num_tokens = sum(sample.num_trained for sample in chosen)
            totals = StepTotals(num_tokens=num_tokens, num_sequences=len(chosen))
            for rank, bins in enumerate(self.plan(chosen)):
                shares[rank].steps.append([[chosen[i] for i in members] for members in bins])
                shares[rank].totals.append(totals)
        return shares
