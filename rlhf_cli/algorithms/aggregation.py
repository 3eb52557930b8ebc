"""How per-token values of one micro-batch add up to a mean over the whole optimizer step.

Every function returns a *part*: the sum of the parts of all micro-batches of all ranks is the global mean. So the
loss and its gradient do not depend on how the step was cut up. A trainer whose gradients are averaged over ranks
multiplies the part by the number of ranks.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from rlhf_cli.algorithms.ragged import segment_ids, segment_lengths
from rlhf_cli.config.policy import LossAgg

Metrics = dict[str, Tensor]

MAX_SUFFIX = "_max"


@dataclass(frozen=True, slots=True)
class StepTotals:
    """Size of one optimizer step over all micro-batches and ranks: trained tokens and sequences."""

    num_tokens: int
    num_sequences: int


def token_mean(values_K: Tensor, totals: StepTotals) -> Tensor:
    """Part of the mean over all trained tokens of the step, `sum(x) / N`. Zero, still with a graph, where K is 0."""
    return values_K.sum() / max(totals.num_tokens, 1)


def sequence_mean(values_B: Tensor, totals: StepTotals) -> Tensor:
    """Part of the mean over all sequences of the step, `sum(x) / S`; per-token values count summed over a sequence."""
    return values_B.sum() / max(totals.num_sequences, 1)


def aggregate(values_K: Tensor, cu: Tensor, totals: StepTotals, *, kind: LossAgg, max_new_tokens: int) -> Tensor:
    """Part of the step's mean of a per-token loss, with its gradient; `cu` `[B+1]` bounds the sequences.

    With N tokens and S sequences in the step: token_mean `sum(x) / N`; seq_mean the mean over sequences of each one's
    mean over its tokens; seq_sum_norm `sum(x) / (S max_new_tokens)`, which favours no length (Dr. GRPO, arXiv
    2503.20783).
    """
    if kind == "token_mean":
        return token_mean(values_K, totals)
    if kind == "seq_mean":
        length_K = segment_lengths(cu).clamp(min=1)[segment_ids(cu)]
        return sequence_mean(values_K / length_K, totals)
    if kind == "seq_sum_norm":
        return sequence_mean(values_K, totals) / max_new_tokens
    raise ValueError(f"loss_agg must be token_mean, seq_mean or seq_sum_norm, not {kind!r}")


def maximum(values_K: Tensor) -> Tensor:
    """Return the largest of values that are never negative; 0 without any. Such metrics are named `..._max`."""
    return values_K.max() if values_K.numel() else values_K.new_zeros(())


def combine_metrics(parts: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> Metrics:
    """Return the metrics of two micro-batches (or ranks) as one: sums of parts, the larger one of those named
    `..._max`.

    A metric that only one side has is kept.
    """
    combined = dict(parts)
    for name, value in other.items():
        if name not in combined:
            combined[name] = value
        elif name.endswith(MAX_SUFFIX):
            combined[name] = torch.maximum(combined[name], value)
        else:
            combined[name] = combined[name] + value
    return combined
