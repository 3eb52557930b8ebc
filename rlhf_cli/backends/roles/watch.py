"""What the ranks of a policy record about an update, for `rlhf why` and `rlhf replay`."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from rlhf_cli.algorithms.aggregation import OBSERVED
from rlhf_cli.algorithms.gradient_share import Projection
from rlhf_cli.algorithms.token_trace import PLACE, SAMPLE, TOKEN
from rlhf_cli.data.packing.packs import TokenSequence

Place = tuple[int, int]
"""A token of an update: number of the sequence, and of the trained token in it."""


@dataclass(frozen=True)
class Watch:
    """What an update records in addition to the columns of all tokens.

    - `tokens`: tokens whose gradients are compared with the gradient of their optimizer step.
    - `keeps_gradient`: whether the gradient of the first optimizer step is kept in host memory, on rank 0.
    """

    tokens: tuple[Place, ...] = ()
    keeps_gradient: bool = False


def with_place(sample: TokenSequence, number: int) -> TokenSequence:
    """Return the sequence with columns that identify its tokens in a trace."""
    # float32 like all columns: exact up to 16 million.
    observed_K = sample.columns.get(OBSERVED, np.zeros(sample.num_trained, np.float32))
    tokens_K = np.cumsum(observed_K == 0, dtype=np.float32) - 1  # observations are not in the trace
    place = {SAMPLE: np.full_like(tokens_K, number), TOKEN: tokens_K}
    return replace(sample, columns={**sample.columns, **place})


def joined_trace(ranks: Sequence[Sequence[Sequence[Mapping[str, Tensor]]]]) -> list[dict[str, np.ndarray]]:
    """Return the columns of each optimizer step over all ranks and micro-batches, ordered by sequence and token.

    Ranks in a sequence- or tensor-parallel group record the same tokens, of which one is kept.
    """
    joined = []
    for of_ranks in zip(*ranks, strict=True):
        parts = [part for micro_batches in of_ranks for part in micro_batches]
        columns = {name: torch.cat([part[name] for part in parts]).numpy() for name in parts[0]}
        _, kept = np.unique(np.stack([columns[name] for name in PLACE]), axis=1, return_index=True)
        joined.append({name: values[kept] for name, values in columns.items()})
    return joined


def joined_projections(ranks: Sequence[Sequence[Mapping[Place, Projection]]]) -> list[dict[Place, Projection]]:
    """Return the projections of each optimizer step over all ranks."""
    return [{place: one for found in of_ranks for place, one in found.items()} for of_ranks in zip(*ranks, strict=True)]
