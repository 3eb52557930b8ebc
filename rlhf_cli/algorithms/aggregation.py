"""Per-token values from a micro-batch, reduced to partial means over the optimizer step.

Every function returns a *partial* value: summed over all micro-batches and ranks, it is the global mean. Micro-batching
therefore never changes the loss or the gradient. A trainer that averages gradients over ranks multiplies the partial
value by the number of ranks.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from rlhf_cli.algorithms.ragged import segment_ids, segment_lengths
from rlhf_cli.config.policy import LossAgg

Metrics = dict[str, Tensor]

PROMPT_TOKENS = "prompt_tokens"
"""Column with the trained tokens of a token's prompt in the iteration."""
CORRECT, OBSERVED = "correct", "observed"
"""Columns with 1 for tokens in correct responses, and for an environment's observations; 0 otherwise."""

# combine_metrics reduces by this suffix, so a mean must not end in it.
_MAX_SUFFIX = "_max"


@dataclass(frozen=True, slots=True)
class StepTotals:
    """Optimizer step size over all micro-batches and ranks: trained tokens and sequences.

    - `step`: optimizer steps, counted from 1; None in an evaluation.
    - `num_correct`, `num_observed`: tokens in correct responses and observations, if the loss has their terms.
      Observations are not trained tokens.
    - `num_prompts`: sum over trained tokens of 1 / (trained tokens of the prompt in the iteration), for `prompt_mean`:
      the number of prompts if the step has all responses to each of them.
    """

    num_tokens: int
    num_sequences: int
    step: int | None = None
    num_prompts: float = 0.0
    num_correct: int = 0
    num_observed: int = 0


def token_mean(values_K: Tensor, totals: StepTotals) -> Tensor:
    """Partial mean over all trained tokens in the step, `sum(x) / N`. With K = 0 it is zero, with a graph."""
    # An empty sum stays connected to the graph: a rank without tokens must still run backward and its collectives.
    return values_K.sum() / max(totals.num_tokens, 1)


def sequence_mean(values_B: Tensor, totals: StepTotals) -> Tensor:
    """Partial mean over all sequences in the step, `sum(x) / S`. Per-token values are summed over each sequence."""
    return values_B.sum() / max(totals.num_sequences, 1)


def aggregate(
    values_K: Tensor,
    cu: Tensor,
    totals: StepTotals,
    *,
    kind: LossAgg,
    max_new_tokens: int,
    prompt_tokens_K: Tensor | None = None,
) -> Tensor:
    """Compute a micro-batch's partial loss, with gradient. `cu` `[B+1]` marks sequence boundaries.

    With N tokens and S sequences in the step:
    - token_mean: `sum(x) / N`
    - seq_mean: mean over sequences of the mean over tokens
    - seq_sum_norm: `sum(x) / (S max_new_tokens)`, without length bias (Dr. GRPO, arXiv 2503.20783)
    - prompt_mean: mean over prompts of the mean over all tokens of their responses (DAPO's formula, arXiv 2503.14476;
      ScaleRL, 2510.13786), with `prompt_tokens_K` trained tokens of each token's prompt in the iteration. A prompt with
      a part of its tokens in the step counts as this part of a prompt.
    """
    if kind == "token_mean":
        return token_mean(values_K, totals)
    if kind == "seq_mean":
        length_K = segment_lengths(cu).clamp(min=1)[segment_ids(cu, len(values_K))]
        return sequence_mean(values_K / length_K, totals)
    if kind == "seq_sum_norm":
        return sequence_mean(values_K, totals) / max_new_tokens
    if kind == "prompt_mean":
        assert prompt_tokens_K is not None, "prompt_mean needs the tokens of prompts"
        return (values_K / prompt_tokens_K).sum() / (totals.num_prompts or 1.0)
    raise ValueError(f"loss_agg must be token_mean, seq_mean, seq_sum_norm or prompt_mean, not {kind!r}")


def maximum(values_K: Tensor) -> Tensor:
    """Return the maximum of non-negative values, or 0 if empty. Names of such metrics end in `_max`."""
    return values_K.max() if values_K.numel() else values_K.new_zeros(())


def combine_metrics(parts: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> Metrics:
    """Combine metrics from two micro-batches or ranks: add partial means, take the larger value for `..._max`.

    A metric present in only one of them is kept.
    """
    combined = dict(parts)
    for name, value in other.items():
        if name not in combined:
            combined[name] = value
        elif name.endswith(_MAX_SUFFIX):
            combined[name] = torch.maximum(combined[name], value)
        else:
            combined[name] = combined[name] + value
    return combined
