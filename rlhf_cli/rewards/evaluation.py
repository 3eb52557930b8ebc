"""Evaluation metrics from scored responses: accuracy, pass@k, maj@k, rewards and lengths, with confidence intervals.

Confidence intervals are over prompts: each prompt contributes one value, the mean over the samples. Responses with a
failed reward are counted and excluded from every metric that depends on rewards. The formulas are in
algorithms/answer_statistics.py.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from rlhf_cli.algorithms.answer_statistics import (
    STEP_AGGREGATIONS,
    best_at_k,
    majority_at_k,
    mean_interval,
    pass_at_k,
    share_interval,
)
from rlhf_cli.rewards.records import Score, Status

_QUALITY = ("accuracy", "pass@", "maj@", "prm_", "reward")
"""Prefixes of metrics that measure quality. Only these log their confidence intervals."""
_VERDICTS: tuple[Status, ...] = ("correct", "wrong", "invalid")


@dataclass(frozen=True, slots=True)
class Answer:
    """One scored response.

    - `length`: number of tokens.
    - `truncated`: the response reached the token limit.
    - `steps`: step probabilities from a process reward model; None without one.
    """

    score: Score
    length: int
    truncated: bool
    steps: tuple[float, ...] | None = None


_Prompts = Sequence[Sequence[Answer]]
"""Scored samples by prompt."""


@dataclass(frozen=True, slots=True)
class Figure:
    """A mean over `num_prompts` prompts with a 95 % confidence interval, or None if it cannot be computed."""

    value: float
    interval: tuple[float, float] | None
    num_prompts: int


@dataclass(frozen=True)
class Evaluation:
    """Metrics by name. `counts` holds the ones without a confidence interval."""

    figures: dict[str, Figure]
    counts: dict[str, float]

    @property
    def metrics(self) -> dict[str, float]:
        """Flat metrics to log. `accuracy_low` and `accuracy_high` bound the confidence interval for `accuracy`."""
        metrics: dict[str, float] = {}
        for name, figure in self.figures.items():
            metrics[name] = figure.value
            if figure.interval is not None and is_quality(name):
                metrics[f"{name}_low"], metrics[f"{name}_high"] = figure.interval
        return metrics | self.counts


def evaluate_answers(
    prompts: _Prompts, *, ks: Sequence[int] = (), pass_score: float | None = None, aggregations: Sequence[str] = ()
) -> Evaluation:
    """Compute evaluation metrics.

    A response is correct if the score is at least `pass_score` or, without `pass_score`, if the verifier accepts it.
    With neither a verifier nor `pass_score`, only rewards and lengths are computed.

    - `accuracy`: avg@n, the fraction of correct samples.
    - `pass@k`, `maj@k`: for each k in `ks`, over prompts with at least k judged samples.
    - `prm_min@k` etc.: best-of-k by step probabilities, for each name in `aggregations`.
    - `reward`: mean score.
    - `truncated`, `response_length`: include responses with a failed reward.
    """
    scored = [[answer.score for answer in samples if answer.score.value is not None] for samples in prompts]
    figures = _figures_of_verdicts([samples for samples in scored if samples], ks, pass_score)
    figures |= _figures_of_steps(prompts, ks, pass_score, aggregations)
    figures |= _means(
        {
            "reward": ([_mean([score.value or 0.0 for score in samples]) for samples in scored if samples], False),
            "truncated": ([_mean([answer.truncated for answer in samples]) for samples in prompts], True),
            "response_length": ([_mean([answer.length for answer in samples]) for samples in prompts], False),
        }
    )
    answers = [answer for samples in prompts for answer in samples]
    num_failed = sum(answer.score.value is None for answer in answers)
    counts = {
        "response_length_max": float(max((answer.length for answer in answers), default=0)),
        "reward_failed": num_failed / len(answers) if answers else 0.0,
        "num_prompts": float(len(prompts)),
        "num_responses": float(len(answers)),
        "num_failed": float(num_failed),
    }
    return Evaluation(figures, counts)


def is_quality(metric: str) -> bool:
    """Return whether higher values of a metric are better."""
    return metric.startswith(_QUALITY)


def pass_rate(samples: Sequence[Answer], *, pass_score: float | None = None) -> float | None:
    """Return the fraction of correct samples for one prompt, or None if no sample was judged."""
    correct = [is_right for answer in samples if (is_right := _is_right(answer.score, pass_score)) is not None]
    return _mean(correct) if correct else None


def by_source(prompts: Iterable[tuple[str, Sequence[Answer]]]) -> dict[str, list[Sequence[Answer]]]:
    """Group prompts by dataset. With two or more datasets, the first entry, `_ALL`, holds every prompt."""
    by_name: dict[str, list[Sequence[Answer]]] = {}
    for source, samples in prompts:
        by_name.setdefault(source, []).append(samples)
    everything = [samples for of_source in by_name.values() for samples in of_source]
    return {_ALL: everything, **by_name} if len(by_name) > 1 else by_name


_ALL = "all"
"""Name for all datasets combined."""


def _figures_of_verdicts(prompts: list[list[Score]], ks: Sequence[int], pass_score: float | None) -> dict[str, Figure]:
    """Compute accuracy, pass@k, maj@k and the rate of invalid responses. Empty if no response was judged."""
    judged: list[list[tuple[Score, bool]]] = []
    for samples in prompts:
        pairs = [(score, is_right) for score in samples if (is_right := _is_right(score, pass_score)) is not None]
        judged += [pairs] if pairs else []
    if not judged:
        return {}
    rights = [[is_right for _, is_right in samples] for samples in judged]
    keys = [[score.answer for score, _ in samples] for samples in judged]
    shares: dict[str, tuple[list[float], bool]] = {"accuracy": ([_mean(samples) for samples in rights], True)}
    for k in ks:
        shares[f"pass@{k}"] = ([pass_at_k(len(r), sum(r), k=k) for r in rights if len(r) >= k], True)
    # A majority vote compares normalized answers, which only verifiers provide.
    if any(key is not None for samples in keys for key in samples):
        for k in ks:
            votes = [majority_at_k(a, r, k=k) for a, r in zip(keys, rights, strict=True) if len(r) >= k]
            shares[f"maj@{k}"] = (votes, True)
    if any(score.status in _VERDICTS for samples in prompts for score in samples):
        shares["invalid"] = ([_mean([score.status == "invalid" for score in samples]) for samples in prompts], True)
    return _means(shares)


def _figures_of_steps(
    prompts: _Prompts, ks: Sequence[int], pass_score: float | None, aggregations: Sequence[str]
) -> dict[str, Figure]:
    """Compute best-of-k accuracy by step probabilities, over prompts with at least k judged samples."""
    judged: list[list[tuple[tuple[float, ...], bool]]] = []
    for samples in prompts:
        rated = ((answer.steps, _is_right(answer.score, pass_score)) for answer in samples)
        judged.append([(steps, right) for steps, right in rated if steps and right is not None])
    shares: dict[str, tuple[list[float], bool]] = {}
    for name in aggregations:
        value_of = STEP_AGGREGATIONS[name]
        # Best of one sample equals accuracy.
        for k in (k for k in ks if k > 1):
            enough = [samples for samples in judged if len(samples) >= k]
            chosen = [best_at_k([value_of(s) for s, _ in p], [right for _, right in p], k=k) for p in enough]
            shares[f"prm_{name}@{k}"] = (chosen, True)
    return _means(shares)


def _is_right(score: Score, pass_score: float | None) -> bool | None:
    """Return whether the response is correct, or None if unknown."""
    if score.value is None:
        return None
    if pass_score is not None:
        return score.value >= pass_score
    return score.status == "correct" if score.status in _VERDICTS else None


def _means(values: Mapping[str, tuple[list[float], bool]]) -> dict[str, Figure]:
    """Compute the mean and confidence interval for each non-empty list. The flag marks fractions in [0, 1]."""
    interval: dict[bool, Callable[[Sequence[float]], tuple[float, float] | None]] = {
        True: share_interval,
        False: mean_interval,
    }
    return {
        name: Figure(_mean(of_prompts), interval[is_share](of_prompts), len(of_prompts))
        for name, (of_prompts, is_share) in values.items()
        if of_prompts
    }


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
