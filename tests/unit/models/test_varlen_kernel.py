"""Compiled attention on a CPU equals the operators that it replaces on every processor, or is not used.

The operators themselves are compared with a loop over positions in test_attention.py.
"""

import logging
import os
from concurrent.futures import ThreadPoolExecutor
from itertools import product

import pytest
import torch

from rlhf_cli.models.attention import kernel as varlen_kernel
from rlhf_cli.models.attention.kernel import Operands, build
from rlhf_cli.models.attention.varlen_cpu import BOTH_WAYS, varlen_attention

# Zero and one token; exactly full and almost full tiles, vectors and query blocks; more keys than queries.
LENGTHS = [(0, 0), (0, 5), (1, 1), (8, 8), (9, 9), (32, 32), (33, 33), (5, 70), (64, 96), (130, 333)]
# Query heads, key heads, query size, value size.
SHAPES = [(4, 2, 32, 32), (6, 1, 7, 5), (3, 3, 80, 48), (2, 1, 128, 130)]
CAPABILITIES = ["DEFAULT", "AVX2", "AVX512"]


@pytest.fixture
def fresh(monkeypatch, tmp_path):
    """Remove cached libraries."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    varlen_kernel.varlen_kernel.cache_clear()
    yield tmp_path / "rlhf-cli" / "kernels"
    varlen_kernel.varlen_kernel.cache_clear()


@pytest.fixture
def compiled():
    """Return results of the kernel in the user's cache, which must be requested before `fresh`."""
    return attend(*inputs(SHAPES[0]))


def bounds_of(*lengths):
    return tuple(torch.tensor([0, *numbers]).cumsum(0).int() for numbers in zip(*lengths, strict=True))


def inputs(shape, dtype=torch.float32, lengths=LENGTHS):
    """Return query, key, value, sinks and output gradient, and the bounds of queries and keys."""
    torch.manual_seed(0)
    heads, groups, size, value_size = shape
    cu_seqlens, cu_seqlens_k = bounds_of(*lengths)
    total, total_k = int(cu_seqlens[-1]), int(cu_seqlens_k[-1])
    sizes = [(total, heads, size), (total_k, groups, size), (total_k, groups, value_size), (heads,)]
    sizes.append((total, heads, value_size))
    return [torch.randn(*shape).to(dtype) for shape in sizes], (cu_seqlens, cu_seqlens_k)


def attend(tensors, bounds, window=0, dtype=None, has_sinks=True):
    """Return the output and all gradients in float64, computed in `dtype` if given."""
    *leaves, grad = [tensor.detach().to(dtype or tensor.dtype) for tensor in tensors]
    leaves = [tensor.requires_grad_() for tensor in (leaves if has_sinks else leaves[:3])]
    output = varlen_attention(*leaves[:3], *bounds, leaves[0].shape[-1] ** -0.5, window, *leaves[3:])
    return [tensor.double() for tensor in (output.detach(), *torch.autograd.grad(output, leaves, grad))]


def assert_close(found, expected, tolerance):
    for one, other in zip(found, expected, strict=True):
        assert (one - other).norm() <= tolerance * other.norm() + 1e-30


@pytest.mark.parametrize("capability", CAPABILITIES)
def test_every_build_equals_the_operators_in_float64(capability, fresh, monkeypatch):
    own = torch.backends.cpu.get_cpu_capability()
    if own not in CAPABILITIES or CAPABILITIES.index(capability) > CAPABILITIES.index(own):
        pytest.skip(f"this processor has no {capability}")
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    assert varlen_kernel.varlen_kernel() is not None
    windows = [(0, False), (0, True), (1, True), (5, False), (40, True), (150, False), (BOTH_WAYS, False)]
    for shape, dtype, (window, has_sinks) in product(SHAPES, (torch.float32, torch.bfloat16), windows):
        tensors, bounds = inputs(shape, dtype)
        expected = attend(tensors, bounds, window, dtype=torch.float64, has_sinks=has_sinks)
        # Half a unit in the last place of bfloat16 is 2^-9 to 2^-8, less on average; accumulation is in float32.
        tolerance = 1e-6 if dtype == torch.float32 else 2**-9
        found = attend(tensors, bounds, window, has_sinks=has_sinks)
        assert_close(found[:4], expected[:4], tolerance)
        assert_close(found[4:], expected[4:], 2 * tolerance)  # the gradient of sinks has few numbers
    assert len(list(fresh.iterdir())) == 1


def test_large_scores_neither_overflow_nor_lose_the_largest():
    tensors, bounds = inputs(SHAPES[0])
    tensors[0] *= 100
    tensors[1] *= 100
    found = attend(tensors, bounds)
    # Float32 score differences: a few units in the last place of 1e5.
    assert_close(found, attend(tensors, bounds, dtype=torch.float64), 0.02)
    assert all(tensor.isfinite().all() for tensor in found)


def test_what_is_not_a_number_stays_in_its_sequence():
    tensors, bounds = inputs(SHAPES[0], lengths=[(40, 40), (20, 20), (40, 40)])
    clean = attend(tensors, bounds)
    tensors[1][45, 0, 3] = torch.nan
    spoiled = attend(tensors, bounds)
    # Gradients of sinks are sums over all sequences.
    assert spoiled.pop().isnan().any()
    assert clean.pop().isfinite().all()
    for one, other in zip(spoiled, clean, strict=True):
        assert one[:40].equal(other[:40])
        assert one[60:].equal(other[60:])
        assert one[40:60].isnan().any()
    assert spoiled[0][45:60, :2].isnan().all()  # all queries that attend to the key
    assert spoiled[0][40:45].equal(clean[0][40:45])  # none before it


def test_later_tokens_change_nothing_before_them():
    tensors, bounds = inputs(SHAPES[0], lengths=[(50, 50)])
    before = attend(tensors, bounds)[0]
    for tensor in tensors[:3]:
        tensor[37:] = 1e4
    assert attend(tensors, bounds)[0][:37].equal(before[:37])


def test_the_number_of_threads_changes_no_bit():
    tensors, bounds = inputs(SHAPES[0])
    results, usual = [], torch.get_num_threads()
    try:
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            results.append(attend(tensors, bounds))
    finally:
        torch.set_num_threads(usual)
    assert all(one.equal(other) for result in results for one, other in zip(result, results[0], strict=True))


def test_strides_do_not_matter():
    tensors, bounds = inputs(SHAPES[0])
    strided = [tensor.repeat_interleave(2, 0)[::2] for tensor in tensors]
    assert all(one.equal(other) for one, other in zip(attend(strided, bounds), attend(tensors, bounds), strict=True))


@pytest.mark.parametrize(
    ("bounds", "reason"),
    [
        (bounds_of((33, 20)), "fewer keys than queries"),
        (bounds_of((30, 34)), "do not match the tensors"),
        (bounds_of((33, 33)), "do not match the tensors"),
    ],
)
def test_bounds_that_are_not_those_of_the_tensors_are_refused(bounds, reason):
    tensors, _ = inputs(SHAPES[0], lengths=[(33, 34)])
    with pytest.raises(ValueError, match=reason):
        attend(tensors, bounds)


def test_tensors_that_do_not_go_together_are_refused():
    (query, key, value, sinks, _), bounds = inputs(SHAPES[0])
    with pytest.raises(ValueError, match="same dtype"):
        varlen_attention(query, key, value.bfloat16(), *bounds, 1.0, 0)
    kernel, (cu_seqlens, cu_seqlens_k) = varlen_kernel.varlen_kernel(), bounds
    assert kernel is not None
    with pytest.raises(ValueError, match="same dtype"):
        kernel.backward(query.double(), Operands(query, key, value, cu_seqlens, cu_seqlens_k, 1.0, 0))
    with pytest.raises(ValueError, match="multiple"):
        varlen_attention(query[:, :3], key, value, *bounds, 1.0, 0)
    with pytest.raises(ValueError, match="number of sinks"):
        varlen_attention(query, key, value, *bounds, 1.0, 0, sinks[:3])


def test_float16_is_left_to_the_operators():
    tensors, bounds = inputs(SHAPES[0], torch.float16)
    assert_close(attend(tensors, bounds), attend(tensors, bounds, dtype=torch.float64), 2e-3)


@pytest.mark.parametrize(
    ("compiler", "reason"),
    [("no-such-compiler", "No such file"), ("false", "returned non-zero exit status")],
)
def test_without_a_compiler_the_operators_take_over_and_a_line_says_why(
    compiler, reason, compiled, fresh, monkeypatch, caplog
):
    tensors, bounds = inputs(SHAPES[0])
    monkeypatch.setenv("CXX", compiler)
    with caplog.at_level(logging.WARNING):
        assert_close(attend(tensors, bounds), compiled, 1e-6)
        attend(tensors, bounds)
    (record,) = caplog.records
    assert "compiled CPU attention is not available" in record.message
    assert reason in record.message
    assert not list(fresh.iterdir())


def test_what_a_compiler_says_need_not_be_text(fresh, monkeypatch, tmp_path, caplog):
    compiler = tmp_path / "compiler"
    compiler.write_text('#!/bin/sh\nprintf "cause\\nerror: \\377\\n" >&2\nexit 1\n')
    compiler.chmod(0o700)
    monkeypatch.setenv("CXX", f"nice {compiler}")
    assert varlen_kernel.varlen_kernel() is None
    assert "code: error: \N{REPLACEMENT CHARACTER}" in caplog.text


def test_a_cache_that_cannot_be_written_is_no_error(monkeypatch, tmp_path, fresh, caplog):
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    tensors, bounds = inputs(SHAPES[0])
    assert_close(attend(tensors, bounds), attend(tensors, bounds, dtype=torch.float64), 1e-6)
    assert "Not a directory" in caplog.text


def test_builds_at_once_end_with_one_library(fresh):
    with ThreadPoolExecutor(2) as pool:  # compilers are processes
        paths = [future.result() for future in [pool.submit(build) for _ in range(2)]]
    assert len(set(paths)) == 1
    assert list(fresh.iterdir()) == [paths[0]]
    changed = paths[0].stat().st_mtime_ns
    assert build() == paths[0]
    assert os.stat(paths[0]).st_mtime_ns == changed


def test_this_machine_compiles():
    assert varlen_kernel.varlen_kernel() is not None
