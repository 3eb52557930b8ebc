"""Splits a batch into packed micro-batches for the ranks of a role, within the token limit."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from rlhf_cli.algorithms.aggregation import CORRECT, OBSERVED, PROMPT_TOKENS, StepTotals
from rlhf_cli.backends.roles.serialization import RankWork
from rlhf_cli.config.train import BatchConfig
from rlhf_cli.data.packing.packs import TokenSequence, plan_packs
from rlhf_cli.data.packing.shared_prompts import plan_groups


@dataclass(frozen=True)
class MicroBatchPlanner:
    """Splits batches into packed micro-batches for the ranks of a role.

    Ranks in a sequence- or tensor-parallel group get the same micro-batches. With sequence parallelism, the token limit
    is multiplied by the size of the group.

    `do_share_prompts` returns whether the ranks compute the common prompt of neighbors in a micro-batch once.
    """

    num_ranks: int
    batch: BatchConfig
    quadratic_cost: float
    do_share_prompts: Callable[[], bool] = lambda: False
    ranks_per_sequence: int = 1
    ranks_per_layer: int = 1

    # Ask late and once: ranks answer only after their model is loaded.
    @cached_property
    def _shares_prompts(self) -> bool:
        return self.do_share_prompts()

    @property
    def _ranks_per_pack(self) -> int:
        return self.ranks_per_sequence * self.ranks_per_layer

    def with_room_for(self, longest: int) -> "MicroBatchPlanner":
        """Return the planner with a token limit of at least the length of a sequence."""
        needed = -(-longest // self.ranks_per_sequence)
        if needed <= self.batch.max_tokens:
            return self
        return replace(self, batch=self.batch.model_copy(update={"train_max_tokens_per_gpu": needed}))

    def plan(self, sequences: Sequence[TokenSequence]) -> list[list[list[int]]]:
        """Return sequence indices per rank and micro-batch. Ranks in a group have the same ones."""
        shares = self._shares(sequences)
        return [share for share in shares for _ in range(self._ranks_per_pack)]

    def _shares(self, sequences: Sequence[TokenSequence]) -> list[list[list[int]]]:
        """Return sequence indices per group of ranks and micro-batch."""
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
        """Return the work per rank for these optimizer steps, each an array of sample indices."""
        shares = [RankWork([], []) for _ in range(self.num_ranks)]
        for indices in steps:
            chosen = [samples[i] for i in indices]
            num_observed = _num_marked(chosen, OBSERVED)
            totals = StepTotals(
                sum(sample.num_trained for sample in chosen) - num_observed,
                len(chosen),
                num_prompts=_num_prompts(chosen),
                num_correct=_num_marked(chosen, CORRECT),
                num_observed=num_observed,
            )
            # Totals are over all ranks: losses of micro-batches are parts of one mean over the step.
            for rank, bins in enumerate(self.plan(chosen)):
                shares[rank].steps.append([[chosen[i] for i in members] for members in bins])
                shares[rank].totals.append(totals)
        return shares


def _num_marked(samples: Sequence[TokenSequence], name: str) -> int:
    """Return the number of tokens with 1 in a column; 0 without this column."""
    if not samples or name not in samples[0].columns:
        return 0
    return sum(int(np.count_nonzero(sample.columns[name])) for sample in samples)


def _num_prompts(samples: Sequence[TokenSequence]) -> float:
    """Return the sum over tokens of 1 / (tokens of the prompt); 0 without these columns."""
    # All samples of a step have the same columns.
    if not samples or PROMPT_TOKENS not in samples[0].columns:
        return 0.0
    columns = (sample.columns[PROMPT_TOKENS].astype(np.float64) for sample in samples)
    return float(sum((1 / column[column > 0]).sum() for column in columns))  # 0 at observations
