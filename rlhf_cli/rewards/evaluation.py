"""Evaluation figures of a model from judged responses: accuracy, pass@k, maj@k, rewards and lengths, with intervals.

Prompts are the random sample: each gives one value, its mean over its samples, and intervals are over prompts.
Responses whose reward failed are counted and left out of everything that a reward decides. The formulas are in
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

QUALITY = ("accuracy", "pass@", "maj@", "prm_", "reward")  # how the names of quality figures begin
VERDICTS: tuple[Status, ...] = ("correct", "wrong", "invalid")


@dataclass(frozen=True, slots=True)
class Answer:
    """One judged response. `length` is in tokens; `truncated` marks a response that was cut at the limit.

    `steps` are the probabilities of its steps by a process reward model, None without one.
    """

    score: Score
    length: int
    truncated: bool
    steps: tuple[float, ...] | None = None


Prompts = Sequence[Sequence[Answer]]
"""The samples of each prompt."""


@dataclass(frozen=True, slots=True)
class Figure:
    """A mean over `num_prompts` prompts and its 95 % interval, None if no interval can be computed."""

    value: float
    interval: tuple[float, float] | None
    num_prompts: int


@dataclass(frozen=True)
class Evaluation:
    """All figures of some prompts by name; those without an interval are in `counts`."""

    figures: dict[str, Figure]
    counts: dict[str, float]

    @property
    def metrics(self) -> dict[str, float]:
        """All values by name; `accuracy_low` and `accuracy_high` are the ends of the interval of `accuracy`."""
        metrics: dict[str, float] = {}
        for name, figure in self.figures.items():
            metrics[name] = figure.value
            if figure.interval is not None and name.startswith(QUALITY):
                metrics[f"{name}_low"], metrics[f"{name}_high"] = figure.interval
        return metrics | self.counts


def evaluate_answers(
    prompts: Prompts, *, ks: Sequence[int] = (), pass_score: float | None = None, aggregations: Sequence[str] = ()
) -> Evaluation:
    """Return the figures of these prompts.

    `accuracy` is avg@n, the share of right samples; `pass@k` and `maj@k` for each of `ks` are over the prompts that
    have k judged samples; `reward` is the mean score, `truncated` and `response_length` count failed ones too. A
    response is right by the verifier's verdict, or with a score of at least `pass_score`; without either, only rewards
    and lengths are computed. `prm_min@k` and so on are for `aggregations` of the probabilities of steps.
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


def pass_rate(samples: Sequence[Answer], *, pass_score: float | None = None) -> float | None:
    """Return the share of a prompt's judged samples that are right; None if none was judged."""
    correct = [is_right for answer in samples if (is_right := _is_right(answer.score, pass_score)) is not None]
    return _mean(correct) if correct else None


def by_source(prompts: Iterable[tuple[str, Sequence[Answer]]]) -> dict[str, list[Sequence[Answer]]]:
    """Return the samples of each prompt by the data set it is from; with several data sets, all prompts together come
    first.
    """
    found: dict[str, list[Sequence[Answer]]] = {}
    for source, samples in prompts:
        found.setdefault(source, []).append(samples)
    everything = [samples for of_source in found.values() for samples in of_source]
    return {ALL: everything, **found} if len(found) > 1 else found


ALL = "all"
"""Name of several data sets together."""


def _figures_of_verdicts(prompts: list[list[Score]], ks: Sequence[int], pass_score: float | None) -> dict[str, Figure]:
    """Accuracy, pass@k and maj@k, and the share of responses without an answer; empty if nothing was judged."""
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
    if any(key is not None for samples in keys for key in samples):
        for k in ks:
            votes = [majority_at_k(a, r, k=k) for a, r in zip(keys, rights, strict=True) if len(r) >= k]
            shares[f"maj@{k}"] = (votes, True)
    if any(score.status in VERDICTS for samples in prompts for score in samples):
        shares["invalid"] = ([_mean([score.status == "invalid" for score in samples]) for samples in prompts], True)
    return _means(shares)


def _figures_of_steps(
    prompts: Prompts, ks: Sequence[int], pass_score: float | None, aggregations: Sequence[str]
) -> dict[str, Figure]:
    """Compute how often the sample with the best steps is right, over the prompts that have k judged samples."""
    judged: list[list[tuple[tuple[float, ...], bool]]] = []
    for samples in prompts:
        rated = ((answer.steps, _is_right(answer.score, pass_score)) for answer in samples)
        judged.append([(steps, right) for steps, right in rated if steps and right is not None])
    shares: dict[str, tuple[list[float], bool]] = {}
    for name in aggregations:
        value_of = STEP_AGGREGATIONS[name]
        for k in (k for k in ks if k > 1):
            enough = [samples for samples in judged if len(samples) >= k]
            chosen = [best_at_k([value_of(s) for s, _ in p], [right for _, right in p], k=k) for p in enough]
            shares[f"prm_{name}@{k}"] = (chosen, True)
    return _means(shares)


def _is_right(score: Score, pass_score: float | None) -> bool | None:
    """Return whether the response is right; None if that is unknown."""
    if score.value is None:
        return None
    if pass_score is not None:
        return score.value >= pass_score
    return score.status == "correct" if score.status in VERDICTS else None


def _means(values: Mapping[str, tuple[list[float], bool]]) -> dict[str, Figure]:
    """Compute the mean of each list that is not empty, as a share if its flag is True."""
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
