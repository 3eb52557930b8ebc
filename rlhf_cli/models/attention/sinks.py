"""Attention sinks for kernels without them: one more key per head, with a logit of its own and value 0.

A kernel that returns the log-sum-exp `lse` of its scores computes the output without the sink. With it, the log-sum-exp
is `logaddexp(lse, sink)`, and the output shrinks by the ratio of the two sums. Flash kernels recompute probabilities
from scores and log-sum-exp in the backward pass, so with the new output and log-sum-exp they return exact gradients.
"""

from collections.abc import Callable
from typing import Any

import torch

ForwardKernel = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
"""(query, key, value) -> output [T, heads, value size] and log-sum-exp, float32 [heads, T]."""
BackwardKernel = Callable[..., tuple[torch.Tensor, torch.Tensor, torch.Tensor]]
"""(gradient, query, key, value, output, log-sum-exp) -> gradients of query, key and value."""


class AttendWithSinks(torch.autograd.Function):
    """Attention [T, heads, value size] of a kernel, with sinks [heads]."""

    @staticmethod
    def forward(
        ctx: Any,
        query_THD: torch.Tensor,
        key_UGD: torch.Tensor,
        value_UGD: torch.Tensor,
        sinks_H: torch.Tensor,
        forward: ForwardKernel,
        backward: BackwardKernel,
    ) -> torch.Tensor:
        output_THD, plain_HT = forward(query_THD, key_UGD, value_UGD)
        lse_HT = torch.logaddexp(plain_HT, sinks_H.float()[:, None])
        output_THD.mul_((plain_HT - lse_HT).exp().T[..., None])
        ctx.backward_kernel = backward
        ctx.save_for_backward(query_THD, key_UGD, value_UGD, sinks_H, output_THD, lse_HT)
        return output_THD

    @staticmethod
    def backward(ctx: Any, grad_THD: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        query_THD, key_UGD, value_UGD, sinks_H, output_THD, lse_HT = ctx.saved_tensors
        grads = ctx.backward_kernel(grad_THD, query_THD, key_UGD, value_UGD, output_THD, lse_HT)
        # The gradient of a logit is its probability times (gradient of the probability - mean), here 0 - mean.
        mean_TH = (grad_THD.float() * output_THD).sum(-1)
        grad_sinks_H = -((sinks_H.float()[:, None] - lse_HT).exp() * mean_TH.T).sum(1)
        return (*grads, grad_sinks_H.to(sinks_H.dtype), None, None)
