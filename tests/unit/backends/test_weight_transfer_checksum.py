"""The checksum of a weight update and its comparison with the expected value."""

import zlib

import pytest
import torch

from rlhf_cli.backends.weight_sync.transfer import (
    Ledger,
    check_tensors,
    checkpoint_shapes,
    tensor_checksum,
    weights_checksum,
)
from rlhf_cli.errors import RunError


def slow_checksum(raw: bytes) -> int:
    """Compute the definition word by word with Python integers."""
    whole = len(raw) // 8
    total = 0
    for index in range(whole):
        chunk, position = divmod(index, 1 << 20)
        word = int.from_bytes(raw[8 * index : 8 * index + 8], "little", signed=True)
        total += word * (position * 0x9E3779B97F4A7C15 | 1) * (2 * chunk + 1)
    return (total + zlib.crc32(raw[8 * whole :]) * (len(raw) | 1)) % 2**64


@pytest.mark.parametrize("size", [1, 3, 4, 4001])
def test_checksum_is_that_of_a_loop_over_words(size):
    tensor = torch.randn(size).to(torch.bfloat16)
    assert tensor_checksum(tensor) == slow_checksum(tensor.view(torch.uint8).numpy().tobytes())


def test_checksum_goes_on_over_chunks_of_words():
    tensor = torch.arange((1 << 20) + 5, dtype=torch.int64)
    moved = tensor.roll(1 << 20)
    assert tensor_checksum(tensor) == slow_checksum(tensor.numpy().tobytes())
    assert tensor_checksum(tensor) != tensor_checksum(moved)


def test_checksum_of_a_view_is_that_of_its_values():
    base = torch.arange(40, dtype=torch.bfloat16)
    assert tensor_checksum(base[3:20]) == tensor_checksum(base[3:20].clone())
    transposed = base.view(5, 8).T
    assert tensor_checksum(transposed) == tensor_checksum(transposed.contiguous())


def test_checksum_changes_with_one_bit_and_with_two_swapped_values():
    tensor = torch.randn(64)
    before = tensor_checksum(tensor)
    flipped = tensor.clone()
    flipped.view(torch.int32)[17] ^= 1
    swapped = tensor[torch.tensor([1, 0, *range(2, 64)])]
    assert len({before, tensor_checksum(flipped), tensor_checksum(swapped)}) == 3


def test_checksum_of_a_push_depends_on_names_but_not_on_order():
    one, two = torch.randn(8), torch.randn(8)
    total = weights_checksum([("one", one), ("two", two)])
    assert weights_checksum([("two", two), ("one", one)]) == total
    assert weights_checksum([("one", two), ("two", one)]) != total
    assert weights_checksum([("one", one)]) != total


def test_a_tensor_sent_twice_is_an_error_that_names_it():
    ledger = Ledger()
    ledger.add("layer.weight", torch.zeros(2))
    with pytest.raises(RunError, match=r"layer\.weight was sent twice"):
        ledger.add("layer.weight", torch.zeros(2))


def test_a_missing_tensor_is_named():
    with pytest.raises(RunError, match=r"missing b$"):
        check_tensors({"a": (1,)}, {"a": (1,), "b": (2,)})


def test_an_unknown_tensor_is_named():
    with pytest.raises(RunError, match=r"unknown model\.c"):
        check_tensors({"a": (1,), "model.c": (1,)}, {"a": (1,)})


def test_a_tensor_of_another_shape_is_named_with_both_shapes():
    with pytest.raises(RunError, match=r"a has shape \[3\], but the engine's model expects \[1\]"):
        check_tensors({"a": (3,)}, {"a": (1,)})


def test_a_tied_head_may_be_sent_or_not():
    optional = frozenset({"lm_head.weight"})
    check_tensors({"a": (1,), "lm_head.weight": (1,)}, {"a": (1,)}, optional=optional)
    check_tensors({"a": (1,)}, {"a": (1,), "lm_head.weight": (1,)}, optional=optional)


def test_names_and_shapes_of_a_checkpoint_are_those_of_its_state_dict(tiny_model_dir):
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tiny_model_dir)
    expected = {name: tuple(tensor.shape) for name, tensor in model.named_parameters()}
    assert checkpoint_shapes(tiny_model_dir) == expected
