"""Chunked token log-probs, compared with the dense computation."""

import pytest
import torch
import torch.nn.functional as F

from rlhf_cli.models.logit_chunks import LogitTransform
from rlhf_cli.models.logprobs import token_logprobs

K, D, V = 23, 8, 37


def problem(dtype=torch.float32, *, with_bias=True):
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(K, D, generator=generator).to(dtype).requires_grad_()
    weight = torch.randn(V, D, generator=generator).to(dtype).requires_grad_()
    bias = torch.randn(V, generator=generator).to(dtype).requires_grad_() if with_bias else None
    targets = torch.randint(0, V, (K,), generator=generator)
    return hidden, weight, bias, targets


def dense(hidden, weight, bias, targets, *, temperature=1.0, transform=None):
    """Compute log-probs from all logits at once."""
    transform = transform or LogitTransform()
    logits = F.linear(hidden, weight, bias) * transform.scale
    if transform.softcap is not None:
        logits = transform.softcap * torch.tanh(logits / transform.softcap)
    log_p = torch.log_softmax(logits / temperature, -1)
    return log_p.gather(-1, targets[:, None]).squeeze(-1), -(log_p.exp() * log_p).sum(-1)


def objective(logprobs, entropy):
    """Weight each token differently, as in reinforcement learning."""
    weights = torch.linspace(-1.5, 2.0, K, dtype=logprobs.dtype)
    return (weights * logprobs).sum() + (weights.flip(0) * entropy).square().sum()


@pytest.mark.parametrize("chunk_size", [1, 7, 23, 1000])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("transform", [None, LogitTransform(scale=0.25), LogitTransform(scale=1.5, softcap=2.0)])
def test_values_and_gradients_equal_the_dense_computation(chunk_size, temperature, transform):
    hidden, weight, bias, targets = problem()
    expected = dense(hidden, weight, bias, targets, temperature=temperature, transform=transform)
    expected_grads = torch.autograd.grad(objective(*expected), (hidden, weight, bias))
    found = token_logprobs(
        hidden,
        weight,
        targets,
        bias_V=bias,
        temperature=temperature,
        second="entropy",
        transform=transform,
        chunk_size=chunk_size,
    )
    grads = torch.autograd.grad(objective(*found), (hidden, weight, bias))
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(grads, expected_grads, atol=1e-5, rtol=1e-5)


def test_gradients_without_entropy_equal_the_dense_computation():
    hidden, weight, _, targets = problem(with_bias=False)
    weights = torch.linspace(-1.0, 1.0, K)
    expected = torch.autograd.grad((dense(hidden, weight, None, targets)[0] * weights).sum(), (hidden, weight))
    logprobs, entropy = token_logprobs(hidden, weight, targets, chunk_size=5)
    assert entropy is None
    found = torch.autograd.grad((logprobs * weights).sum(), (hidden, weight))
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("softcap", [None, 3.0])
def test_gradients_pass_gradcheck_in_float64(softcap):
    hidden, weight, bias, targets = problem(torch.float64)

    def function(hidden, weight, bias):
        return token_logprobs(
            hidden,
            weight,
            targets,
            bias_V=bias,
            temperature=0.8,
            second="entropy",
            transform=LogitTransform(scale=0.7, softcap=softcap),
            chunk_size=6,
        )

    assert torch.autograd.gradcheck(function, (hidden, weight, bias), fast_mode=True)


def test_blocks_within_a_chunk_do_not_change_the_result():
    # One row of this vocabulary exceeds half of a block's limit, so every row is a block.
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(5, 4, generator=generator).requires_grad_()
    weight = torch.randn(150_000, 4, generator=generator).requires_grad_()
    targets = torch.tensor([0, 149_999, 17, 17, 80_000])
    expected = dense(hidden, weight, None, targets)
    found = token_logprobs(hidden, weight, targets, second="entropy", chunk_size=3)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    expected_grad = torch.autograd.grad(expected[0].sum(), (hidden, weight))
    torch.testing.assert_close(
        torch.autograd.grad(found[0].sum(), (hidden, weight)), expected_grad, atol=1e-5, rtol=1e-5
    )


def test_certain_token_has_log_probability_zero_and_uniform_entropy_is_log_v():
    hidden = torch.tensor([[100.0], [0.0]])
    weight = torch.tensor([[1.0], [0.0], [-1.0], [-2.0]])
    logprobs, entropy = token_logprobs(hidden, weight, torch.tensor([0, 3]), second="entropy")
    torch.testing.assert_close(logprobs, torch.tensor([0.0, -1.3862943611]))
    torch.testing.assert_close(entropy, torch.tensor([0.0, 1.3862943611]), atol=1e-6, rtol=0)


def test_the_sum_of_squared_probabilities_in_any_chunks():
    hidden, weight, bias, targets = problem(torch.float64)
    p = F.linear(hidden, weight, bias).softmax(-1)
    for chunk_size in (3, K):
        found = token_logprobs(hidden, weight, targets, bias_V=bias, second="log_squares", chunk_size=chunk_size)
        torch.testing.assert_close(found[1], p.square().sum(-1).log().detach())
        plain = token_logprobs(hidden, weight, targets, bias_V=bias, chunk_size=chunk_size)
        assert found[0].equal(plain[0])
        (one,), (other,) = (torch.autograd.grad(values[0].sum(), hidden) for values in (found, plain))
        assert one.equal(other)


def test_bfloat16_is_as_close_as_its_logits_and_its_softmax_is_float32():
    hidden, weight, bias, targets = problem(torch.bfloat16)
    logprobs, entropy = token_logprobs(hidden, weight, targets, bias_V=bias, second="entropy", chunk_size=4)
    assert entropy is not None
    assert logprobs.dtype == entropy.dtype == torch.float32
    # The same bfloat16 logits, then everything in float64.
    log_p = torch.log_softmax(F.linear(hidden, weight, bias).double(), -1)
    torch.testing.assert_close(logprobs.double(), log_p[torch.arange(K), targets], atol=1e-5, rtol=1e-5)
    grads = torch.autograd.grad(objective(logprobs, entropy), (hidden, weight, bias))
    wide = [tensor.detach().double().requires_grad_() for tensor in (hidden, weight, bias)]
    expected = torch.autograd.grad(objective(*dense(wide[0], wide[1], wide[2], targets)), wide)
    for found, exact in zip(grads, expected, strict=True):
        assert found.dtype == torch.bfloat16
        assert (found.double() - exact).norm() < 0.01 * exact.norm()


def test_gradients_of_many_bfloat16_chunks_add_up_without_loss():
    hidden, weight, _, targets = problem(torch.bfloat16, with_bias=False)
    grads = []
    for chunk_size in (1, K):
        logprobs, _ = token_logprobs(hidden, weight, targets, chunk_size=chunk_size)
        grads.append(torch.autograd.grad(logprobs.sum(), weight)[0].double())
    assert (grads[0] - grads[1]).norm() < 0.004 * grads[1].norm()


def test_no_token_gives_empty_results_and_zero_gradients():
    hidden, weight, bias, targets = problem()
    logprobs, entropy = token_logprobs(hidden[:0], weight, targets[:0], bias_V=bias, second="entropy")
    assert entropy is not None
    assert logprobs.shape == entropy.shape == (0,)
    (logprobs.sum() + entropy.sum()).backward()
    assert all(not tensor.grad.any() for tensor in (hidden, weight, bias))


def test_frozen_weight_gets_no_gradient():
    hidden, weight, _, targets = problem()
    logprobs, _ = token_logprobs(hidden, weight.detach(), targets)
    logprobs.sum().backward()
    assert hidden.grad is not None
    assert weight.grad is None


def test_temperature_of_zero_is_refused():
    hidden, weight, _, targets = problem()
    with pytest.raises(ValueError, match="temperature 0"):
        token_logprobs(hidden, weight, targets, temperature=0.0)


def test_an_entropy_without_weight_changes_no_gradient():
    torch.manual_seed(0)
    hidden, weight = torch.randn(7, 5, requires_grad=True), torch.randn(11, 5, requires_grad=True)
    targets = torch.arange(7)
    plain = torch.autograd.grad(token_logprobs(hidden, weight, targets)[0].sum(), (hidden, weight))
    logprobs, entropies = token_logprobs(hidden, weight, targets, second="entropy")
    assert entropies is not None
    for found, expected in zip(torch.autograd.grad(logprobs.sum(), (hidden, weight)), plain, strict=True):
        assert torch.equal(found, expected)
    logprobs, entropies = token_logprobs(hidden, weight, targets, second="entropy")
    assert entropies is not None
    assert all(grad.abs().sum() > 0 for grad in torch.autograd.grad(entropies.sum(), (hidden, weight)))
