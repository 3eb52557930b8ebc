"""GPU kernels compared with float64 on the CPU. Run with `pytest -m gpu`."""

import pytest
import torch
from repeated_tokens import repeated_tokens

from rlhf_cli.backends.training import distributed
from rlhf_cli.models.attention.varlen import LARGEST_HEAD, SelectTokens, varlen_attention_forward
from rlhf_cli.models.attention.varlen_cpu import BOTH_WAYS, varlen_attention
from rlhf_cli.models.logprobs import token_logprobs

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]


def close(found: torch.Tensor, exact: torch.Tensor, *, share: float) -> bool:
    """Check that the distance is at most this share of the norm of the exact result."""
    return bool((found.cpu().double() - exact).norm() <= share * exact.norm())


@pytest.mark.parametrize("size", [20, 64, 128, 256, 512])
@pytest.mark.parametrize("window", [0, 100])
@pytest.mark.parametrize("shares", [False, True])
@pytest.mark.parametrize("has_sinks", [False, True])
def test_varlen_agrees_with_float64_forward_and_backward(size, window, shares, has_sinks):
    """Eight query heads and two key heads; with `shares`, two branches use the keys of one prefix."""
    if size > LARGEST_HEAD and has_sinks:
        pytest.skip("no model has such heads and sinks")
    if shares:
        key_index = torch.tensor([*range(200), *range(50), *range(200, 300)], dtype=torch.int64)
        cu_q, cu_k = (torch.tensor(bounds, dtype=torch.int32) for bounds in ([0, 200, 300], [0, 200, 350]))
    else:
        key_index, cu_q = None, torch.tensor([0, 7, 207, 300], dtype=torch.int32)
        cu_k = cu_q
    torch.manual_seed(0)
    tensors = [torch.randn(300, heads, size).bfloat16() for heads in (8, 2, 2)]
    tensors += [torch.randn(8).bfloat16()] if has_sinks else []
    weights = torch.randn(300, 8, size).bfloat16()
    exact = [tensor.double().requires_grad_() for tensor in tensors]
    keys = exact[1:3] if key_index is None else [tensor.index_select(0, key_index) for tensor in exact[1:3]]
    expected = varlen_attention(exact[0], *keys, cu_q, cu_k, size**-0.5, window, *exact[3:])
    expected_grads = torch.autograd.grad(expected, exact, weights.double())

    device = distributed.device()
    given = [tensor.to(device).requires_grad_() for tensor in tensors]
    query, key, value = (tensor.transpose(0, 1)[None] for tensor in given[:3])
    found, _ = varlen_attention_forward(
        torch.nn.Module(),
        query,
        key,
        value,
        None,
        s_aux=given[3] if has_sinks else None,
        cu_seq_lens_q=cu_q.to(device),
        cu_seq_lens_k=cu_k.to(device),
        max_length_q=int(cu_q.diff().max()),
        max_length_k=int(cu_k.diff().max()),
        scaling=size**-0.5,
        sliding_window=window or None,
        **({} if key_index is None else {"key_index": key_index.to(device)}),
    )
    grads = torch.autograd.grad(found[0], given, weights.to(device))
    assert close(found[0], expected, share=0.01)
    assert all(close(one, other, share=0.015) for one, other in zip(grads, expected_grads, strict=True))


@pytest.mark.parametrize("size", [72, 80])  # head sizes of the Qwen3-VL and Qwen2.5-VL vision towers
def test_attention_of_towers_agrees_with_float64_forward_and_backward(size):
    """Windows of 64 patches and full attention over two image sizes."""
    torch.manual_seed(0)
    bounds = torch.tensor([0, 64, 128, 130, 500], dtype=torch.int32)
    tensors = [torch.randn(500, 4, size).bfloat16() for _ in range(3)]
    weights = torch.randn(500, 4, size).bfloat16()
    exact = [tensor.double().requires_grad_() for tensor in tensors]
    expected = varlen_attention(*exact, bounds, bounds, size**-0.5, BOTH_WAYS)
    expected_grads = torch.autograd.grad(expected, exact, weights.double())
    given = [tensor.cuda().requires_grad_() for tensor in tensors]
    query, key, value = (tensor.transpose(0, 1)[None] for tensor in given)
    found, _ = varlen_attention_forward(
        torch.nn.Module(),
        query,
        key,
        value,
        None,
        cu_seq_lens_q=bounds.cuda(),
        cu_seq_lens_k=bounds.cuda(),
        max_length_q=370,
        max_length_k=370,
        scaling=size**-0.5,
        is_causal=False,
    )
    grads = torch.autograd.grad(found[0], given, weights.cuda())
    assert close(found[0], expected, share=0.01)
    assert all(close(one, other, share=0.015) for one, other in zip(grads, expected_grads, strict=True))


def test_log_probs_of_a_large_vocabulary_agree_with_float64():
    torch.manual_seed(0)
    hidden, weight = torch.randn(500, 64).bfloat16(), torch.randn(50_000, 64).bfloat16() / 8
    targets = torch.randint(50_000, (500,))
    exact, _ = token_logprobs(hidden.double(), weight.double(), targets)
    found, _ = token_logprobs(hidden.cuda(), weight.cuda(), targets.cuda())
    assert (found.cpu() - exact).abs().max() < 0.05


def test_gradients_of_a_shared_token_are_summed_in_float32():
    """`index_select` on a CPU already sums in float32; bfloat16 sums would stop growing at these values."""
    keys, index, grads, exact = repeated_tokens()
    keys = keys.detach().cuda().requires_grad_()
    (found,) = torch.autograd.grad(SelectTokens.apply(keys, index.cuda()), keys, grads.cuda())
    assert ((found.cpu().double() - exact).abs() <= exact * 2**-8 * 1.01).all()
