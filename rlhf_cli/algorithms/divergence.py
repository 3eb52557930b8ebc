"""Divergences of a student's distribution over tokens from a teacher's, and their gradients, row by row.

Distributions come as log-probabilities `[B, E]` of E events: all tokens of a vocabulary, or the teacher's likeliest
tokens and one event for all others.
"""

import math

import torch
from torch import Tensor


def divergence(student_BE: Tensor, teacher_BE: Tensor, beta: float) -> Tensor:
    """Return the generalised Jensen-Shannon divergence `[B]` of teacher t and student s (arXiv 2306.13649, eq. 1).

    `beta KL(t | m) + (1 - beta) KL(s | m)` with `m = (1 - beta) s + beta t`. At 0 it stands for `KL(t | s)` and at 1
    for `KL(s | t)`: its limits over beta and over 1 - beta, as in TRL.
    """
    if beta == 0.0:
        return kl_divergence(teacher_BE, student_BE)
    if beta == 1.0:
        return kl_divergence(student_BE, teacher_BE)
    middle_BE = _mixture(student_BE, teacher_BE, beta)
    of_teacher_B, of_student_B = kl_divergence(teacher_BE, middle_BE), kl_divergence(student_BE, middle_BE)
    return beta * of_teacher_B + (1.0 - beta) * of_student_B


def divergence_gradient(student_BE: Tensor, teacher_BE: Tensor, beta: float) -> Tensor:
    """Return the gradient `[B, E]` of `divergence` with respect to logits of the student, `s = softmax(logits)`.

    Of `KL(t | s)` it is `s - t`. Otherwise the derivative by `s_j` is `u_j`, up to a constant, and by a logit
    `s_j (u_j - sum of s u)`: `u = log s - log t` at 1 and `(1 - beta) (log s - log m)` between.
    """
    if beta == 0.0:
        return student_BE.exp().sub_(teacher_BE.exp())
    if beta == 1.0:
        slope_BE = student_BE - teacher_BE
    else:
        slope_BE = (student_BE - _mixture(student_BE, teacher_BE, beta)).mul_(1.0 - beta)
    probs_BE = student_BE.exp()
    mean_B1 = (probs_BE * slope_BE).sum(-1, keepdim=True)
    return slope_BE.sub_(mean_B1).mul_(probs_BE)


def kl_divergence(one_BE: Tensor, other_BE: Tensor) -> Tensor:
    """Return `KL(one | other)`, `[B]`, in nats."""
    return (one_BE - other_BE).mul_(one_BE.exp()).sum(-1)


def entropy(logprobs_BE: Tensor) -> Tensor:
    """Return the entropies `[B]` of distributions, in nats."""
    return (logprobs_BE.exp() * logprobs_BE).sum(-1).neg_()


def as_events(logprobs_BV: Tensor, tokens_Bk: Tensor) -> Tensor:
    """Return the log-probabilities `[B, k + 1]` of these tokens, and of all others together."""
    others_B1 = logprobs_BV.scatter(-1, tokens_Bk, -math.inf).logsumexp(-1, keepdim=True)
    return torch.cat([logprobs_BV.gather(-1, tokens_Bk), others_B1], -1)


def gradient_of_tokens(gradient_BE: Tensor, events_BE: Tensor, logprobs_BV: Tensor, tokens_Bk: Tensor) -> Tensor:
    """Return the gradient `[B, V]` of the logits of all tokens from the gradient of the logits of events.

    A token of an event with others gets the event's gradient in proportion to its share of the event's probability.
    """
    share_BV = (logprobs_BV - events_BE[:, -1:]).exp_().mul_(gradient_BE[:, -1:])
    return share_BV.scatter_(-1, tokens_Bk, gradient_BE[:, :-1])


def _mixture(student_BE: Tensor, teacher_BE: Tensor, beta: float) -> Tensor:
    """Return the log-probabilities of `(1 - beta) s + beta t`."""
    return torch.logaddexp(student_BE + math.log1p(-beta), teacher_BE + math.log(beta))
