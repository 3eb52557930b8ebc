"""Model estimates from sampled answers: unbiased pass@k and maj@k, and 95% intervals over prompts.

Plain numbers in and out. Correctness, and the exclusion of answers that could not be judged, are decided in
rewards/evaluation.py.
"""

import math
from collections import Counter
from collections.abc import Callable, Sequence
from fractions import Fraction
from itertools import groupby
from operator import itemgetter
from statistics import NormalDist, stdev

_Z = 1.959964
"""Standard normal quantile for a two-sided 95% interval."""
_MOST_SUMS = 20_000
"""Above this number of distinct sums, p-values of sign flips use the normal approximation."""


def pass_at_k(num_samples: int, num_correct: int, *, k: int) -> float:
    """Estimate the probability that at least one of `k` samples is correct: `1 - C(n-c, k) / C(n, k)`, c correct of n.

    Unbiased (Chen et al. 2021, arXiv 2107.03374, equation 1). Computed as the product of `1 - k/i` over n-c < i <= n,
    which avoids large binomials. Raises ValueError for fewer than k samples.
    """
    _check_k(num_samples, k)
    # Each choice of k samples includes a correct one. The product below would need a negative factor.
    if num_samples - num_correct < k:
        return 1.0
    return 1.0 - math.prod(1.0 - k / i for i in range(num_samples - num_correct + 1, num_samples + 1))


def majority_at_k(answers: Sequence[str | None], correct: Sequence[bool], *, k: int) -> float:
    """Compute the probability that the most frequent answer among `k` samples is correct, over all choices of k.

    Tied answers split the vote: the value is their mean correctness. None is not a vote; without votes the value is 0.
    An answer judged both ways counts as its fraction of correct samples.

    Exact, by counting: for each correct answer and each vote count m, count the choices where no other answer exceeds m
    votes, by the number of ties at m. Raises ValueError for fewer than k samples.
    """
    _check_k(len(answers), k)
    votes = Counter(answer for answer in answers if answer is not None)
    silent = len(answers) - votes.total()
    right = Counter(
        answer for answer, is_right in zip(answers, correct, strict=True) if is_right and answer is not None
    )
    # Fractions: binomials over hundreds of samples exceed float64 precision, and ties need exact equality.
    total = Fraction(0)
    for answer, num_right in right.items():
        other_counts = [count for other, count in votes.items() if other != answer]
        won = sum(
            (math.comb(votes[answer], m) * _shared(other_counts, silent, m=m, left=k - m))
            for m in range(1, min(k, votes[answer]) + 1)
        )
        total += Fraction(num_right, votes[answer]) * won
    return float(total / math.comb(len(answers), k))


def best_at_k(values: Sequence[float], correct: Sequence[bool], *, k: int) -> float:
    """Compute the probability that the highest-valued sample among `k` is correct, over all choices of k.

    Samples with equal values split the choice. The highest of k is in a group of g equal values, with m samples below
    it, in `C(m + g, k) - C(m, k)` choices. Raises ValueError for fewer than k samples.
    """
    _check_k(len(values), k)
    total, num_below = Fraction(0), 0
    # groupby merges only neighbors, so sort first. Ties must be one group: they split the choice.
    for _, group in groupby(sorted(zip(values, correct, strict=True)), key=itemgetter(0)):
        rights = [is_right for _, is_right in group]
        ways = math.comb(num_below + len(rights), k) - math.comb(num_below, k)
        total += ways * Fraction(sum(rights), len(rights))
        num_below += len(rights)
    return float(total / math.comb(len(values), k))


STEP_AGGREGATIONS: dict[str, Callable[[Sequence[float]], float]] = {
    "min": min,
    "prod": math.prod,
    "last": itemgetter(-1),
    "mean": lambda scores: math.fsum(scores) / len(scores),
}
"""Reduce step probabilities to one response value (min, prod: arXiv 2305.20050)."""


def _shared(other_counts: Sequence[int], silent: int, *, m: int, left: int) -> Fraction:
    """Count choices of `left` samples from other answers and non-votes with at most m votes for any other answer.

    Each choice is weighted by 1 / (1 + t) if t other answers also have m votes.
    """
    # Dynamic programming over answers: the number of (ties, size) states is polynomial, the number of choices is not.
    ways = {(0, size): math.comb(silent, size) for size in range(min(silent, left) + 1)}  # (t, samples chosen)
    for count in other_counts:
        after: dict[tuple[int, int], int] = {}
        for (ties, size), number in ways.items():
            for chosen in range(min(count, m, left - size) + 1):
                place = (ties + (chosen == m), size + chosen)
                after[place] = after.get(place, 0) + number * math.comb(count, chosen)
        ways = after
    return sum((Fraction(number, 1 + ties) for (ties, size), number in ways.items() if size == left), Fraction(0))


def wilson_interval(share: float, num_trials: int) -> tuple[float, float]:
    """Compute the 95% score interval for a proportion (Wilson 1927), reliable near 0 and 1 and for few trials."""
    centre = (share + _Z * _Z / (2 * num_trials)) / (1 + _Z * _Z / num_trials)
    spread = math.sqrt(share * (1 - share) / num_trials + _Z * _Z / (4 * num_trials**2))
    half = _Z * spread / (1 + _Z * _Z / num_trials)
    return max(0.0, centre - half), min(1.0, centre + half)


def mean_interval(values: Sequence[float]) -> tuple[float, float] | None:
    """Compute the 95% interval for a mean over prompts by the central limit theorem; None for a single prompt.

    Samples for the same prompt are not independent trials, so pass the mean per prompt (Miller 2024, arXiv 2411.00640).
    """
    if len(values) < 2:
        return None
    mean = math.fsum(values) / len(values)
    variance = math.fsum((value - mean) ** 2 for value in values) / (len(values) - 1)
    half = _Z * math.sqrt(variance / len(values))
    return mean - half, mean + half


def share_interval(shares: Sequence[float]) -> tuple[float, float] | None:
    """Compute the 95% interval for a mean proportion, clamped to [0, 1]: Wilson if all are 0 or 1, else normal."""
    if all(share in (0.0, 1.0) for share in shares):
        return wilson_interval(sum(shares) / len(shares), len(shares))
    interval = mean_interval(shares)
    return None if interval is None else (max(0.0, interval[0]), min(1.0, interval[1]))


def sign_flip_p_value(differences: Sequence[float]) -> float:
    """Compute the two-sided p-value of a sign-flip test: the probability that the sum of the differences is at least as
    far from 0 if each difference has a random sign.

    Exact as long as there are few distinct sums, else by the normal approximation. If all differences are -1, 0 or 1,
    this is the exact McNemar test.
    """
    sizes = [abs(difference) for difference in differences if difference]
    observed = abs(math.fsum(differences))
    sums: dict[float, float] = {0.0: 1.0}  # probability by sum
    for size in sizes:
        after: dict[float, float] = {}
        for total, probability in sums.items():
            # Rounded, so that sums which differ by rounding errors are one.
            for other in (round(total + size, 9), round(total - size, 9)):
                after[other] = after.get(other, 0.0) + probability / 2
        sums = after
        if len(sums) > _MOST_SUMS:
            spread = math.sqrt(math.fsum(one * one for one in sizes))
            return 2 * NormalDist().cdf(-observed / spread)
    far = (probability for total, probability in sums.items() if abs(total) >= observed - 1e-8)
    return min(1.0, math.fsum(far))


def prompts_needed(differences: Sequence[float], size: float) -> int | None:
    """Return the number of prompts with which a mean difference of `size` is found with 80% power at the 5% level.

    `((z_0.975 + z_0.8) * s / size)^2`, with the standard deviation s of the differences (Miller 2024, arXiv 2411.00640,
    section 5). None if the differences do not determine it: fewer than two, or all equal.
    """
    spread = stdev(differences) if len(differences) > 1 else 0.0
    if not spread or not size:
        return None
    return math.ceil(((_Z + NormalDist().inv_cdf(0.8)) * spread / size) ** 2)


def _check_k(num_samples: int, k: int) -> None:
    if not 1 <= k <= num_samples:
        raise ValueError(f"k {k} must be from 1 to the number of samples, {num_samples}")
