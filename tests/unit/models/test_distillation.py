"""Chunked student-teacher divergences, compared with the dense computation."""

import itertools

import pytest
import torch
import torch.nn.functional as F
from torch.nn.functional import kl_div

from rlhf_cli.algorithms.divergence import divergence, divergence_terms
from rlhf_cli.models.distillation import TERMS, DivergenceSettings, divergence_details, token_divergences
from rlhf_cli.models.logit_chunks import HeadWeights, LogitTransform

K, D, E, V = 23, 16, 24, 101
CLOSE = {"atol": 2e-6, "rtol": 2e-6}
BETAS = [0.0, 0.1, 0.5, 1.0]


def problem(dtype=torch.float32, *, student_rows=V, teacher_rows=V, with_bias=False):
    """Return hidden states and head of the student, which require gradients, and of the wider teacher."""
    generator = torch.Generator().manual_seed(0)

    def random(*shape):
        return (torch.randn(*shape, generator=generator, dtype=torch.float64) / 2).to(dtype)

    hidden, weight = random(K, D).requires_grad_(), random(student_rows, D).requires_grad_()
    bias = random(student_rows).requires_grad_() if with_bias else None
    return hidden, HeadWeights(weight, bias), random(K, E), HeadWeights(random(teacher_rows, E))


def gradients(loss, hidden, head):
    inputs = [hidden, head.weight_VD, *([] if head.bias_V is None else [head.bias_V])]
    return torch.autograd.grad(loss, inputs)


def weighed(divergence):
    """Weight each token differently; the mean over tokens has the scale of training."""
    return (divergence * torch.linspace(-1.5, 2.0, len(divergence), dtype=divergence.dtype)).mean()


def dense_logprobs(hidden, head, temperature, rows):
    logits = F.linear(hidden, head.weight_VD, head.bias_V) * head.transform.scale
    if (cap := head.transform.softcap) is not None:
        logits = cap * torch.tanh(logits / cap)
    return torch.log_softmax(logits[:, :rows] / temperature, -1)


def jensen_shannon(student, teacher, beta):
    """Compute TRL 1.16's GKDTrainer.generalized_jsd_loss per token, as documented."""
    if beta == 0:
        return kl_div(student, teacher, reduction="none", log_target=True).sum(-1)
    if beta == 1:
        return kl_div(teacher, student, reduction="none", log_target=True).sum(-1)
    mixture = torch.log((1 - beta) * student.exp() + beta * teacher.exp())
    of_teacher = kl_div(mixture, teacher, reduction="none", log_target=True).sum(-1)
    of_student = kl_div(mixture, student, reduction="none", log_target=True).sum(-1)
    return beta * of_teacher + (1 - beta) * of_student


def top_events(student, teacher, top_k):
    """Compute the terms of the teacher's top tokens and of the sum of all others, in a loop over rows."""
    rows: list[list[torch.Tensor]] = [[], []]
    for own, other in zip(student.exp(), teacher.exp(), strict=True):
        top = set(other.topk(top_k).indices.tolist())
        rest = [token for token in range(len(own)) if token not in top]
        for events, probs in zip(rows, (own, other), strict=True):
            events.append(torch.cat([probs[sorted(top)], probs[rest].sum()[None]]).log())
    return torch.stack(rows[0]), torch.stack(rows[1])


def dense(hidden, student, teacher_hidden, teacher, settings):
    rows = min(len(student.weight_VD), len(teacher.weight_VD))
    own = dense_logprobs(hidden, student, settings.temperature, rows)
    other = dense_logprobs(teacher_hidden, teacher, settings.temperature, rows)
    if settings.teacher_top_k is not None:
        own, other = top_events(own, other, settings.teacher_top_k)
    return jensen_shannon(own, other, settings.beta)


@pytest.mark.parametrize("chunk_size", [1, 7, 23, 1000])
@pytest.mark.parametrize("temperature", [1.0, 0.9])
@pytest.mark.parametrize("beta", BETAS)
def test_value_and_gradient_equal_the_dense_formula_of_gkd(beta, temperature, chunk_size):
    hidden, student, teacher_hidden, teacher = problem(with_bias=True)
    settings = DivergenceSettings(beta, temperature)
    expected = dense(hidden, student, teacher_hidden, teacher, settings)
    found = token_divergences(hidden, student, teacher_hidden, teacher, settings, chunk_size=chunk_size)["divergence"]
    torch.testing.assert_close(found, expected, **CLOSE)
    torch.testing.assert_close(
        gradients(weighed(found), hidden, student), gradients(weighed(expected), hidden, student), **CLOSE
    )


@pytest.mark.parametrize("top_k", [1, 5, 100])
@pytest.mark.parametrize("beta", BETAS)
def test_all_but_the_teachers_likeliest_tokens_count_as_one_event(beta, top_k):
    hidden, student, teacher_hidden, teacher = problem()
    settings = DivergenceSettings(beta, 0.8, top_k)
    expected = dense(hidden, student, teacher_hidden, teacher, settings)
    found = token_divergences(hidden, student, teacher_hidden, teacher, settings, chunk_size=7)["divergence"]
    torch.testing.assert_close(found, expected, **CLOSE)
    torch.testing.assert_close(
        gradients(weighed(found), hidden, student), gradients(weighed(expected), hidden, student), **CLOSE
    )


def test_as_many_likeliest_tokens_as_there_are_is_the_whole_distribution():
    hidden, student, teacher_hidden, teacher = problem()
    for beta in BETAS:
        whole, top = (
            token_divergences(hidden, student, teacher_hidden, teacher, DivergenceSettings(beta, 1.0, top_k))
            for top_k in (None, V)
        )
        torch.testing.assert_close(top, whole, rtol=0, atol=0)


@pytest.mark.parametrize(("student_rows", "teacher_rows"), [(V, V + 27), (V + 27, V)])
@pytest.mark.parametrize("beta", BETAS)
def test_rows_that_one_head_has_more_are_in_neither_distribution(beta, student_rows, teacher_rows):
    hidden, student, teacher_hidden, teacher = problem(student_rows=student_rows, teacher_rows=teacher_rows)
    settings = DivergenceSettings(beta)
    expected = dense(hidden, student, teacher_hidden, teacher, settings)
    found = token_divergences(hidden, student, teacher_hidden, teacher, settings, chunk_size=9)["divergence"]
    torch.testing.assert_close(found, expected, **CLOSE)
    of_hidden, of_weight = gradients(weighed(found), hidden, student)
    torch.testing.assert_close((of_hidden, of_weight), gradients(weighed(expected), hidden, student), **CLOSE)
    assert not of_weight[V:].any()


@pytest.mark.parametrize("beta", BETAS)
def test_each_models_own_transform_of_logits_is_applied(beta):
    hidden, student, teacher_hidden, teacher = problem()
    student = HeadWeights(student.weight_VD, None, LogitTransform(scale=1.5, softcap=2.0))
    teacher = HeadWeights(teacher.weight_VD, None, LogitTransform(scale=0.25))
    settings = DivergenceSettings(beta, 0.7)
    expected = dense(hidden, student, teacher_hidden, teacher, settings)
    found = token_divergences(hidden, student, teacher_hidden, teacher, settings)["divergence"]
    torch.testing.assert_close(found, expected, **CLOSE)
    torch.testing.assert_close(
        gradients(weighed(found), hidden, student), gradients(weighed(expected), hidden, student), **CLOSE
    )


@pytest.mark.parametrize(("beta", "top_k"), itertools.product([0.0, 0.3, 1.0], [None, 4]))
def test_gradients_pass_gradcheck_in_float64(beta, top_k):
    hidden, student, teacher_hidden, teacher = problem(torch.float64, with_bias=True)
    settings = DivergenceSettings(beta, 0.8, top_k)

    def function(hidden, weight, bias):
        head = HeadWeights(weight, bias, LogitTransform(0.7, 3.0))
        return token_divergences(hidden, head, teacher_hidden, teacher, settings, chunk_size=6)["divergence"]

    assert torch.autograd.gradcheck(function, (hidden[:5], student.weight_VD, student.bias_V), fast_mode=True)


def test_measures_are_of_the_whole_distributions_at_the_temperature():
    hidden, student, teacher_hidden, teacher = problem()
    own, other = dense_logprobs(hidden, student, 0.9, V), dense_logprobs(teacher_hidden, teacher, 0.9, V)
    found = token_divergences(hidden, student, teacher_hidden, teacher, DivergenceSettings(0.5, 0.9, 3), chunk_size=5)
    torch.testing.assert_close(found["forward_kl"], jensen_shannon(own, other, 0), **CLOSE)
    torch.testing.assert_close(found["reverse_kl"], jensen_shannon(own, other, 1), **CLOSE)
    torch.testing.assert_close(found["teacher_entropy"], torch.distributions.Categorical(logits=other).entropy())
    assert found["teacher_agreement"].tolist() == (own.argmax(-1) == other.argmax(-1)).float().tolist()
    assert not any(values.requires_grad for name, values in found.items() if name != "divergence")


def test_a_student_that_is_its_teacher_has_no_divergence_and_no_gradient():
    hidden, student, _, _ = problem()
    teacher = HeadWeights(student.weight_VD.detach())
    for beta, top_k in itertools.product(BETAS, (None, 4)):
        settings = DivergenceSettings(beta, 1.0, top_k)
        found = token_divergences(hidden, student, hidden.detach(), teacher, settings)["divergence"]
        torch.testing.assert_close(found, torch.zeros(K), atol=5e-7, rtol=0)
        of_hidden, of_weight = gradients(found.mean(), hidden, student)
        assert max(of_hidden.abs().max(), of_weight.abs().max()) < 1e-7


def test_divergences_of_two_tokens_by_hand():
    # Student (3/4, 1/4), teacher (1/4, 3/4), mixture (1/2, 1/2).
    logits = torch.tensor([[3.0, 1.0]]).log()
    student, teacher = HeadWeights(logits.T), HeadWeights(logits.flip(1).T)
    one = torch.ones(1, 1)
    expected = {0.0: 0.5 * torch.log(torch.tensor(3.0)), 0.5: torch.tensor(0.130812)}
    for beta in BETAS:
        found = token_divergences(one, student, one, teacher, DivergenceSettings(beta))["divergence"]
        if beta in (0.0, 1.0):  # symmetric in these cases
            torch.testing.assert_close(found[0], expected[0.0])
        elif beta == 0.5:
            torch.testing.assert_close(found[0], expected[0.5], atol=1e-6, rtol=0)
        else:
            assert 0 < found[0] < expected[0.5]


def test_far_distributions_stay_finite():
    hidden = torch.full((2, 1), 1.0, requires_grad=True)
    student, teacher = (
        HeadWeights(torch.tensor([[400.0], [0.0], [-400.0]])),
        HeadWeights(torch.tensor([[-400.0], [0.0], [400.0]])),
    )
    for beta, top_k in itertools.product(BETAS, (None, 1)):
        settings = DivergenceSettings(beta, 1.0, top_k)
        found = token_divergences(hidden, student, torch.ones(2, 1), teacher, settings)["divergence"]
        (gradient,) = torch.autograd.grad(found.sum(), hidden)
        assert torch.isfinite(found).all()
        assert torch.isfinite(gradient).all()


def test_bfloat16_is_as_close_as_its_logits_and_its_softmax_is_float32():
    hidden, student, teacher_hidden, teacher = problem(torch.bfloat16)
    settings = DivergenceSettings(0.5)
    found = token_divergences(hidden, student, teacher_hidden, teacher, settings, chunk_size=4)["divergence"]
    assert found.dtype == torch.float32
    own, other = (
        F.linear(h, head.weight_VD).double().log_softmax(-1)
        for h, head in ((hidden, student), (teacher_hidden, teacher))
    )
    torch.testing.assert_close(found.double(), jensen_shannon(own, other, 0.5), atol=1e-5, rtol=1e-5)
    wide = HeadWeights(student.weight_VD.detach().double().requires_grad_())
    wide_hidden = hidden.detach().double().requires_grad_()
    exact = dense(wide_hidden, wide, teacher_hidden.double(), HeadWeights(teacher.weight_VD.double()), settings)
    pairs = zip(gradients(weighed(found), hidden, student), gradients(weighed(exact), wide_hidden, wide), strict=True)
    for gradient, expected in pairs:
        assert gradient.dtype == torch.bfloat16
        assert (gradient.double() - expected).norm() < 0.02 * expected.norm()


def test_no_token_gives_empty_results_and_zero_gradients():
    hidden, student, teacher_hidden, teacher = problem()
    found = token_divergences(hidden[:0], student, teacher_hidden[:0], teacher, DivergenceSettings())
    assert {values.shape for values in found.values()} == {(0,)}
    found["divergence"].sum().backward()
    assert not hidden.grad.any()
    assert not student.weight_VD.grad.any()


def test_no_tensor_of_tokens_by_vocabulary_is_made_in_float32():
    # 64 tokens in chunks of 8: the largest new tensors are a chunk's logits and the weight gradient.
    generator = torch.Generator().manual_seed(0)
    tokens, vocabulary = 64, 20_000
    hidden = torch.randn(tokens, 4, generator=generator).requires_grad_()
    weight = torch.randn(vocabulary, 4, generator=generator).requires_grad_()
    teacher = HeadWeights(torch.randn(vocabulary, 4, generator=generator))
    sizes: list[int] = []

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            result = function(*args, **(kwargs or {}))
            sizes.extend(
                t.numel() for t in (result if isinstance(result, tuple) else (result,)) if isinstance(t, torch.Tensor)
            )
            return result

    with Watch():
        found = token_divergences(
            hidden, HeadWeights(weight), hidden.detach(), teacher, DivergenceSettings(0.5, 1.0, 5), chunk_size=8
        )
        found["divergence"].sum().backward()
    assert max(sizes) == 8 * vocabulary


@pytest.mark.parametrize("beta", BETAS)
def test_the_terms_of_a_divergence_sum_to_it(beta):
    student, teacher = (torch.log_softmax(torch.randn(4, 9, dtype=torch.float64), -1) for _ in range(2))
    terms = divergence_terms(student, teacher, beta)
    torch.testing.assert_close(terms.sum(-1), divergence(student, teacher, beta))


@pytest.mark.parametrize("top_k", [None, 3])
def test_details_are_the_largest_terms_of_the_dense_computation(top_k):
    """With 3 top tokens, the fourth event is all remaining ones, and there is no fifth term."""
    hidden, head, states, teacher = problem(torch.float64)
    settings, targets = DivergenceSettings(0.0, 0.9, top_k), torch.arange(K)
    found = divergence_details(hidden, head, states, teacher, settings, targets)
    student, of_teacher = (dense_logprobs(x, h, 0.9, V) for x, h in ((hidden, head), (states, teacher)))
    assert found["logprob"].tolist() == pytest.approx(student[torch.arange(K), targets].tolist())
    assert found["teacher"].tolist() == pytest.approx(of_teacher[torch.arange(K), targets].tolist())
    total = sum(found[f"term_{number}"] for number in range(TERMS if top_k is None else top_k + 1))
    if top_k is None:
        expected = (of_teacher.exp() * (of_teacher - student)).detach()
        values, tokens = expected.abs().max(-1)
        assert found["term_0"].abs().tolist() == pytest.approx(values.tolist())
        assert found["term_0_token"].tolist() == tokens.tolist()
        assert found["term_0_student"].tolist() == pytest.approx(student[torch.arange(K), tokens].tolist())
    else:
        assert "term_4" not in found
        whole = token_divergences(hidden, head, states, teacher, settings)["divergence"]
        assert total.tolist() == pytest.approx(whole.tolist())
        assert all(
            sorted(row)[0] == -1 for row in torch.stack([found[f"term_{n}_token"] for n in range(4)], 1).tolist()
        )


def test_a_pack_without_targets_has_the_same_details():
    hidden, head, states, teacher = problem()
    given = DivergenceSettings(), torch.arange(0)
    assert {len(values) for values in divergence_details(hidden[:0], head, states[:0], teacher, *given).values()} == {0}
