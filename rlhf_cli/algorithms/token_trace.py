"""Records how each token entered the actor loss, in the optimizer steps of one update."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from rlhf_cli.algorithms.aggregation import CORRECT, PROMPT_TOKENS, StepTotals
from rlhf_cli.algorithms.objective import LossWeights, policy_objective, token_terms
from rlhf_cli.algorithms.policy_loss import PolicyColumns
from rlhf_cli.config.policy import PolicyConfig

SAMPLE, TOKEN = "sample", "token"
"""Columns that identify a token: number of the sequence in the update, and of the trained token in it."""
PLACE = (SAMPLE, TOKEN)


class TokenTrace:
    """Columns of all trained tokens, one mapping per optimizer step; values as in the loss, without gradient.

    - `logprob`, `anchor`, `rollout`: log-probs at this step, of the policy that ratios are relative to, and of the
      rollout engine. `ROLE`: log-probs of the frozen policy of each KL term.
    - `advantage`, `ratio`, `clip_low`, `clip_high`, `clip_dual`, `loss`: policy loss.
    - `weight`, `corrected`: rollout correction.
    - `kept`, `covariant`, `prompt_tokens`, `correct`: of `PolicyColumns`, if the settings use them.
    - `entropy`; `ROLE_kl` and `ROLE_coef`: KL estimate and coefficient of each KL term.
    - `gradient`, `entropy_gradient`: derivatives of the step's total loss with respect to the token's log-prob and
      entropy. The gradient of the loss is the sum over all tokens of both times the gradients of log-prob and entropy.
    """

    def __init__(self) -> None:
        self.steps: list[list[dict[str, Tensor]]] = []

    def begin_step(self) -> None:
        """Begin an optimizer step."""
        self.steps.append([])

    def add(self, columns: Mapping[str, Tensor]) -> None:
        """Add the columns of a micro-batch, with `PLACE`, to the optimizer step."""
        self.steps[-1].append({name: values.detach().float().cpu() for name, values in columns.items()})

    def of_sequence(self, number: int) -> dict[str, Tensor]:
        """Return the columns of a sequence's tokens, in order, in the current optimizer step."""
        parts = [(part, part[SAMPLE] == number) for part in self.steps[-1]]
        found = {name: torch.cat([part[name][chosen] for part, chosen in parts]) for name in self.steps[-1][0]}
        order = found[TOKEN].argsort()
        return {name: values[order] for name, values in found.items()}


def policy_columns(
    logprobs_K: Tensor,
    entropy_K: Tensor,
    columns: PolicyColumns,
    *,
    settings: PolicyConfig,
    totals: StepTotals,
    weights: LossWeights,
    max_new_tokens: int,
) -> dict[str, Tensor]:
    """Return the columns of a micro-batch of a policy, except `PLACE`; arguments as of `policy_objective`."""
    own_K, own_entropy_K = logprobs_K.detach().requires_grad_(), entropy_K.detach().requires_grad_()
    common: dict[str, Any] = {"settings": settings, "weights": weights}
    loss, _ = policy_objective(own_K, own_entropy_K, columns, totals=totals, max_new_tokens=max_new_tokens, **common)
    gradient_K, entropy_gradient_K = torch.autograd.grad(
        loss, (own_K, own_entropy_K), allow_unused=True, materialize_grads=True
    )
    terms = token_terms(own_K, columns, **common)
    found = {
        "logprob": own_K,
        "anchor": terms.anchor_K,
        "rollout": columns.rollout_K,
        "advantage": columns.advantages_K,
        **terms.flags,
        "loss": terms.loss_K,
        "weight": terms.weight_K,
        "corrected": terms.corrected_K,
        "entropy": own_entropy_K,
        "gradient": gradient_K,
        "entropy_gradient": entropy_gradient_K,
    }
    optional = {"kept": columns.kept_K, "covariant": columns.covariant_K, PROMPT_TOKENS: columns.prompt_tokens_K}
    optional[CORRECT] = columns.correct_K
    found |= {name: values_K for name, values_K in optional.items() if values_K is not None}
    for role, term in weights.kl.items():
        found |= {role: columns.frozen_K[role], f"{role}_kl": terms.kl_K[role]}
        found[f"{role}_coef"] = torch.full_like(own_K, term.coef)
    return found
