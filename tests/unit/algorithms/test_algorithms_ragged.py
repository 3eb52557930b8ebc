"""Scans and reductions over ragged segments, compared with slow loops."""

from itertools import pairwise

import pytest
import torch

from rlhf_cli.algorithms.ragged import last_index, segment_mean, segment_sum, shift_left, suffix_scan


def bounds(lengths: list[int]) -> torch.Tensor:
    return torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()])


def slow_scan(x: list[float], cu: list[int], decay: float) -> list[float]:
    y = [0.0] * len(x)
    for start, end in pairwise(cu):
        after = 0.0
        for t in range(end - 1, start - 1, -1):
            after = y[t] = x[t] + decay * after
    return y


@pytest.mark.parametrize("decay", [0.0, 0.3, 0.95, 0.9999, 1.0])
@pytest.mark.parametrize(
    "lengths",
    [[1], [5, 1, 3], [0, 2, 0, 0, 4, 0], [32, 64, 31, 33], [3000, 1, 0, 1025, 7], [40_000, 2]],
    ids=str,
)
def test_suffix_scan_equals_the_loop(lengths: list[int], decay: float) -> None:
    x_N = torch.randn(sum(lengths), generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    cu = bounds(lengths)
    expected = torch.tensor(slow_scan(x_N.tolist(), cu.tolist(), decay), dtype=torch.float64)
    torch.testing.assert_close(suffix_scan(x_N, cu, decay), expected, rtol=1e-10, atol=1e-9)


def test_suffix_scan_of_nothing_is_empty() -> None:
    assert suffix_scan(torch.zeros(0), torch.tensor([0]), 0.9).shape == (0,)
    assert suffix_scan(torch.zeros(0), torch.tensor([0, 0, 0]), 0.9).shape == (0,)


def test_suffix_scan_by_hand() -> None:
    y_N = suffix_scan(torch.tensor([1.0, 2.0, 4.0, 8.0]), torch.tensor([0, 3, 4]), 0.5)
    assert y_N.tolist() == [3.0, 4.0, 4.0, 8.0]


def test_a_bad_number_stays_in_its_segment() -> None:
    y_N = suffix_scan(torch.tensor([1.0, float("nan"), 1.0, 2.0]), torch.tensor([0, 2, 4]), 0.5)
    assert torch.isnan(y_N[:2]).all()
    assert y_N[2:].tolist() == [2.0, 2.0]


def test_decay_outside_the_unit_interval_is_refused() -> None:
    with pytest.raises(ValueError, match=r"between 0 and 1, not 1\.5"):
        suffix_scan(torch.ones(1), torch.tensor([0, 1]), 1.5)


def test_segments_are_reduced_and_empty_ones_give_zero() -> None:
    x_N, cu = torch.tensor([1.0, 2.0, 3.0, 10.0]), torch.tensor([0, 3, 3, 4])
    assert segment_sum(x_N, cu).tolist() == [6.0, 0.0, 10.0]
    assert segment_mean(x_N, cu).tolist() == [2.0, 0.0, 10.0]


def test_shift_left_stays_inside_the_segment() -> None:
    x_N, cu = torch.tensor([1.0, 2.0, 3.0, 4.0]), torch.tensor([0, 2, 2, 4])
    assert shift_left(x_N, cu).tolist() == [2.0, 0.0, 4.0, 0.0]
    assert shift_left(x_N, cu, last_B=torch.tensor([7.0, 8.0, 9.0])).tolist() == [2.0, 7.0, 4.0, 9.0]
    assert x_N.tolist() == [1.0, 2.0, 3.0, 4.0]


def test_last_index_skips_empty_segments() -> None:
    occupied, ends = last_index(torch.tensor([0, 0, 3, 3, 4]))
    assert occupied.tolist() == [1, 3]
    assert ends.tolist() == [2, 3]
