"""Per-token divergence between student and teacher, from hidden states and LM heads, in chunks of tokens.

A full `[tokens, vocabulary]` float32 tensor is never materialized: the backward pass recomputes each chunk of student
and teacher logits.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from rlhf_cli.algorithms.divergence import (
    as_events,
    divergence,
    divergence_gradient,
    divergence_terms,
    entropy,
    gradient_of_pooled,
    gradient_of_tokens,
    kl_divergence,
    pooled,
)
from rlhf_cli.models.logit_chunks import (
    ChunkSizes,
    HeadGradients,
    HeadWeights,
    LogitTransform,
    chunk_sizes,
    logits_of,
    product_gradient,
    softmax_dtype,
)

DIVERGENCE = "divergence"
MEASURES = ("forward_kl", "reverse_kl", "teacher_entropy", "teacher_agreement")
"""Metrics on the full token distributions, independent of the training divergence."""
TERMS = 5
"""Terms of a token's divergence in its details."""


@dataclass(frozen=True)
class DivergenceSettings:
    """Divergence settings.

    - `beta`: interpolation parameter of `algorithms.divergence`.
    - `temperature`: softmax temperature for both distributions.
    - `teacher_top_k`: keep only the teacher's top tokens and combine the rest into one event; None keeps all tokens.
    """

    beta: float = 0.0
    temperature: float = 1.0
    teacher_top_k: int | None = None


@dataclass(frozen=True)
class TokenEvents:
    """Events that student and teacher share if their vocabularies differ (`data/tokenizing/alignment.py`).

    - `student_V`, `teacher_V`: event of each token, int64; the number of events for tokens to leave out.
    - `tokens_E`: the student's token that names each event.
    """

    student_V: torch.Tensor
    teacher_V: torch.Tensor
    tokens_E: torch.Tensor

    def to(self, device: torch.device | str) -> "TokenEvents":
        """Move the events to a device."""
        return TokenEvents(self.student_V.to(device), self.teacher_V.to(device), self.tokens_E.to(device))


@dataclass(frozen=True)
class _Call:
    """Arguments without gradient."""

    teacher: HeadWeights
    transform: LogitTransform
    settings: DivergenceSettings
    sizes: ChunkSizes
    events: TokenEvents | None

    def student_logits(self, product: torch.Tensor) -> torch.Tensor:
        return logits_of(product, self.transform, self.settings.temperature)

    def student_logprobs(self, logits_BV: torch.Tensor) -> torch.Tensor:
        return torch.log_softmax(self._pooled(logits_BV), -1)

    def teacher_logprobs(self, product: torch.Tensor) -> torch.Tensor:
        logits = logits_of(product, self.teacher.transform, self.settings.temperature)
        if self.events is not None:
            logits = pooled(logits, self.events.teacher_V[: logits.shape[-1]], len(self.events.tokens_E))
        return torch.log_softmax(logits, -1)

    def logit_gradient(self, logits_BV: torch.Tensor, teacher_BE: torch.Tensor) -> torch.Tensor:
        """Return the divergence gradient with respect to the student's logits."""
        pooled_BE = self._pooled(logits_BV)
        gradient = _gradient(torch.log_softmax(pooled_BE, -1), teacher_BE, self.settings)
        if self.events is None:
            return gradient
        return gradient_of_pooled(gradient, pooled_BE, logits_BV, self.events.student_V[: logits_BV.shape[-1]])

    def _pooled(self, logits_BV: torch.Tensor) -> torch.Tensor:
        if self.events is None:
            return logits_BV
        return pooled(logits_BV, self.events.student_V[: logits_BV.shape[-1]], len(self.events.tokens_E))


def token_divergences(
    hidden_KD: torch.Tensor,
    student: HeadWeights,
    teacher_KE: torch.Tensor,
    teacher: HeadWeights,
    settings: DivergenceSettings,
    events: TokenEvents | None = None,
    *,
    chunk_size: int | None = None,
) -> dict[str, torch.Tensor]:
    """Compute `divergence`, float32 [K], and the MEASURES [K] for each token.

    The divergence is differentiable with respect to the student's hidden states [K, D], weight and bias; the measures
    are not. Teacher hidden states [K, E] may have a different width. If one head has more rows, the additional rows are
    padding and excluded from both distributions. `events` map different vocabularies to common events. `chunk_size` is
    the number of rows per head product.
    """
    student, call = _call(hidden_KD, student, teacher_KE, teacher, settings, events, chunk_size)
    # Autograd only tracks tensors that are arguments; `call` holds the rest.
    divergence_K, *measures = _TokenDivergences.apply(hidden_KD, student.weight_VD, student.bias_V, teacher_KE, call)
    return {DIVERGENCE: divergence_K, **dict(zip(MEASURES, measures, strict=True))}


def _call(
    hidden_KD: torch.Tensor,
    student: HeadWeights,
    teacher_KE: torch.Tensor,
    teacher: HeadWeights,
    settings: DivergenceSettings,
    events: TokenEvents | None,
    chunk_size: int | None = None,
) -> tuple[HeadWeights, _Call]:
    """Return (the student's head, all other arguments), with heads of the same number of rows, or of the tokens with
    events.
    """
    # Model families pad the embedding matrix differently, for example Qwen2.5 0.5B and 7B.
    common = min(len(student.weight_VD), len(teacher.weight_VD))
    of_student, of_teacher = (common, common) if events is None else (len(events.student_V), len(events.teacher_V))
    student, teacher = student.first_rows(of_student), teacher.first_rows(of_teacher)
    rows = len(student.weight_VD), len(teacher.weight_VD)
    sizes = chunk_sizes(
        hidden_KD.device,
        row_bytes=rows[0] * hidden_KD.element_size() + rows[1] * teacher_KE.element_size(),
        block_row_bytes=sum(rows) * 4,
        chunk_size=chunk_size,
    )
    return student, _Call(teacher, student.transform, settings, sizes, events)


@torch.no_grad()
def divergence_details(
    hidden_KD: torch.Tensor,
    student: HeadWeights,
    teacher_KE: torch.Tensor,
    teacher: HeadWeights,
    settings: DivergenceSettings,
    targets_K: torch.Tensor,
    events: TokenEvents | None = None,
) -> dict[str, torch.Tensor]:
    """Return what a token's divergence consists of, `[K]` each; arguments as of `token_divergences`.

    - `logprob`, `teacher`: log-probs of the target, or of its event, at the temperature of the settings; NaN for a
      target without an event.
    - `term_0` to `term_4`: largest terms of the divergence.
    - `term_0_token`, `term_0_student`, `term_0_teacher`: token of a term and its log-probs; token -1 stands for all
      tokens except the teacher's top tokens.
    """
    head, call = _call(hidden_KD, student, teacher_KE, teacher, settings, events)
    if events is not None:
        # A model may sample rows of its head that are no token.
        last = len(events.student_V) - 1
        targets_K = events.student_V[targets_K.clamp(max=last)].masked_fill(targets_K > last, len(events.tokens_E))
    found = []
    # At least one block, so that a pack without targets has all columns.
    for chunk in [*call.sizes.chunks(len(targets_K))] or [slice(0, 0)]:
        products = head.product(hidden_KD[chunk]), call.teacher.product(teacher_KE[chunk])
        for rows, block in [*call.sizes.blocks(chunk)] or [(chunk, chunk)]:
            student_BV = call.student_logprobs(call.student_logits(products[0][block]))
            teacher_BV = call.teacher_logprobs(products[1][block])
            found.append(_details(student_BV, teacher_BV, targets_K[rows], settings))
    joined = {name: torch.cat([one[name] for one in found]) for name in found[0]}
    if events is not None:
        for name in (f"term_{number}_token" for number in range(TERMS)):
            if name in joined:
                joined[name] = torch.where(joined[name] < 0, joined[name], events.tokens_E[joined[name]])
    return joined


class _TokenDivergences(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_KD: torch.Tensor,
        weight_VD: torch.Tensor,
        bias_V: torch.Tensor | None,
        teacher_KE: torch.Tensor,
        call: _Call,
    ) -> tuple[torch.Tensor, ...]:
        num_tokens, head = hidden_KD.shape[0], HeadWeights(weight_VD, bias_V)
        shape = (1 + len(MEASURES), num_tokens)
        # One tensor for all results: each block writes once per metric, without a list of parts to concatenate.
        results_nK = torch.empty(shape, dtype=softmax_dtype(hidden_KD), device=hidden_KD.device)
        for chunk in call.sizes.chunks(num_tokens):
            products = head.product(hidden_KD[chunk]), call.teacher.product(teacher_KE[chunk])
            for rows, block in call.sizes.blocks(chunk):
                student = call.student_logprobs(call.student_logits(products[0][block]))
                teacher = call.teacher_logprobs(products[1][block])
                results_nK[0, rows] = _divergence(student, teacher, call.settings)
                results_nK[1:, rows] = _measures(student, teacher)
        divergence_K, *measures = results_nK.unbind(0)
        # Otherwise autograd would expect gradients for the measures and allocate zeros for them.
        ctx.mark_non_differentiable(*measures)
        ctx.call = call
        ctx.save_for_backward(hidden_KD, weight_VD, bias_V, teacher_KE)
        return divergence_K, *measures

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_K: torch.Tensor, *_: object) -> tuple[object, ...]:
        hidden_KD, weight_VD, bias_V, teacher_KE = ctx.saved_tensors
        call: _Call = ctx.call
        gradients = HeadGradients(ctx.needs_input_grad, hidden_KD, HeadWeights(weight_VD, bias_V))
        for chunk in call.sizes.chunks(hidden_KD.shape[0]):
            product, of_teacher = gradients.head.product(hidden_KD[chunk]), call.teacher.product(teacher_KE[chunk])
            for rows, block in call.sizes.blocks(chunk):
                # The gradient overwrites the product: the logits in this block are no longer needed.
                logits, teacher = call.student_logits(product[block]), call.teacher_logprobs(of_teacher[block])
                grad = call.logit_gradient(logits, teacher).mul_(grad_K[rows, None])
                product[block] = product_gradient(grad, logits, call.transform, call.settings.temperature)
            gradients.add(chunk, product)
        return *gradients.values(), None, None


def _divergence(student_BV: torch.Tensor, teacher_BV: torch.Tensor, settings: DivergenceSettings) -> torch.Tensor:
    tokens_Bk = _top_tokens(teacher_BV, settings.teacher_top_k)
    if tokens_Bk is not None:
        student_BV, teacher_BV = as_events(student_BV, tokens_Bk), as_events(teacher_BV, tokens_Bk)
    return divergence(student_BV, teacher_BV, settings.beta)


def _details(
    student_BV: torch.Tensor, teacher_BV: torch.Tensor, targets_B: torch.Tensor, settings: DivergenceSettings
) -> dict[str, torch.Tensor]:
    tokens_BE = torch.arange(student_BV.shape[-1], device=student_BV.device).expand_as(student_BV)
    events = (student_BV, teacher_BV)
    tokens_Bk = _top_tokens(teacher_BV, settings.teacher_top_k)
    if tokens_Bk is not None:
        tokens_BE = torch.nn.functional.pad(tokens_Bk, (0, 1), value=-1)
        events = as_events(student_BV, tokens_Bk), as_events(teacher_BV, tokens_Bk)
    terms_BE = divergence_terms(*events, settings.beta)
    places_Bn = terms_BE.abs().topk(min(TERMS, terms_BE.shape[-1]), -1).indices
    columns = {"": terms_BE, "_token": tokens_BE, "_student": events[0], "_teacher": events[1]}
    chosen = {name: values_BE.gather(-1, places_Bn).unbind(-1) for name, values_BE in columns.items()}
    # One more column, for targets without an event.
    of_target = {
        name: torch.nn.functional.pad(values_BV, (0, 1), value=math.nan)
        for name, values_BV in (("logprob", student_BV), ("teacher", teacher_BV))
    }
    return {name: values_BV.gather(-1, targets_B[:, None])[:, 0] for name, values_BV in of_target.items()} | {
        f"term_{number}{name}": values_B for name, values in chosen.items() for number, values_B in enumerate(values)
    }


def _gradient(student_BV: torch.Tensor, teacher_BV: torch.Tensor, settings: DivergenceSettings) -> torch.Tensor:
    """Compute the divergence gradient with respect to the student logits."""
    tokens_Bk = _top_tokens(teacher_BV, settings.teacher_top_k)
    if tokens_Bk is None:
        return divergence_gradient(student_BV, teacher_BV, settings.beta)
    events = as_events(student_BV, tokens_Bk)
    gradient = divergence_gradient(events, as_events(teacher_BV, tokens_Bk), settings.beta)
    return gradient_of_tokens(gradient, events, student_BV, tokens_Bk)


def _top_tokens(teacher_BV: torch.Tensor, top_k: int | None) -> torch.Tensor | None:
    """Return the teacher's top tokens, or None if all tokens are separate events."""
    if top_k is None or top_k >= teacher_BV.shape[-1]:
        return None
    return teacher_BV.topk(top_k, -1).indices


def _measures(student_BV: torch.Tensor, teacher_BV: torch.Tensor) -> torch.Tensor:
    """Compute the MEASURES, float [4, B]; `teacher_agreement` is 1 if both have the same argmax token."""
    agreement_B = (student_BV.argmax(-1) == teacher_BV.argmax(-1)).to(student_BV.dtype)
    forward_B, reverse_B = kl_divergence(teacher_BV, student_BV), kl_divergence(student_BV, teacher_BV)
    return torch.stack([forward_B, reverse_B, entropy(teacher_BV), agreement_B])
