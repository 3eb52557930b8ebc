"""Attention over packs: each available kernel agrees with separate sequences."""

import inspect
import os
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.nn.attention.varlen import varlen_attn
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

from rlhf_cli.data.packing.packs import TokenSequence, pack
from rlhf_cli.errors import UsageError
from rlhf_cli.models.attention.table import (
    BACKENDS,
    AttentionBackend,
    attention_needs,
    attention_note,
    resolve_attention,
)
from rlhf_cli.models.attention.varlen import (
    attend_cuda,
    compute_capability,
    varlen_attention_forward,
    wants_flash_attention_3,
)
from rlhf_cli.models.attention.varlen_cpu import BOTH_WAYS, varlen_attention
from rlhf_cli.models.compat import efficient_varlen
from rlhf_cli.models.policy import PolicyModel

SHAPE = {
    "vocab_size": 40,
    "hidden_size": 32,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.3,
}
MODELS = {
    "grouped": lambda: Qwen2ForCausalLM(Qwen2Config(**SHAPE)),
    "windowed": lambda: Qwen2ForCausalLM(
        Qwen2Config(**SHAPE, use_sliding_window=True, sliding_window=5, max_window_layers=1)
    ),
    "ungrouped": lambda: LlamaForCausalLM(LlamaConfig(**(SHAPE | {"num_key_value_heads": 4}))),
}


def sequences(lengths):
    generator = np.random.default_rng(0)
    for length in lengths:
        mask = generator.random(length) < 0.7
        mask[0] = False
        yield TokenSequence(generator.integers(0, 40, length).astype(np.int32), mask)


def build(name, attention):
    torch.manual_seed(0)
    model = MODELS[name]()
    model.set_attn_implementation(attention)
    return PolicyModel(model)


def run(policy, packs):
    """Return log-probs of the packs, and gradients of a weighted sum over tokens."""
    policy.zero_grad()
    logprobs = torch.cat([policy(one, with_entropy=False)[0] for one in packs])
    (logprobs * torch.linspace(-1, 2, logprobs.numel())).sum().backward()
    return logprobs.detach(), {name: parameter.grad.clone() for name, parameter in policy.named_parameters()}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("attention", ["varlen", "sdpa", "eager"])
def test_packed_equals_one_by_one_on_every_kernel(name, attention):
    # Longer than two query blocks, longer and shorter than the window, and a single token.
    several = list(sequences([7, 1, 300, 2, 40, 5]))
    # The reference does not pack: one sequence at a time with eager attention of transformers.
    expected, expected_grads = run(build(name, "eager"), [pack([one]) for one in several])
    found, grads = run(build(name, attention), [pack(several)])
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    for parameter, expected_grad in expected_grads.items():
        scale = expected_grad.abs().max().item()
        torch.testing.assert_close(grads[parameter], expected_grad, atol=1e-5 * scale + 1e-6, rtol=1e-5)


def reference(query, key, value, cu_seqlens, scale, window, sinks=None):
    """Compute attention with loops over sequences, heads and positions. A sink is one more key with value 0."""
    output = torch.zeros(*query.shape[:2], value.shape[-1], dtype=query.dtype)
    group = query.shape[1] // key.shape[1]
    for start, end in zip(cu_seqlens[:-1].tolist(), cu_seqlens[1:].tolist(), strict=True):
        for head in range(query.shape[1]):
            for position in range(start, end):
                first = max(start, position - window + 1) if window else start
                scores = key[first : position + 1, head // group] @ query[position, head] * scale
                logits = scores if sinks is None else torch.cat([scores, sinks[head : head + 1]])
                probabilities = torch.softmax(logits, 0)[: len(scores)]
                output[position, head] = probabilities @ value[first : position + 1, head // group]
    return output


@pytest.mark.parametrize("sinks", [None, torch.tensor([0.0, 3.0, -2.0, 1.0], dtype=torch.float64)])
@pytest.mark.parametrize("window", [0, 1, 3, 150])
def test_cpu_operator_equals_a_loop_over_positions(window, sinks):
    torch.manual_seed(0)
    cu_seqlens = torch.tensor([0, 4, 5, 22, 60, 63, 263, 265], dtype=torch.int32)
    query, key, value = (torch.randn(265, heads, 4, dtype=torch.float64) for heads in (4, 2, 2))
    found = varlen_attention(query, key, value, cu_seqlens, cu_seqlens, 0.4, window, sinks)
    torch.testing.assert_close(found, reference(query, key, value, cu_seqlens, 0.4, window, sinks))


def test_cpu_operator_in_both_directions_equals_dense_attention_of_each_sequence():
    torch.manual_seed(0)
    cu_seqlens = torch.tensor([0, 4, 5, 205, 213], dtype=torch.int32)
    query, key, value = (torch.randn(213, heads, 4, dtype=torch.float64) for heads in (4, 2, 2))
    found = varlen_attention(query, key, value, cu_seqlens, cu_seqlens, 0.4, BOTH_WAYS)
    for start, end in zip(cu_seqlens[:-1].tolist(), cu_seqlens[1:].tolist(), strict=True):
        q, k, v = (tensor[start:end].transpose(0, 1) for tensor in (query, key, value))
        scores = q @ k.repeat_interleave(2, 0).transpose(1, 2) * 0.4
        expected = scores.softmax(-1) @ v.repeat_interleave(2, 0)
        torch.testing.assert_close(found[start:end], expected.transpose(0, 1))


@pytest.mark.parametrize("window", [0, 2, BOTH_WAYS])
def test_gradients_of_the_cpu_operator_pass_gradcheck(window):
    torch.manual_seed(0)
    cu_seqlens = torch.tensor([0, 5, 6, 9], dtype=torch.int32)
    inputs = [
        torch.randn(9, heads, size, dtype=torch.float64, requires_grad=True) for heads, size in [(4, 2), (2, 2), (2, 3)]
    ]
    sinks = torch.randn(4, dtype=torch.float64, requires_grad=True)

    def attend(query, key, value, sinks=None):
        return varlen_attention(query, key, value, cu_seqlens, cu_seqlens, 0.7, window, sinks)

    assert torch.autograd.gradcheck(attend, inputs)
    assert torch.autograd.gradcheck(attend, [*inputs, sinks])


def test_gradients_of_the_cpu_operator_equal_the_loop_across_blocks():
    torch.manual_seed(0)
    cu_seqlens = torch.tensor([0, 3, 270, 272, 290], dtype=torch.int32)
    inputs = [torch.randn(290, heads, 2, dtype=torch.float64, requires_grad=True) for heads in (2, 1, 1)]
    weights = torch.randn(290, 2, 2, dtype=torch.float64)
    looped = reference(inputs[0], inputs[1], inputs[2], cu_seqlens, 0.5, 0)
    expected = torch.autograd.grad((looped * weights).sum(), inputs)
    found = torch.autograd.grad((varlen_attention(*inputs, cu_seqlens, cu_seqlens, 0.5, 0) * weights).sum(), inputs)
    torch.testing.assert_close(found, expected)


def test_cpu_operator_keeps_the_rules_of_custom_operators():
    cu_seqlens = torch.tensor([0, 5, 9], dtype=torch.int32)
    inputs = [torch.randn(9, heads, 4, requires_grad=True) for heads in (4, 2, 2)]
    for more in ((), (torch.randn(4, requires_grad=True),)):
        arguments = (*inputs, cu_seqlens, cu_seqlens, 0.5, 0, *more)
        torch.library.opcheck(torch.ops.rlhf_cli.varlen_attention.default, arguments)


def test_bfloat16_scores_are_float32():
    torch.manual_seed(0)
    cu_seqlens = torch.tensor([0, 200], dtype=torch.int32)
    # With large scores, bfloat16 rounding would cause a relative error of several percent.
    tensors = [(torch.randn(200, heads, 16) * 3).bfloat16().requires_grad_() for heads in (4, 2, 2)]
    exact = [tensor.detach().double().requires_grad_() for tensor in tensors]
    weights = torch.randn(200, 4, 16).bfloat16()
    found = varlen_attention(*tensors, cu_seqlens, cu_seqlens, 0.25, 0)
    expected = varlen_attention(*exact, cu_seqlens, cu_seqlens, 0.25, 0)
    grads = torch.autograd.grad(found, tensors, weights)
    expected_grads = torch.autograd.grad(expected, exact, weights.double())
    for one, other in zip([found, *grads], [expected, *expected_grads], strict=True):
        assert (one.double() - other).norm() < 0.006 * other.norm()


def test_cuda_kernel_gets_bounds_window_and_groups():
    calls = []

    def kernel(query, key, value, *bounds, scale, window_size, enable_gqa):
        calls.append((bounds, scale, window_size, enable_gqa))
        return query

    def older_kernel(query, key, value, *bounds, scale, window_size):
        calls.append((bounds, scale, window_size, None))
        return query

    cu_seqlens = torch.tensor([0, 3, 5], dtype=torch.int32)
    query, key = torch.zeros(5, 4, 8), torch.zeros(5, 2, 8)
    arguments = {"cu_seq_lens_q": cu_seqlens, "cu_seq_lens_k": cu_seqlens, "max_length_q": 3, "max_length_k": 3}
    arguments |= {"scaling": 0.1, "sliding_window": 4, "dropout": 0.0}
    attend_cuda(query, key, key, kernel, window=4, **arguments)
    attend_cuda(query, key, key, older_kernel, window=0, **arguments)
    attend_cuda(query, query, query, kernel, window=BOTH_WAYS, **arguments)
    bounds = (cu_seqlens, cu_seqlens, 3, 3)
    # A window of four tokens reaches three to the left of the query.
    assert calls == [(bounds, 0.1, (3, 0), True), (bounds, 0.1, (-1, 0), None), (bounds, 0.1, (-1, -1), False)]


def dense_scores(query, key, bounds, window_size, scale):
    """Return masked scores [heads, T, U] of sequences whose last query sees the last key."""
    cu_q, cu_k = bounds
    group = query.shape[1] // key.shape[1]
    scores = torch.einsum("thd,uhd->htu", query, key.repeat_interleave(group, 1)).float() * scale
    for start, end, start_k, end_k in zip(cu_q[:-1], cu_q[1:], cu_k[:-1], cu_k[1:], strict=True):
        places = torch.arange(start, end) - end + end_k
        distance = places[:, None] - torch.arange(key.shape[0])
        seen = (distance >= 0) & (torch.arange(key.shape[0]) >= start_k)
        if window_size[0] >= 0:
            seen &= distance <= window_size[0]
        scores[:, start:end].masked_fill_(~seen, -torch.inf)
    return scores


def flash_forward(query, key, value, *bounds_and_flags, scale, window_size_left, window_size_right, **_):
    """Stand in for `aten._flash_attention_forward`."""
    *bounds, _max_q, _max_k, _dropout, is_causal = bounds_and_flags
    assert (is_causal, window_size_right) == (window_size_left < 0, 0)
    scores = dense_scores(query, key, bounds, (window_size_left, 0), scale)
    values = value.repeat_interleave(query.shape[1] // value.shape[1], 1)
    output = torch.einsum("htu,uhd->thd", scores.softmax(-1).to(value.dtype), values)
    return output, scores.logsumexp(-1), torch.zeros(2), torch.zeros(0), torch.zeros(0)


def flash_backward(*tensors_and_flags, scale, window_size_left, window_size_right):
    """Stand in for `aten._flash_attention_backward`.

    Probabilities come from the log-sum-exp, their mean gradients from the output.
    """
    grad, query, key, value, output, lse, *others = tensors_and_flags
    *bounds, _max_q, _max_k, _dropout, is_causal, _state, _unused = others
    assert (is_causal, window_size_right) == (window_size_left < 0, 0)
    group = query.shape[1] // key.shape[1]
    keys, values = (tensor.repeat_interleave(group, 1) for tensor in (key, value))
    probabilities = (dense_scores(query, key, bounds, (window_size_left, 0), scale) - lse[..., None]).exp()
    mean = (grad * output).sum(-1).float().T[..., None]
    grad_scores = probabilities * (torch.einsum("thd,uhd->htu", grad, values).float() - mean) * scale
    grads = (
        torch.einsum("htu,uhd->thd", grad_scores, keys.float()),
        torch.einsum("htu,thd->uhd", grad_scores, query.float()).unflatten(1, (-1, group)).sum(2),
        torch.einsum("htu,thd->uhd", probabilities, grad.float()).unflatten(1, (-1, group)).sum(2),
    )
    return tuple(one.to(query.dtype) for one in grads)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("value_size", [4, 8, 12])
@pytest.mark.parametrize("window", [0, 3])
@pytest.mark.parametrize("shares", [False, True])
def test_sinks_on_the_cuda_kernel_equal_those_of_the_cpu_operator(window, shares, value_size, dtype, monkeypatch):
    """PyTorch's functions around its flash kernel are real, so that their arguments and results are checked too."""
    monkeypatch.setattr(torch.ops.aten, "_flash_attention_forward", flash_forward)
    monkeypatch.setattr(torch.ops.aten, "_flash_attention_backward", flash_backward)
    torch.manual_seed(0)
    cu_q, cu_k, length = ([0, 4, 10, 12], [0, 4, 14, 20], 20) if shares else ([0, 1, 9, 12], [0, 1, 9, 12], 12)
    cu_q, cu_k = (torch.tensor(bounds, dtype=torch.int32) for bounds in (cu_q, cu_k))
    shapes = [(12, 4, 8), (length, 2, 8), (length, 2, value_size), (4,)]
    exact = [torch.randn(shape).to(dtype).double().requires_grad_() for shape in shapes]
    weights = torch.randn(12, 4, value_size).to(dtype)
    expected = varlen_attention(*exact[:3], cu_q, cu_k, 0.3, window, exact[3])
    expected_grads = torch.autograd.grad(expected, exact, weights.double())

    inputs = [tensor.detach().to(dtype).requires_grad_() for tensor in exact]
    query, key, value, sinks = inputs
    more = {"cu_seq_lens_q": cu_q, "cu_seq_lens_k": cu_k, "max_length_q": 8, "max_length_k": 10, "scaling": 0.3}
    found = attend_cuda(query, key, value, varlen_attn, window=window, s_aux=sinks, **more)
    grads = torch.autograd.grad(found, inputs, weights)
    assert [one.dtype for one in (found, *grads)] == [dtype] * 5
    tolerance = 1e-6 if dtype == torch.float32 else 0.02
    for one, other in zip((found, *grads), (expected, *expected_grads), strict=True):
        assert (one.double() - other).norm() < tolerance * other.norm()


def efficient_forward(query, key, value, *bounds_and_flags, compute_log_sumexp, scale, window_size):
    """Stand in for `aten._efficient_attention_forward`."""
    bias, *bounds, _max_q, _max_k, dropout, mask_type = bounds_and_flags
    assert (bias, dropout, mask_type, compute_log_sumexp) == (None, 0.0, 2, True)
    window = (-1, 0) if window_size is None else (window_size - 1, 0)
    probabilities = dense_scores(query[0], key[0], bounds, window, scale).softmax(-1)
    return torch.einsum("htu,uhd->thd", probabilities.to(value.dtype), value[0])[None], None


@pytest.mark.parametrize("window", [0, 3])
def test_heads_of_any_size_on_a_gpu_equal_those_of_the_cpu_operator(window, monkeypatch):
    schema = torch.ops.aten._efficient_attention_forward.default._schema
    names = [argument.name for argument in schema.arguments]
    bounds = ["cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k"]
    assert names[3:10] == ["bias", *bounds, "dropout_p", "custom_mask_type"]
    assert {*inspect.signature(efficient_forward).parameters} - {"bounds_and_flags"} <= {*names}
    monkeypatch.setattr(torch.ops.aten, "_efficient_attention_forward", efficient_forward)
    torch.manual_seed(0)
    inputs = [torch.randn(shape).requires_grad_() for shape in ((12, 4, 300), (20, 2, 300), (20, 2, 260))]
    query, key, value = inputs
    cu_q, cu_k = (torch.tensor(bounds, dtype=torch.int32) for bounds in ([0, 4, 10, 12], [0, 4, 14, 20]))
    more = {"cu_seq_lens_q": cu_q, "cu_seq_lens_k": cu_k, "max_length_q": 6, "max_length_k": 10, "scaling": 0.1}
    found = attend_cuda(query, key, value, efficient_varlen, window=window, **more)
    expected = varlen_attention(query, key, value, cu_q, cu_k, 0.1, window)
    grads, expected_grads = (torch.autograd.grad(output.square().sum(), inputs) for output in (found, expected))
    for one, other in zip((found, *grads), (expected, *expected_grads), strict=True):
        assert (one - other).norm() < 1e-6 * other.norm()


@pytest.mark.parametrize("feature", [{"softcap": 30.0}, {"dropout": 0.1}])
def test_varlen_refuses_what_it_would_leave_out(feature):
    tensor = torch.zeros(1, 4, 3, 8)
    packed = {"cu_seq_lens_q": torch.tensor([0, 3], dtype=torch.int32), "max_length_q": 3}
    with pytest.raises(ValueError, match=next(iter(feature))):
        varlen_attention_forward(torch.nn.Module(), tensor, tensor, tensor, None, **packed, **feature)


def test_varlen_refuses_a_batch_that_is_not_packed():
    tensor = torch.zeros(2, 4, 3, 8)
    with pytest.raises(ValueError, match="packed sequences"):
        varlen_attention_forward(torch.nn.Module(), tensor, tensor, tensor, None)


def here(name, **changes):
    return AttentionBackend(**({"name": name, "devices": ("cuda",), "missing": f"install {name}"} | changes))


TABLE = (
    here("flash_attention_3", is_available=lambda: False),
    here("flash_attention_2", dtypes=(torch.bfloat16,), offers=frozenset({"softcap"})),
    here("varlen", dtypes=(torch.bfloat16,)),
    here("varlen", devices=("cpu",)),
    here("sdpa", devices=("cuda", "cpu")),
    here("eager", devices=("cuda", "cpu"), offers=frozenset({"softcap", "dropout"})),
)


@pytest.mark.parametrize(
    ("device", "dtype", "needs", "expected"),
    [
        ("cuda", torch.bfloat16, (), "flash_attention_2"),
        ("cuda", torch.float32, (), "sdpa"),
        ("cuda", torch.bfloat16, ("softcap",), "flash_attention_2"),
        ("cuda", torch.bfloat16, ("dropout",), "eager"),
        ("cpu", torch.bfloat16, (), "varlen"),
        ("cpu", torch.float32, ("softcap",), "eager"),
    ],
)
def test_auto_takes_the_first_kernel_that_fits(device, dtype, needs, expected):
    found = resolve_attention("auto", device=device, dtype=dtype, needs=frozenset(needs), backends=TABLE)
    assert found == expected


@pytest.mark.parametrize(
    ("name", "device", "dtype", "needs", "message"),
    [
        ("flash_attention_3", "cuda", torch.bfloat16, (), "install flash_attention_3"),
        ("flash_attention_2", "cpu", torch.bfloat16, (), "runs on cuda, not on cpu"),
        ("flash_attention_2", "cuda", torch.float32, (), "supports bfloat16, not float32; set param_dtype"),
        ("varlen", "cpu", torch.float32, ("softcap",), "needs attention softcap"),
        ("flesh", "cpu", torch.float32, (), "auto, flash_attention_3, flash_attention_2, varlen, sdpa, eager"),
    ],
)
def test_a_kernel_that_cannot_be_used_is_refused_with_the_reason(name, device, dtype, needs, message):
    with pytest.raises(UsageError, match=message):
        resolve_attention(name, device=device, dtype=dtype, needs=frozenset(needs), backends=TABLE)


def test_this_machine_has_a_kernel_for_every_type():
    for dtype in (torch.float32, torch.bfloat16):
        assert resolve_attention("auto", device="cpu", dtype=dtype, backends=BACKENDS) == "varlen"


@pytest.mark.parametrize(
    ("capability", "installed", "expected"),
    [((9, 0), True, True), ((9, 0), False, False), ((8, 0), True, False), ((10, 0), True, False)],
)
def test_flash_attention_3_runs_under_varlen_on_hopper(capability, installed, expected):
    assert wants_flash_attention_3(capability, installed) == expected


def test_an_installed_flash_attention_does_not_take_shared_prompts_away():
    ranks = [row.name for row in BACKENDS if "cuda" in row.devices]
    assert ranks.index("varlen") < ranks.index("flash_attention_3") < ranks.index("flash_attention_2")


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ({"head_dim": 128}, "flash_attention_4"),
        ({"hidden_size": 64, "num_attention_heads": 4}, "flash_attention_4"),
        ({"head_dim": 320}, "varlen"),
        ({"head_dim": 20}, "varlen"),
        ({"qk_head_dim": 192, "v_head_dim": 128, "num_attention_heads": 4}, "flash_attention_4"),
        ({"head_dim": 128, "v_head_dim": 260}, "varlen"),
    ],
)
def test_auto_leaves_kernels_out_that_lack_the_model_s_head_sizes(sizes, expected):
    text = SimpleNamespace(model_type="any", num_hidden_layers=1, **sizes)
    needs = attention_needs(SimpleNamespace(get_text_config=lambda: text))
    on_gpu = tuple(replace(row, is_available=lambda: True) for row in BACKENDS)
    assert resolve_attention("auto", device="cuda", dtype=torch.bfloat16, needs=needs, backends=on_gpu) == expected


def test_needs_are_read_from_the_configuration():
    def needs(*, with_dropout=True, **settings):
        text = SimpleNamespace(model_type="gemma2", num_hidden_layers=1, **settings)
        return attention_needs(SimpleNamespace(get_text_config=lambda: text), with_dropout=with_dropout)

    assert needs() == needs(attn_logit_softcapping=None, attention_dropout=0.0) == frozenset()
    assert needs(attn_logit_softcapping=50.0, attention_dropout=0.1) == {"softcap", "dropout"}
    assert needs(attention_dropout=0.1, with_dropout=False) == needs(resid_pdrop=0.1) == frozenset()
    for name in ("attn_pdrop", "attn_dropout", "attention_probs_dropout_prob"):  # gpt2, mpt, bert
        assert needs(**{name: 0.1}) == {"dropout"}


@pytest.mark.parametrize(
    ("dtype", "fix"),
    [
        (torch.bfloat16, "flash_attention_2: install flash-attn (extra `flash`)"),
        (torch.float32, "flash_attention_2: it supports bfloat16 or float16, not float32; set param_dtype"),
    ],
)
def test_plain_attention_on_a_gpu_is_noted_with_its_fix(dtype, fix, monkeypatch):
    is_installed = dtype == torch.float32
    rows = tuple(replace(row, is_available=lambda: is_installed) for row in BACKENDS)
    monkeypatch.setattr("rlhf_cli.models.attention.table.BACKENDS", rows)
    config = SimpleNamespace(model_type="tiny", num_hidden_layers=1, attn_logit_softcapping=50.0)
    config.get_text_config = lambda: config
    note = attention_note("eager", config, dtype, on_gpu=True)["Attention"]
    assert f"eager, because the model needs softcap: slow for long packs; {fix}" in note
    assert attention_note("eager", config, dtype, on_gpu=False) == {}
    assert attention_note("varlen", config, dtype, on_gpu=True) == {}


def test_the_compute_capability_is_asked_of_the_driver_without_a_cuda_context(tmp_path, monkeypatch):
    program = tmp_path / "nvidia-smi"
    program.write_text('#!/bin/sh\n[ "$2" = GPU-1f ] && echo 8.9\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-1f,GPU-2e")
    compute_capability.cache_clear()
    assert compute_capability() == (8, 9)
    compute_capability.cache_clear()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "MIG-3d")  # not supported by nvidia-smi queries
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    assert compute_capability() == (9, 0)
    compute_capability.cache_clear()
