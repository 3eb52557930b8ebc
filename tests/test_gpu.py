"""What a CPU cannot show: kernels of a GPU, memory that sleep frees. Run with `pytest -m gpu` on an NVIDIA GPU."""

import pytest
import torch
from test_adapters import load
from tiny_training import OPTIM, Items, Layout, make_sequences, train, weights_of

from rlhf_cli.backends import distributed
from rlhf_cli.backends.deepspeed_engine import DeepSpeedEngine, FrozenEngine
from rlhf_cli.config.train import DeepSpeedConfig
from rlhf_cli.models.logprobs import token_logprobs
from rlhf_cli.models.policy import PolicyModel
from rlhf_cli.models.varlen import varlen_attention_forward
from rlhf_cli.models.varlen_cpu import varlen_attention

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
    pytest.mark.usefixtures("group_of_one"),
]


def close(found: torch.Tensor, exact: torch.Tensor, *, share: float) -> bool:
    """Whether the distance is at most that share of the exact result's norm."""
    return bool((found.cpu().double() - exact).norm() <= share * exact.norm())


@pytest.mark.parametrize("size", [64, 128, 256])
@pytest.mark.parametrize("window", [0, 100])
@pytest.mark.parametrize("shares", [False, True])
def test_varlen_agrees_with_float64_forward_and_backward(size, window, shares):
    """Eight query heads on two key heads; with `shares` two branches see the keys of one beginning."""
    if shares:
        key_index = torch.tensor([*range(200), *range(50), *range(200, 300)], dtype=torch.int64)
        cu_q, cu_k = (torch.tensor(bounds, dtype=torch.int32) for bounds in ([0, 200, 300], [0, 200, 350]))
    else:
        key_index, cu_q = None, torch.tensor([0, 7, 207, 300], dtype=torch.int32)
        cu_k = cu_q
    torch.manual_seed(0)
    tensors = [torch.randn(300, heads, size).bfloat16() for heads in (8, 2, 2)]
    weights = torch.randn(300, 8, size).bfloat16()
    exact = [tensor.double().requires_grad_() for tensor in tensors]
    keys = exact[1:] if key_index is None else [tensor.index_select(0, key_index) for tensor in exact[1:]]
    expected = varlen_attention(exact[0], *keys, cu_q, cu_k, size**-0.5, window)
    expected_grads = torch.autograd.grad(expected, exact, weights.double())

    device = distributed.device()
    given = [tensor.to(device).requires_grad_() for tensor in tensors]
    query, key, value = (tensor.transpose(0, 1)[None] for tensor in given)
    found, _ = varlen_attention_forward(
        torch.nn.Module(),
        query,
        key,
        value,
        None,
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


def test_log_probs_of_a_large_vocabulary_agree_with_float64():
    torch.manual_seed(0)
    hidden, weight = torch.randn(500, 64).bfloat16(), torch.randn(50_000, 64).bfloat16() / 8
    targets = torch.randint(50_000, (500,))
    exact, _ = token_logprobs(hidden.double(), weight.double(), targets)
    found, _ = token_logprobs(hidden.cuda(), weight.cuda(), targets.cuda())
    assert (found.cpu() - exact).abs().max() < 0.05


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("lora_rank", [0, 2])
def test_sleep_frees_memory_and_leaves_no_trace(tiny_model_dir, stage, lora_rank):
    weights, memory = [], []
    for sleeps in (False, True):
        module = PolicyModel(load(tiny_model_dir, stage, lora_rank=lora_rank, dtype="bf16"))
        engine = DeepSpeedEngine(
            module,
            DeepSpeedConfig(zero_stage=stage),
            optim=OPTIM,
            learning_rate=1e-3,
            total_steps=3,
            param_dtype="bf16",
            sleeps=True,
        )
        for _ in range(3):
            train(engine, Items(make_sequences(4)), [[0, 1, 2, 3]], Layout())
            if sleeps:
                awake = torch.cuda.memory_allocated()
                engine.sleep()
                memory.append((awake, torch.cuda.memory_allocated()))
                engine.wake()
        weights.append(weights_of(engine, module))
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])
    if lora_rank or stage >= 2:
        assert all(asleep < awake for awake, asleep in memory)


def test_a_frozen_model_leaves_the_gpu_and_comes_back(tiny_model_dir):
    module = PolicyModel(load(tiny_model_dir, lora_rank=0, dtype="bf16"))
    engine = FrozenEngine(module, DeepSpeedConfig(zero_stage=0), param_dtype="bf16")
    before = {name: weight.cpu() for name, weight in module.named_parameters()}
    for _ in range(2):
        engine.sleep()
        assert all(weight.device.type == "cpu" and weight.is_pinned() for weight in module.parameters())
        engine.wake()
    assert all(torch.equal(weight.cpu(), before[name]) for name, weight in module.named_parameters())
