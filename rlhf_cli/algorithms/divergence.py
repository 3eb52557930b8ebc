"""Divergence between student and teacher token distributions, and the gradient, row by row.

Distributions are log-probabilities `[B, E]` over E events: the full vocabulary, or the teacher's top tokens plus one
event for the rest.
"""

import math

import torch
from torch import Tensor


def divergence(student_BE: Tensor, teacher_BE: Tensor, beta: float) -> Tensor:
    """Compute the generalized Jensen-Shannon divergence `[B]` between teacher t and student s.

    `beta KL(t | m) + (1 - beta) KL(s | m)` with `m = (1 - beta) s + beta t` (arXiv 2306.13649, eq. 1). As in TRL, beta
    0 means `KL(t | s)` and beta 1 means `KL(s | t)`, the limits after division by beta and 1 - beta.
    """
    if beta == 0.0:
        return kl_divergence(teacher_BE, student_BE)
    if beta == 1.0:
        return kl_divergence(student_BE, teacher_BE)
    middle_BE = _mixture(student_BE, teacher_BE, beta)
    of_teacher_B, of_student_B = kl_divergence(teacher_BE, middle_BE), kl_divergence(student_BE, middle_BE)
    return beta * of_teacher_B + (1.0 - beta) * of_student_B


def divergence_terms(student_BE: Tensor, teacher_BE: Tensor, beta: float) -> Tensor:
    """Compute the term of each event, `[B, E]`. They sum to `divergence`."""
    if beta == 0.0:
        return (teacher_BE - student_BE).mul_(teacher_BE.exp())
    if beta == 1.0:
        return (student_BE - teacher_BE).mul_(student_BE.exp())
    middle_BE = _mixture(student_BE, teacher_BE, beta)
    of_teacher_BE = (teacher_BE - middle_BE).mul_(teacher_BE.exp())
    return of_teacher_BE.mul_(beta).add_((student_BE - middle_BE).mul_(student_BE.exp()), alpha=1.0 - beta)


def divergence_gradient(student_BE: Tensor, teacher_BE: Tensor, beta: float) -> Tensor:
    """Compute the `divergence` gradient `[B, E]` with respect to student logits, `s = softmax(logits)`.

    For `KL(t | s)` it is `s - t`. Otherwise the derivative with respect to `s_j` is `u_j`, up to a constant, and with
    respect to a logit `s_j (u_j - sum of s u)`: `u = log s - log t` for beta 1 and `(1 - beta) (log s - log m)`
    between.
    """
    if beta == 0.0:
        # In place here and below: with E the vocabulary, each temporary is as large as the logits.
        return student_BE.exp().sub_(teacher_BE.exp())
    if beta == 1.0:
        slope_BE = student_BE - teacher_BE
    else:
        slope_BE = (student_BE - _mixture(student_BE, teacher_BE, beta)).mul_(1.0 - beta)
    probs_BE = student_BE.exp()
    mean_B1 = (probs_BE * slope_BE).sum(-1, keepdim=True)
    return slope_BE.sub_(mean_B1).mul_(probs_BE)


def kl_divergence(one_BE: Tensor, other_BE: Tensor) -> Tensor:
    """Compute `KL(one | other)`, `[B]`, in nats."""
    return (one_BE - other_BE).mul_(one_BE.exp()).sum(-1)


def entropy(logprobs_BE: Tensor) -> Tensor:
    """Compute entropies `[B]` in nats."""
    return (logprobs_BE.exp() * logprobs_BE).sum(-1).neg_()


def as_events(logprobs_BV: Tensor, tokens_Bk: Tensor) -> Tensor:
    """Return log-probabilities `[B, k + 1]`: the selected tokens, and the remaining tokens combined."""
    # logsumexp over the remaining tokens: log(1 - sum) would lose all digits when the top tokens hold nearly all mass.
    others_B1 = logprobs_BV.scatter(-1, tokens_Bk, -math.inf).logsumexp(-1, keepdim=True)
    return torch.cat([logprobs_BV.gather(-1, tokens_Bk), others_B1], -1)


def gradient_of_tokens(gradient_BE: Tensor, events_BE: Tensor, logprobs_BV: Tensor, tokens_Bk: Tensor) -> Tensor:
    """Expand a gradient over event logits to a gradient over token logits, `[B, V]`.

    Tokens in the combined event split its gradient in proportion to their probability.
    """
    share_BV = (logprobs_BV - events_BE[:, -1:]).exp_().mul_(gradient_BE[:, -1:])
    return share_BV.scatter_(-1, tokens_Bk, gradient_BE[:, :-1])


def pooled(logits_BV: Tensor, events_V: Tensor, num_events: int) -> Tensor:
    """Return the logits of events, `[B, E]`: the log-sum-exp over the tokens of each.

    `events_V` is `num_events` for tokens to leave out. Each event has at least one token.
    """
    index_BV = events_V.expand_as(logits_BV)
    shape = (len(logits_BV), num_events + 1)
    largest_BE = logits_BV.new_full(shape, -math.inf).scatter_reduce(-1, index_BV, logits_BV, "amax")
    shares_BV = (logits_BV - largest_BE.gather(-1, index_BV)).exp_()
    sums_BE = logits_BV.new_zeros(shape).scatter_add_(-1, index_BV, shares_BV)
    return largest_BE.add_(sums_BE.log_())[:, :num_events]


def gradient_of_pooled(gradient_BE: Tensor, pooled_BE: Tensor, logits_BV: Tensor, events_V: Tensor) -> Tensor:
    """Expand a gradient over logits of events to the logits of their tokens, `[B, V]`.

    Tokens of an event split its gradient in proportion to their probability; tokens left out have none.
    """
    is_left_out_V = events_V == pooled_BE.shape[-1]
    index_BV = events_V.masked_fill(is_left_out_V, 0).expand_as(logits_BV)
    shares_BV = (logits_BV - pooled_BE.gather(-1, index_BV)).exp_()
    return shares_BV.mul_(gradient_BE.gather(-1, index_BV)).masked_fill_(is_left_out_V, 0.0)


def _mixture(student_BE: Tensor, teacher_BE: Tensor, beta: float) -> Tensor:
    """Compute log-probabilities of `(1 - beta) s + beta t`."""
    return torch.logaddexp(student_BE + math.log1p(-beta), teacher_BE + math.log(beta))
