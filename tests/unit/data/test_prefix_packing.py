"""Packs of prompts with several continuations, with a shared or a repeated prompt."""

import numpy as np
import pytest
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM, Qwen2ForSequenceClassification

from rlhf_cli.data.packing.prefix_packing import Continuation, Tree, pack_trees
from rlhf_cli.models.attention.varlen import VARLEN
from rlhf_cli.models.attention.varlen_cpu import varlen_attention
from rlhf_cli.models.policy import PolicyModel, ValueModel

SHAPE = {
    "vocab_size": 40,
    "hidden_size": 32,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "initializer_range": 0.3,
    "num_labels": 1,
    "attn_implementation": VARLEN,
}
WINDOWED = SHAPE | {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 1}


def continuation(tokens, trained):
    mask = np.zeros(len(tokens), dtype=bool)
    mask[trained] = True
    return Continuation(np.array(tokens, dtype=np.int32), mask)


def tree(prompt, *continuations):
    return Tree(np.array(prompt, dtype=np.int32), continuations)


TWO = [tree([1, 2], continuation([3, 4], [0, 1]), continuation([5], [0])), tree([6], continuation([7, 8, 9], [1]))]


def random_trees(shapes):
    rng = np.random.default_rng(0)
    trees = []
    for prompt, *lengths in shapes:
        continuations = [continuation(rng.integers(0, 40, n), np.flatnonzero(rng.random(n) < 0.7)) for n in lengths]
        trees.append(tree(rng.integers(0, 40, prompt), *continuations))
    return trees


def test_a_shared_prompt_stands_in_the_pack_once():
    packed = pack_trees(TWO, share_prompts=True)
    assert packed.input_ids_T.tolist() == [1, 2, 3, 4, 5, 6, 7, 8, 9]
    assert packed.position_ids_T.tolist() == [0, 1, 2, 3, 2, 0, 1, 2, 3]
    assert packed.cu_seqlens.tolist() == [0, 2, 4, 5, 6, 9]
    assert packed.targets_K.tolist() == [3, 4, 5, 8]
    assert packed.rows_K.tolist() == [1, 2, 1, 6]
    assert packed.cu_trained.tolist() == [0, 2, 3, 4]
    assert packed.keys is not None
    assert packed.keys.index_U.tolist() == [0, 1, 0, 1, 2, 3, 0, 1, 4, 5, 5, 6, 7, 8]
    assert packed.keys.cu_seqlens.tolist() == [0, 2, 6, 9, 10, 14]
    assert (packed.max_seqlen, packed.keys.max_seqlen, packed.num_sequences) == (3, 4, 3)


def test_a_repeated_prompt_stands_before_each_continuation():
    packed = pack_trees(TWO, share_prompts=False)
    assert packed.input_ids_T.tolist() == [1, 2, 3, 4, 1, 2, 5, 6, 7, 8, 9]
    assert packed.position_ids_T.tolist() == [0, 1, 2, 3, 0, 1, 2, 0, 1, 2, 3]
    assert packed.cu_seqlens.tolist() == [0, 4, 7, 11]
    assert packed.targets_K.tolist() == [3, 4, 5, 8]
    assert packed.rows_K.tolist() == [1, 2, 5, 8]
    assert packed.cu_trained.tolist() == [0, 2, 3, 4]
    assert packed.keys is None


@pytest.mark.parametrize("share", [True, False])
def test_ends_are_the_last_tokens_of_the_continuations(share):
    packed = pack_trees(TWO, share_prompts=share, read_ends=True)
    assert packed.input_ids_T[packed.rows_K].tolist() == [4, 5, 9] == packed.targets_K.tolist()
    assert packed.cu_trained.tolist() == [0, 1, 2, 3]


def test_no_trees_give_the_idle_pack():
    packed = pack_trees([], share_prompts=True)
    assert (packed.num_sequences, packed.input_ids_T.numel(), packed.targets_K.numel()) == (0, 1, 0)


def test_keys_move_with_the_pack():
    moved = pack_trees(TWO, share_prompts=True).to("meta")
    assert moved.keys is not None
    assert moved.keys.index_U.is_meta
    assert moved.keys.cu_seqlens.is_meta
    assert moved.rows_K.is_meta
    assert moved.keys.max_seqlen == 4


SHAPES = [(200, 150, 3), (2, 7, 9, 1), (60, 1, 60), (1, 300, 20), (20, 4)]


@pytest.mark.parametrize("shape", [SHAPE, WINDOWED], ids=["full", "windowed"])
@pytest.mark.parametrize("read_ends", [False, True], ids=["tokens", "ends"])
def test_sharing_prompts_changes_neither_results_nor_gradients(shape, read_ends):
    trees = random_trees(SHAPES)
    torch.manual_seed(0)
    config = Qwen2Config(**shape)
    model = ValueModel(Qwen2ForSequenceClassification(config)) if read_ends else PolicyModel(Qwen2ForCausalLM(config))
    model = model.double()
    found = []
    for share in (True, False):
        model.zero_grad()
        packed = pack_trees(trees, share_prompts=share, read_ends=read_ends)
        output = model(packed) if read_ends else model(packed)[0]
        (output * torch.linspace(-1, 2, output.numel())).sum().backward()
        found.append((output.detach(), {name: p.grad.clone() for name, p in model.named_parameters()}))
    (shared, shared_grads), (plain, plain_grads) = found
    torch.testing.assert_close(shared, plain, atol=1e-6, rtol=1e-6)
    for name, grad in plain_grads.items():
        torch.testing.assert_close(shared_grads[name], grad, atol=1e-6 * grad.abs().max().item() + 1e-9, rtol=1e-6)


@pytest.mark.parametrize("window", [0, 3, 150])
def test_queries_are_the_last_positions_of_their_keys(window):
    torch.manual_seed(0)
    cu_q, cu_k = torch.tensor([0, 3, 203, 204]), torch.tensor([0, 60, 300, 304])
    query = torch.randn(204, 4, 4, dtype=torch.float64)
    key, value = (torch.randn(304, 2, 4, dtype=torch.float64) for _ in range(2))
    expected = torch.zeros_like(query)
    for start, end, start_k, end_k in zip(cu_q[:-1], cu_q[1:], cu_k[:-1], cu_k[1:], strict=True):
        for row in range(start, end):
            last = end_k - (end - row) + 1
            first = max(start_k, last - window) if window else start_k
            for head in range(4):
                scores = key[first:last, head // 2] @ query[row, head] * 0.4
                expected[row, head] = torch.softmax(scores, 0) @ value[first:last, head // 2]
    found = varlen_attention(query, key, value, cu_q.int(), cu_k.int(), 0.4, window)
    torch.testing.assert_close(found, expected)


def test_gradients_with_keys_before_the_queries_pass_gradcheck():
    torch.manual_seed(0)
    cu_q, cu_k = torch.tensor([0, 2, 5], dtype=torch.int32), torch.tensor([0, 2, 8], dtype=torch.int32)
    shapes = [(5, 4, 2), (8, 2, 2), (8, 2, 3)]
    inputs = [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]
    assert torch.autograd.gradcheck(lambda *tensors: varlen_attention(*tensors, cu_q, cu_k, 0.7, 0), inputs)
