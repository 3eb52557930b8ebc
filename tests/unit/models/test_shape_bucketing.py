"""Packs have few different lengths on a CPU in bfloat16, without changing results."""

from itertools import pairwise

import numpy as np
import pytest
import torch
from test_last_mlp import SHAPE
from transformers import Qwen2Config, Qwen2ForCausalLM, Qwen2ForTokenClassification

from rlhf_cli.data.packing.packs import TokenSequence, at_targets, pack
from rlhf_cli.data.packing.prefix_packing import Continuation, Tree, pack_trees
from rlhf_cli.models import policy, shape_bucketing
from rlhf_cli.models.attention.varlen import VARLEN
from rlhf_cli.models.policy import PolicyModel, ValueModel
from rlhf_cli.models.shape_bucketing import LEAST_STEP, rounded, rounded_length


def sequences(*lengths: int) -> list[TokenSequence]:
    rng = np.random.default_rng(0)
    return [TokenSequence(rng.integers(0, 60, n).astype(np.int32), np.arange(n) >= n // 2) for n in lengths]


def shared():
    rng = np.random.default_rng(1)
    continuations = tuple(
        Continuation(rng.integers(0, 60, n).astype(np.int32), np.ones(n, dtype=bool)) for n in (9, 30, 41)
    )
    return pack_trees([Tree(rng.integers(0, 60, 20).astype(np.int32), continuations)], share_prompts=True)


def same_first_token():
    """Return a pack with three more targets than rows: several responses start at the last prompt token."""
    mask = np.ones(1, dtype=bool)
    continuations = tuple(Continuation(np.array([token], dtype=np.int32), mask) for token in (3, 4, 5, 6))
    return pack_trees([Tree(np.arange(60, dtype=np.int32), continuations)], share_prompts=True)


PACKS = {
    "sequences": lambda: pack(sequences(40, 21, 33)),
    "a shared beginning": shared,
    "as long as it has to be": lambda: pack(sequences(128)),
    "no filler, but more targets": same_first_token,
    "read at its targets": lambda: at_targets(pack(sequences(40, 21))),
    "all but one token read": lambda: pack([TokenSequence(np.arange(60, dtype=np.int32), np.arange(60) > 0)]),
    "no sequence": lambda: pack([]),
}


@pytest.fixture(autouse=True)
def _every_processor_compiles_products(monkeypatch):
    monkeypatch.setattr(shape_bucketing, "has_bf16_products", lambda: True)


@pytest.fixture(params=PACKS)
def batch(request):
    return PACKS[request.param]()


@pytest.fixture(params=[PolicyModel, ValueModel])
def model(request):
    torch.manual_seed(0)
    config = Qwen2Config(**SHAPE, num_labels=1)
    made = {PolicyModel: Qwen2ForCausalLM, ValueModel: Qwen2ForTokenClassification}[request.param](config)
    made.set_attn_implementation(VARLEN)
    return request.param(made.to(torch.bfloat16).eval())


def read(model, batch):
    """Return the outputs for a pack in one tensor [.., K], and the gradients of their sum of squares."""
    found = model(batch, with_entropy=True) if isinstance(model, PolicyModel) else (model(batch),)
    values = torch.stack(found)
    model.zero_grad()
    values.square().sum().backward()
    return values.detach(), [parameter.grad.clone() for parameter in model.parameters()]


def test_values_and_gradients_stay(model, batch, monkeypatch):
    values, grads = read(model, batch)
    monkeypatch.setattr(policy, "rounded", lambda pack, dtype: pack)
    expected, expected_grads = read(model, batch)
    assert values.shape[-1] == batch.targets_K.numel()
    torch.testing.assert_close(values, expected, atol=0.02, rtol=0.02)
    for grad, expected_grad in zip(grads, expected_grads, strict=True):
        scale = max(expected_grad.abs().max().item(), 1e-3)
        torch.testing.assert_close(grad / scale, expected_grad / scale, atol=0.03, rtol=0.03)


def test_all_lengths_are_rounded_and_runs_fit(batch):
    full = rounded(batch, torch.bfloat16)
    for name in ("input_ids_T", "read_R", "targets_K"):
        assert getattr(full, name).numel() == rounded_length(getattr(batch, name).numel())
    assert torch.isin(batch.rows_K, full.read_R).all()
    num_tokens = full.input_ids_T.numel()
    assert full.position_ids_T.numel() == full.cu_seqlens[-1] == num_tokens
    assert full.rows_K.numel() == full.targets_K.numel()
    assert full.read_R.unique().numel() == full.read_R.numel()
    assert all(first < stop for first, stop in pairwise(full.cu_seqlens.tolist()))
    keys = full.keys or full
    assert full.cu_seqlens.diff().max() == full.max_seqlen
    assert keys.cu_seqlens.diff().max() == keys.max_seqlen
    assert keys.cu_seqlens.numel() == full.cu_seqlens.numel()


def test_a_pack_stays_where_products_do_not_depend_on_its_length(batch, monkeypatch):
    assert rounded(batch, torch.float32) is batch
    monkeypatch.setattr(shape_bucketing, "has_bf16_products", lambda: False)
    assert rounded(batch, torch.bfloat16) is batch


def test_lengths_are_few_and_near():
    lengths = range(1, 40_000, 7)
    found = [rounded_length(length) for length in lengths]
    assert all(0 <= new - old < max(LEAST_STEP, old / 64) for old, new in zip(lengths, found, strict=True))
    assert len({rounded_length(length) for length in range(8_192, 16_384)}) == 65
    assert rounded_length(0) == 0
