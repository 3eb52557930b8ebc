"""Group-relative advantages, length rewards, and the entropy controller."""

import statistics

import pytest
import torch

from rlhf_cli.algorithms.advantages import returns_to_go
from rlhf_cli.algorithms.entropy import EntropyState, next_entropy_state
from rlhf_cli.algorithms.estimators.estimator import Advantages
from rlhf_cli.algorithms.groups import (
    best_over_second,
    group_normalised,
    less_group_mean,
    less_mean_of_others,
    over_batch_std,
    over_group_mean,
)
from rlhf_cli.algorithms.shaping import overlong_penalty, stop_properly

COMPARISONS = (less_group_mean, less_mean_of_others, group_normalised, best_over_second)


def slow(scores: list[float], name: str) -> list[float]:
    """Compute a group of at least two responses by the definitions."""
    mean, std = statistics.mean(scores), statistics.stdev(scores)
    if name == "less_group_mean":
        return [score - mean for score in scores]
    if name == "less_mean_of_others":
        return [score - statistics.mean(scores[:i] + scores[i + 1 :]) for i, score in enumerate(scores)]
    if name == "group_normalised":
        return [(score - mean) / (std + 1e-6) for score in scores]
    best, second = sorted(scores, reverse=True)[:2]
    return [(best - second) / (std + 1e-6) if score == best else 0.0 for score in scores]


@pytest.mark.parametrize("compare", COMPARISONS, ids=lambda function: function.__name__)
def test_comparisons_equal_a_loop_over_groups_of_any_size_in_any_order(compare) -> None:
    generator = torch.Generator().manual_seed(4)
    groups = [torch.randn(size, generator=generator).tolist() for size in (2, 3, 8, 5)]
    numbers = [70, 3, 0, 11]
    rows = [
        (number, score, expected)
        for number, scores in zip(numbers, groups, strict=True)
        for score, expected in zip(scores, slow(scores, compare.__name__), strict=True)
    ]
    rows = [rows[i] for i in torch.randperm(len(rows), generator=generator)]
    groups_B, scores_B, expected_B = (torch.tensor(column) for column in zip(*rows, strict=True))
    torch.testing.assert_close(compare(scores_B, groups_B), expected_B, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("compare", "expected"),
    [
        (less_group_mean, [0.75, -0.25, -0.25, -0.25]),
        (less_mean_of_others, [1.0, -1 / 3, -1 / 3, -1 / 3]),
        (group_normalised, [1.5, -0.5, -0.5, -0.5]),  # the unbiased std of 1 0 0 0 is 0.5
        (best_over_second, [2.0, 0.0, 0.0, 0.0]),
    ],
)
def test_one_right_of_four_by_hand(compare, expected) -> None:
    found_B = compare(torch.tensor([1.0, 0.0, 0.0, 0.0]), torch.zeros(4, dtype=torch.int64))
    torch.testing.assert_close(found_B, torch.tensor(expected), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("compare", COMPARISONS, ids=lambda function: function.__name__)
def test_a_response_that_is_alone_with_its_prompt_gets_zero(compare) -> None:
    found_B = compare(torch.tensor([5.0, 1.0, 2.0]), torch.tensor([9, 4, 4]))
    assert found_B[0] == 0.0
    assert found_B[2] > 0.0
    assert compare(torch.zeros(0), torch.zeros(0, dtype=torch.int64)).tolist() == []


def test_groups_of_equal_rewards_have_exactly_no_advantage() -> None:
    scores_B, groups_B = torch.full((7,), 0.1), torch.tensor([0, 0, 0, 1, 1, 1, 1])
    assert group_normalised(scores_B, groups_B).tolist() == [0.0] * 7
    assert best_over_second(scores_B, groups_B).tolist() == [0.0] * 7


def test_a_batch_std_keeps_the_differences_between_groups() -> None:
    scores_B, groups_B = torch.tensor([0.0, 1.0, 0.5, 0.6]), torch.tensor([0, 0, 1, 1])
    std = statistics.stdev([0.0, 1.0, 0.5, 0.6])
    expected = [score / std for score in (-0.5, 0.5, -0.05, 0.05)]
    assert over_batch_std(scores_B, groups_B).tolist() == pytest.approx(expected, rel=1e-5)
    assert over_batch_std(torch.ones(1), torch.zeros(1, dtype=torch.int64)).tolist() == [0.0]


def test_a_group_mean_weighs_prompts_by_how_rarely_they_are_solved() -> None:
    scores_B, groups_B = torch.tensor([1.0, 0.0, 0.0, 0.0, 1.0, 1.0, 0.0, 0.0]), torch.tensor([0] * 4 + [1, 1, 2, 2])
    assert over_group_mean(scores_B, groups_B).tolist() == [3.0, -1.0, -1.0, -1.0, 0.0, 0.0, 0.0, 0.0]


def test_two_best_responses_have_no_lead() -> None:
    assert best_over_second(torch.tensor([1.0, 1.0, 0.0]), torch.zeros(3, dtype=torch.int64)).tolist() == [0.0] * 3


def test_returns_to_go_are_discounted_sums_of_each_response() -> None:
    returns_N = returns_to_go(torch.tensor([1.0, 0.0, 4.0, 8.0]), torch.tensor([0, 3, 4]), gamma=0.5)
    assert returns_N.tolist() == [2.0, 2.0, 4.0, 8.0]


def test_an_advantage_of_a_response_is_that_of_each_token() -> None:
    advantages = Advantages(per_response_B=torch.tensor([1.0, 2.0, 3.0]))
    assert advantages.at_tokens(torch.tensor([0, 2, 2, 3])).tolist() == [1.0, 1.0, 3.0]


def test_the_overlong_penalty_falls_in_a_line_over_the_buffer() -> None:
    penalty_B = overlong_penalty(torch.tensor([1, 80, 85, 90, 100]), max_length=100, buffer_len=20, factor=0.5)
    torch.testing.assert_close(penalty_B, torch.tensor([0.0, 0.0, -0.125, -0.25, -0.5]))


@pytest.mark.parametrize(("coef", "expected"), [(0.5, [1.0, 2.0, -0.5]), (0.0, [0.0, 2.0, 0.0]), (-3.0, [-3, 2.0, -3])])
def test_cut_responses_keep_a_share_of_their_score_or_get_a_fixed_one(coef, expected) -> None:
    scores_B, truncated_B = torch.tensor([2.0, 2.0, -1.0]), torch.tensor([True, False, True])
    assert stop_properly(scores_B, truncated_B, coef=coef).tolist() == expected


def test_the_weight_of_the_entropy_follows_the_measured_one() -> None:
    settings = {"target": 0.2, "delta": 1e-3, "max_coef": 2.5e-3}
    state, weights = EntropyState(0.0), []
    for entropy in (0.1, 0.1, 0.1, 0.2, 0.3, 0.3, 0.3, 0.1):
        state = next_entropy_state(state, entropy=entropy, **settings)
        weights.append((round(state.coef, 6), round(state.weight, 6)))
    assert weights == [
        (0.001, 0.001),
        (0.002, 0.002),
        (0.0025, 0.0025),  # capped at the limit
        (0.0015, 0.0015),  # at the target it decreases but still applies
        (0.0005, 0.0),  # above the target it decreases and does not apply
        (0.0, 0.0),
        (0.0, 0.0),
        (0.001, 0.001),
    ]


def test_without_a_target_the_weight_of_the_entropy_is_fixed() -> None:
    state = EntropyState(0.5)
    assert next_entropy_state(state, entropy=9.0, target=None, delta=1.0, max_coef=0.1) is state
    assert state.weight == 0.5
