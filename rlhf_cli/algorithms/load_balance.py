"""Load-balancing loss for mixture-of-experts routers (Switch Transformers, arXiv 2101.03961, eq. 4 to 6).

A row is one token in one MoE layer; it is routed to k of E experts. Over all rows in an optimizer step, F_e is the mean
number of selections of expert e, and P_e the mean router probability:

loss = E * sum_e F_e * P_e

With balanced routing the loss is k. F has no gradient, so once F is known the loss is a sum over micro-batches.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class RouterSums:
    """Per-expert sums over rows: selection counts, and probabilities with gradient."""

    counts_E: Tensor
    probabilities_E: Tensor
    num_rows: Tensor


def router_sums(logits: Sequence[Tensor], weights_T: Tensor, *, top_k: int) -> RouterSums:
    """Sum over the router logits `[T, E]` of all layers, with each token scaled by its weight."""
    num_experts = logits[0].shape[-1]
    counts_E = weights_T.new_zeros(num_experts)
    probabilities_E = weights_T.new_zeros(num_experts)
    for logits_TE in logits:
        probabilities_TE = logits_TE.float().softmax(-1)
        # Selections are recomputed from the logits, as in transformers' load_balancing_loss_func, because models return
        # only router logits.
        taken_TK = probabilities_TE.detach().topk(top_k, dim=-1).indices
        counts_E = counts_E.scatter_add(0, taken_TK.flatten(), weights_T.repeat_interleave(top_k))
        probabilities_E = probabilities_E + weights_T @ probabilities_TE
    return RouterSums(counts_E, probabilities_E, weights_T.sum() * len(logits))


def balance_part(sums: RouterSums, counts_E: Tensor, num_rows: Tensor) -> Tensor:
    """Compute a micro-batch's partial loss. `counts_E` and `num_rows` are totals for the full step."""
    frequencies_E = counts_E / num_rows
    return torch.dot(frequencies_E, sums.probabilities_E / num_rows) * len(counts_E)
