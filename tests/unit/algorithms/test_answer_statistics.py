"""pass@k, maj@k and confidence intervals, compared with enumeration, simulation and manual calculations."""

import itertools
import math
import random
from collections import Counter

import pytest

from rlhf_cli.algorithms.answer_statistics import (
    STEP_AGGREGATIONS,
    best_at_k,
    majority_at_k,
    mean_interval,
    pass_at_k,
    prompts_needed,
    share_interval,
    sign_flip_p_value,
    wilson_interval,
)
from rlhf_cli.config import scoring


@pytest.mark.parametrize("num_samples", [1, 2, 5, 7])
def test_pass_at_k_is_the_share_of_choices_with_a_right_one(num_samples):
    for num_correct in range(num_samples + 1):
        correct = [i < num_correct for i in range(num_samples)]
        for k in range(1, num_samples + 1):
            choices = [any(choice) for choice in itertools.combinations(correct, k)]
            assert pass_at_k(num_samples, num_correct, k=k) == pytest.approx(sum(choices) / len(choices), abs=1e-12)


def test_pass_at_k_is_exact_where_binomials_overflow_a_float():
    assert math.comb(4000, 2000) > 10**1000
    exact = 1 - math.comb(3990, 2000) / math.comb(4000, 2000)  # Python divides these integers exactly
    assert pass_at_k(4000, 10, k=2000) == pytest.approx(exact, rel=1e-12)


@pytest.mark.parametrize("k", [0, 4])
def test_more_samples_than_there_are_cannot_be_asked_for(k):
    with pytest.raises(ValueError, match="from 1 to the number of samples, 3"):
        pass_at_k(3, 1, k=k)
    with pytest.raises(ValueError, match="from 1 to the number of samples, 3"):
        majority_at_k(["a"] * 3, [True] * 3, k=k)


def vote(answers, correct):
    """Return the value of a vote; ties are shared."""
    counts = Counter(answer for answer in answers if answer is not None)
    if not counts:
        return 0.0
    winners = [answer for answer, count in counts.items() if count == max(counts.values())]
    values = []
    for winner in winners:
        judged = [right for answer, right in zip(answers, correct, strict=True) if answer == winner]
        values.append(sum(judged) / len(judged))
    return sum(values) / len(values)


def test_majority_at_k_is_the_mean_vote_over_all_choices():
    generator = random.Random(0)
    for _ in range(60):
        size = generator.randint(1, 7)
        answers = generator.choices(["a", "b", "c", "d", None], weights=[4, 3, 1, 1, 2], k=size)
        right = set(generator.sample("abcd", generator.randint(0, 3)))  # several spellings may be right
        correct = [answer in right for answer in answers]
        for k in range(1, size + 1):
            chosen = itertools.combinations(range(size), k)
            votes = [vote([answers[i] for i in c], [correct[i] for i in c]) for c in chosen]
            assert majority_at_k(answers, correct, k=k) == pytest.approx(sum(votes) / len(votes), abs=1e-12)


@pytest.mark.parametrize(
    ("answers", "right", "value"),
    [
        (["1", "1", "2"], "1", 1.0),
        (["1", "2"], "1", 0.5),  # a tie, in either order
        (["2", "1"], "1", 0.5),
        (["1", "2", "3", None, None, None], "1", 1 / 3),  # a missing answer has no vote
        ([None, None], "1", 0.0),
        (["2", "2", "1"], "1", 0.0),
    ],
)
def test_ties_share_the_vote(answers, right, value):
    assert majority_at_k(answers, [answer == right for answer in answers], k=len(answers)) == pytest.approx(value)


def test_an_answer_judged_both_ways_counts_by_its_share():
    assert majority_at_k(["1", "1", "1", "2"], [True, True, False, False], k=4) == pytest.approx(2 / 3)


def test_one_vote_is_the_share_of_right_answers():
    answers, correct = ["1", "1", "2", None, "3"], [True, True, False, False, False]
    assert majority_at_k(answers, correct, k=1) == pytest.approx(0.4)


def test_majorities_of_many_samples_take_no_time_to_count():
    answers = [str(i % 40) for i in range(64)]
    value = majority_at_k(answers, [answer == "0" for answer in answers], k=32)
    assert 1 / 64 < value < 1 / 20  # one of 24 answers occurs twice among 40


def test_wilsons_interval_by_hand():
    low, high = wilson_interval(0.5, 10)
    # centre 0.5, half width 1.96 * sqrt(0.025 + 1.96^2 / 400) / (1 + 1.96^2 / 10)
    assert (low, high) == pytest.approx((0.2366, 0.7634), abs=1e-4)
    assert wilson_interval(0.0, 10) == pytest.approx((0.0, 0.2775), abs=1e-4)
    assert wilson_interval(1.0, 30)[0] == pytest.approx(0.8865, abs=1e-4)


def test_the_interval_of_a_mean_by_hand():
    # mean 0.5, unbiased variance 1/6: half width 1.96 * sqrt(1/6 / 4)
    assert mean_interval([0.0, 0.5, 0.5, 1.0]) == pytest.approx((0.1, 0.9), abs=2e-4)
    assert mean_interval([3.0]) is None


def test_shares_of_yes_and_no_have_wilsons_interval_and_others_stay_within_their_range():
    assert share_interval([1.0] * 9 + [0.0]) == pytest.approx(wilson_interval(0.9, 10))
    assert share_interval([1.0, 1.0, 1.0, 0.5]) == pytest.approx((0.63, 1.0), abs=1e-4)
    assert share_interval([0.5]) is None


def test_a_95_percent_interval_holds_the_truth_about_95_times_in_100():
    generator = random.Random(1)
    held = {"yes or no": 0, "shares": 0}
    for _ in range(1000):
        single = [float(generator.random() < 0.3) for _ in range(60)]
        shares = [sum(generator.random() < p for _ in range(8)) / 8 for p in generator.choices([0.1, 0.5], k=60)]
        for name, values in (("yes or no", single), ("shares", shares)):
            found = share_interval(values)
            assert found is not None
            held[name] += found[0] <= 0.3 <= found[1]
    assert all(920 <= count <= 975 for count in held.values()), held


@pytest.mark.parametrize("k", [1, 2, 3, 6])
def test_best_at_k_is_the_mean_over_all_choices_and_equal_values_share_it(k):
    values, correct = [3.0, 1.0, 3.0, 2.0, 1.0, 3.0], [True, True, False, False, False, True]
    means = []
    for chosen in itertools.combinations(range(6), k):
        highest = max(values[number] for number in chosen)
        best = [correct[number] for number in chosen if values[number] == highest]
        means.append(sum(best) / len(best))
    assert best_at_k(values, correct, k=k) == pytest.approx(sum(means) / len(means), abs=1e-12)


def test_steps_make_one_value_of_a_response():
    found = {name: value_of([0.9, 0.5, 0.8]) for name, value_of in STEP_AGGREGATIONS.items()}
    assert tuple(STEP_AGGREGATIONS) == scoring.STEP_AGGREGATIONS
    assert found == pytest.approx({"min": 0.5, "prod": 0.36, "last": 0.8, "mean": 2.2 / 3})


@pytest.mark.parametrize(
    ("differences", "expected"),
    [
        ([], 1.0),
        ([0.0, 0.0], 1.0),
        ([1.0, 1.0, 1.0], 2 / 8),
        ([1.0] * 5 + [-1.0, 0.0], 14 / 64),  # McNemar: 2 (C(6, 0) + C(6, 1)) / 2^6
        ([0.3, 0.2, 0.1], 2 / 8),
        ([0.1, 0.2, -0.3], 1.0),  # the sum is 0 but for rounding
    ],
)
def test_a_sign_flip_test_counts_the_signs_with_a_sum_as_far_from_zero(differences, expected):
    assert sign_flip_p_value(differences) == pytest.approx(expected, abs=1e-12)


def test_a_sign_flip_test_over_many_sums_is_close_to_the_count_of_random_signs():
    generator = random.Random(3)
    differences = [generator.gauss(0.4, 1) for _ in range(25)]
    observed = abs(sum(differences))
    flips = [abs(sum(generator.choice((-1, 1)) * one for one in differences)) >= observed for _ in range(20_000)]
    assert sign_flip_p_value(differences) == pytest.approx(sum(flips) / len(flips), abs=0.015)


def test_the_number_of_prompts_has_the_power_that_it_promises():
    # Mean 0.5 and standard deviation 1: (1.959964 + 0.841621)^2 / 0.5^2 = 31.4.
    assert prompts_needed([1.0, -1.0, 1.0, 1.0], 0.5) == 32
    assert prompts_needed([1.0, -1.0, 1.0, 1.0], 0.25) == 126
    assert prompts_needed([1.0, 1.0], 0.5) is None
    assert prompts_needed([1.0], 0.5) is None
    generator, found = random.Random(4), 0
    for _ in range(1000):
        interval = mean_interval([generator.gauss(0.25, 1) for _ in range(126)])
        assert interval is not None
        found += not interval[0] <= 0 <= interval[1]
    assert 770 <= found <= 840
