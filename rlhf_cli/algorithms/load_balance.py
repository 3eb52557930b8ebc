"""The load-balancing loss of the routers in a mixture of experts (Switch Transformers, arXiv 2101.03961, eq. 4 to 6).

A row is a token in a layer with experts. Of E experts a row takes k. Over all rows of an optimizer step, F_e is the
number of rows that take expert e, and P_e the mean probability that routers give it, both per row:

    loss = E * sum_e F_e * P_e

It is k if rows are spread evenly. F has no gradient, so that the loss is a sum over micro-batches once F is known.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class RouterSums:
    """Sums over rows, for each expert: how often it was taken, and its probabilities, with their gradient."""

    counts_E: Tensor
    probabilities_E: Tensor
    num_rows: Tensor


def router_sums(logits: Sequence[Tensor], weights_T: Tensor, *, top_k: int) -> RouterSums:
    """Return the sums over the layers' router logits `[T, E]`; a token counts as often as its weight."""
    num_experts = logits[0].shape[-1]
    counts_E = weights_T.new_zeros(num_experts)
    probabilities_E = weights_T.new_zeros(num_experts)
    for logits_TE in logits:
        probabilities_TE = logits_TE.float().softmax(-1)
        taken_TK = probabilities_TE.detach().topk(top_k, dim=-1).indices
        counts_E = counts_E.scatter_add(0, taken_TK.flatten(), weights_T.repeat_interleave(top_k))
        probabilities_E = probabilities_E + weights_T @ probabilities_TE
    return RouterSums(counts_E, probabilities_E, weights_T.sum() * len(logits))


def balance_part(sums: RouterSums, counts_E: Tensor, num_rows: Tensor) -> Tensor:
    """Return a micro-batch's part of the loss; `counts_E` and `num_rows` are of the whole step."""
    frequencies_E = counts_E / num_rows
    return torch.dot(frequencies_E, sums.probabilities_E / num_rows) * len(counts_E)
