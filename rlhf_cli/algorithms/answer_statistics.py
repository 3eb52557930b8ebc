"""Estimates about a model from samples of answers: pass@k and maj@k without bias, and 95 % intervals over prompts.

Plain numbers in and out. Which answers count as right, and which are left out because nobody could judge them, is
decided before (rewards/evaluation.py).
"""

import math
from collections import Counter
from collections.abc import Callable, Sequence
from fractions import Fraction
from itertools import groupby
from operator import itemgetter

Z = 1.959964
"""Standard normal quantile of a two-sided interval of 95 %."""


def pass_at_k(num_samples: int, num_correct: int, *, k: int) -> float:
    """Return the probability that at least one of `k` samples is right: `1 - C(n-c, k) / C(n, k)` for c right ones of
    n.

    Unbiased (Chen et al. 2021, arXiv 2107.03374, equation 1), as the product of `1 - k/i` over n-c < i <= n, so that no
    binomial is ever formed. Raises ValueError for fewer than k samples.
    """
    _check_k(num_samples, k)
    if num_samples - num_correct < k:
        return 1.0
    return 1.0 - math.prod(1.0 - k / i for i in range(num_samples - num_correct + 1, num_samples + 1))


def majority_at_k(answers: Sequence[str | None], correct: Sequence[bool], *, k: int) -> float:
    """Return the probability that the most frequent answer among `k` of the samples is right, over all choices of k.

    Answers that are equally frequent share the vote: its value is the mean over them. None is no vote; if no sample
    votes, the value is 0. An answer that was judged both ways counts with the share of its samples that are right.
    Exact, by counting: for each right answer and each number m of its votes, in how many choices the others have at
    most m, and how many of them have just m. Raises ValueError for fewer than k samples.
    """
    _check_k(len(answers), k)
    votes = Counter(answer for answer in answers if answer is not None)
    silent = len(answers) - votes.total()
    right = Counter(
        answer for answer, is_right in zip(answers, correct, strict=True) if is_right and answer is not None
    )
    total = Fraction(0)
    for answer, num_right in right.items():
        others = [count for other, count in votes.items() if other != answer]
        won = sum(
            (math.comb(votes[answer], m) * _shared(others, silent, m=m, left=k - m))
            for m in range(1, min(k, votes[answer]) + 1)
        )
        total += Fraction(num_right, votes[answer]) * won
    return float(total / math.comb(len(answers), k))


def best_at_k(values: Sequence[float], correct: Sequence[bool], *, k: int) -> float:
    """Return the probability that the sample with the highest value among `k` is right, over all choices of k.

    Samples with equal values share the choice. The highest of k is in a group of g equal values above m others in
    `C(m + g, k) - C(m, k)` choices. Raises ValueError for fewer than k samples.
    """
    _check_k(len(values), k)
    total, num_below = Fraction(0), 0
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
"""From the probabilities of a response's steps to one value of the response (min, prod: arXiv 2305.20050)."""


def _shared(others: Sequence[int], silent: int, *, m: int, left: int) -> Fraction:
    """Return the choices of `left` samples from others and silent ones in which no other answer has more than m votes,
    each counted as one of the `1 + t` answers that have m, where t others have as many.
    """
    ways = {(0, size): math.comb(silent, size) for size in range(min(silent, left) + 1)}  # (t, samples chosen)
    for count in others:
        after: dict[tuple[int, int], int] = {}
        for (ties, size), number in ways.items():
            for chosen in range(min(count, m, left - size) + 1):
                place = (ties + (chosen == m), size + chosen)
                after[place] = after.get(place, 0) + number * math.comb(count, chosen)
        ways = after
    return sum((Fraction(number, 1 + ties) for (ties, size), number in ways.items() if size == left), Fraction(0))


def wilson_interval(share: float, num_trials: int) -> tuple[float, float]:
    """Return the 95 % score interval of a share (Wilson 1927), which stays sensible near 0 and 1 and for few trials."""
    centre = (share + Z * Z / (2 * num_trials)) / (1 + Z * Z / num_trials)
    spread = math.sqrt(share * (1 - share) / num_trials + Z * Z / (4 * num_trials**2))
    half = Z * spread / (1 + Z * Z / num_trials)
    return max(0.0, centre - half), min(1.0, centre + half)


def mean_interval(values: Sequence[float]) -> tuple[float, float] | None:
    """Return the 95 % interval of a mean over prompts by the central limit theorem; None for a single prompt.

    The samples of a prompt are no trials of their own: they enter as the prompt's mean (Miller 2024, arXiv 2411.00640).
    """
    if len(values) < 2:
        return None
    mean = math.fsum(values) / len(values)
    variance = math.fsum((value - mean) ** 2 for value in values) / (len(values) - 1)
    half = Z * math.sqrt(variance / len(values))
    return mean - half, mean + half


def share_interval(shares: Sequence[float]) -> tuple[float, float] | None:
    """Return the 95 % interval of mean shares: Wilson's if each is 0 or 1, else a mean's interval, cut to [0, 1]."""
    if all(share in (0.0, 1.0) for share in shares):
        return wilson_interval(sum(shares) / len(shares), len(shares))
    found = mean_interval(shares)
    return None if found is None else (max(0.0, found[0]), min(1.0, found[1]))


def _check_k(num_samples: int, k: int) -> None:
    if not 1 <= k <= num_samples:
        raise ValueError(f"k {k} must be from 1 to the number of samples, {num_samples}")
