"""Divergences over events that two vocabularies share, against dense values by hand."""

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from rlhf_cli.algorithms.divergence import divergence, gradient_of_pooled, pooled
from rlhf_cli.data.packing.packs import TokenSequence
from rlhf_cli.data.packing.readings import taught_pack
from rlhf_cli.models.distillation import (
    DIVERGENCE,
    DivergenceSettings,
    TokenEvents,
    divergence_details,
    token_divergences,
)
from rlhf_cli.models.logit_chunks import HeadWeights
from rlhf_cli.models.student import ALIGNED, HiddenStateModel, StudentModel, TeacherStates

# The student's tokens a, b, ab, pad and the teacher's b, a, eos, ba, with the events a and b.
EVENTS = TokenEvents(torch.tensor([0, 1, 0, 2]), torch.tensor([1, 0, 2, 1]), torch.tensor([0, 1]))


def test_logits_of_events_by_hand():
    logits = torch.tensor([[0.2, 0.3, 0.1, 0.4]], dtype=torch.float64).log()
    found = pooled(logits, EVENTS.student_V, 2)
    assert found.exp().tolist() == [pytest.approx([0.2 + 0.1, 0.3])]
    gradient = gradient_of_pooled(torch.tensor([[3.0, 5.0]], dtype=torch.float64), found, logits, EVENTS.student_V)
    assert gradient.tolist() == [pytest.approx([2.0, 5.0, 1.0, 0.0])]


def test_the_forward_divergence_by_hand():
    """The student has 0.5 and 0.5 for a and b, the teacher 0.25 and 0.75 (0.5 of b and 0.25 of ba)."""
    student, teacher = torch.tensor([[0.2, 0.3, 0.1, 0.4]]), torch.tensor([[0.4, 0.2, 0.2, 0.2]])
    heads = HeadWeights(torch.eye(4)), HeadWeights(torch.eye(4))
    found = token_divergences(student.log(), heads[0], teacher.log(), heads[1], DivergenceSettings(), EVENTS)
    expected = 0.25 * math.log(0.25 / 0.5) + 0.75 * math.log(0.75 / 0.5)
    assert found[DIVERGENCE].tolist() == pytest.approx([expected])
    assert found["forward_kl"].tolist() == pytest.approx([expected])
    details = divergence_details(
        student.log(), heads[0], teacher.log(), heads[1], DivergenceSettings(), torch.tensor([2]), EVENTS
    )
    assert details["logprob"].item() == pytest.approx(math.log(0.5))
    assert details["teacher"].item() == pytest.approx(math.log(0.25))
    assert details["term_0_token"].item() == 1
    unknown = divergence_details(
        student.log(), heads[0], teacher.log(), heads[1], DivergenceSettings(), torch.tensor([9]), EVENTS
    )
    assert unknown["logprob"].isnan().all()
    assert details["term_0"].item() == pytest.approx(0.75 * math.log(1.5))


def operands(of_student: int, of_teacher: int) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(3)
    shapes = ((5, 3), (of_student, 3), (5, 4), (of_teacher, 4))
    return tuple(torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes)


@pytest.mark.parametrize("beta", [0.0, 0.4, 1.0])
@pytest.mark.parametrize("top_k", [None, 2])
def test_values_and_gradients_are_those_of_dense_events(beta, top_k):
    student_V, teacher_U = torch.tensor([0, 1, 2, 1, 4, 0, 3]), torch.tensor([3, 0, 2, 1, 4, 2, 1, 4])
    events = TokenEvents(student_V, teacher_U, torch.tensor([0, 1, 2, 6]))
    hidden, weight, states, head = operands(9, 8)  # two rows of the student's head are padding
    hidden.requires_grad_()
    weight.requires_grad_()
    settings = DivergenceSettings(beta, 0.7, top_k)
    found = token_divergences(hidden, HeadWeights(weight), states, HeadWeights(head), settings, events, chunk_size=2)[
        DIVERGENCE
    ]
    gradients = torch.autograd.grad(found.sum(), [hidden, weight])

    def of_events(logits: torch.Tensor, of_tokens: torch.Tensor) -> torch.Tensor:
        probs = (logits / 0.7).softmax(-1)
        sums = torch.stack([probs[:, : len(of_tokens)][:, of_tokens == event].sum(-1) for event in range(4)], -1)
        return (sums / sums.sum(-1, keepdim=True)).log()

    student, teacher = of_events(hidden @ weight.T, student_V), of_events(states @ head.T, teacher_U)
    if top_k is not None:
        tokens = teacher.topk(top_k, -1).indices
        rest = torch.ones_like(teacher, dtype=torch.bool).scatter(-1, tokens, False)
        student, teacher = (
            torch.cat([one.gather(-1, tokens), (one.exp() * rest).sum(-1, keepdim=True).log()], -1)
            for one in (student, teacher)
        )
    dense = divergence(student, teacher, beta)
    torch.testing.assert_close(found, dense)
    torch.testing.assert_close(gradients, torch.autograd.grad(dense.sum(), [hidden, weight]))


@pytest.mark.parametrize("beta", [0.0, 0.4, 1.0])
def test_equal_vocabularies_give_the_values_and_gradients_without_events(beta):
    hidden, weight, states, head = operands(9, 9)
    numbers = torch.arange(9)
    results = []
    for events in (None, TokenEvents(numbers, numbers, numbers)):
        own, of_head = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
        found = token_divergences(
            own, HeadWeights(of_head), states, HeadWeights(head), DivergenceSettings(beta, 0.9, 4), events
        )
        results.append([*found.values(), *torch.autograd.grad(found[DIVERGENCE].sum(), [own, of_head])])
    torch.testing.assert_close(*results, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("beta", [0.0, 0.4, 1.0])
def test_spans_of_several_tokens_add_the_divergence_of_their_text(tiny_model_dir, tiny_llama_dir, beta):
    """Two targets of the student and three of the teacher have the same text; all further ones are single."""
    student = StudentModel(AutoModelForCausalLM.from_pretrained(tiny_model_dir, dtype=torch.float32))
    teacher = HiddenStateModel(AutoModelForCausalLM.from_pretrained(tiny_llama_dir, dtype=torch.float32))
    own = TokenSequence(np.array([5, 6, 7, 8, 9], np.int32), np.array([False, False, True, True, True]))
    other = TokenSequence(np.array([4, 7, 7, 8, 9], np.int32), np.array([False, True, True, True, True]))
    rows = np.array([[0, 0, 2, 3], [2, 3, 1, 1]])
    batch = taught_pack([replace(own, teacher_reads=other, teacher_rows=rows)], 1)
    (reading,) = batch.readings
    assert reading.spans is not None
    numbers = torch.arange(300)
    events = TokenEvents(numbers, numbers, numbers)
    with torch.no_grad():
        states = teacher(reading.pack)

    def found_with(spans: torch.Tensor) -> dict[str, torch.Tensor]:
        of_teacher = TeacherStates(states, teacher.head.weights(), spans[:, 0], events, spans, reading.pack.targets_K)
        return student(batch.pack, [of_teacher], settings=DivergenceSettings(beta, 0.7))

    single = reading.spans.clone()
    single[:, 2:] = 1
    found, without = found_with(reading.spans), found_with(single)

    def logprob(model: Any, ids: np.ndarray, first: int, stop: int) -> torch.Tensor:
        tokens = torch.from_numpy(ids).long()
        logprobs = (model(tokens[None]).logits[0] / 0.7).log_softmax(-1)
        return logprobs[torch.arange(first, stop) - 1, tokens[first:stop]].sum()

    of_student, of_teacher = logprob(student.model, own.token_ids, 2, 4), logprob(teacher.model, other.token_ids, 1, 4)
    events_of = [torch.stack([one, (1 - one.exp()).log()])[None] for one in (of_student, of_teacher.detach())]
    expected = divergence(events_of[0], events_of[1], beta)
    added = found[DIVERGENCE] - without[DIVERGENCE]
    assert added.tolist() == pytest.approx([expected.item(), 0.0, 0.0], rel=1e-4, abs=1e-6)
    assert found[ALIGNED].tolist() == [1.0, 0.0, 1.0]
    weight = student.model.get_input_embeddings().weight
    gradients = [torch.autograd.grad(one.sum(), weight)[0] for one in (added, expected)]
    torch.testing.assert_close(gradients[0], gradients[1], rtol=1e-3, atol=1e-6)
