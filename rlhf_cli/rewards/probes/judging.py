"""Judges a reward by its scores for responses of known quality.

Pure functions: runs/reward_probe.py scores the responses, runs/reward_probe_view.py prints the result.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean, median
from typing import Literal

from rlhf_cli.rewards.probes.responses import Form, Probe, Role
from rlhf_cli.rewards.records import Score

_EARNING: tuple[Role, ...] = ("right", "form", "spelling")
"""Roles of responses with the right answer only."""
_SIMILAR = 0.1
"""Relative difference from the best separation of right from wrong answers up to which a form is as good."""
_ROUNDING = 1e-9
_MAX_LUCK = 0.5
"""Share up to which paid answers, which may be right after all, are only noted."""


@dataclass(frozen=True, slots=True)
class Scored:
    """A probe with its score."""

    probe: Probe
    score: Score

    @property
    def value(self) -> float:
        """The reward; 0 for failed ones, which are never compared."""
        return self.score.value or 0.0


@dataclass(frozen=True, slots=True)
class Scale:
    """Rewards of the right and the wrong answer, by row, in the same form.

    Example: `Scale({0: 1.0, 1: 1.0}, {0: 0.0, 1: 0.0})` pays a response if it earns at least 0.5.
    """

    right: Mapping[int, float]
    wrong: Mapping[int, float]

    @property
    def typical(self) -> tuple[float, float]:
        """Medians of right and wrong answers; 0 if all failed."""
        return median(self.right.values() or [0.0]), median(self.wrong.values() or [0.0])

    def threshold(self, row: int) -> float:
        """Return the reward halfway from wrong to right; the typical one for rows that do not tell them apart."""
        own = self.right.get(row, 0.0), self.wrong.get(row, 0.0)
        right, wrong = own if own[0] > own[1] else self.typical
        return (right + wrong) / 2

    @property
    def tells(self) -> bool:
        """Whether right answers typically earn more than wrong ones."""
        right, wrong = self.typical
        return right > wrong


@dataclass(frozen=True, slots=True)
class Agreement:
    """Agreement with labels: share of pairs, right and wrong for the same row, in which the right one earns more.

    Equal rewards count half.
    """

    share: float
    num_pairs: int


@dataclass(frozen=True, slots=True)
class Line:
    """Result of one kind of probe.

    - `paid`: number of responses with a reward of at least halfway from a wrong to the right answer; None if the reward
      does not depend on the answer.
    - `level`: "fault" needs a change, "note" is for you to judge.
    - `cases`: the responses that caused the level.
    """

    role: Role
    name: str
    count: int
    num_failed: int
    paid: int | None
    mean: float | None
    parts: dict[str, float]
    level: Literal["", "note", "fault"] = ""
    says: str = ""
    cases: list[Scored] = field(default_factory=list)


def best_form(trials: Mapping[Form, Scale], wanted: Form | None) -> Form:
    """Return the form that separates right from wrong answers best; of similar ones the wanted, then the best paid."""
    means = {form: [fmean(side.values() or [0.0]) for side in (one.right, one.wrong)] for form, one in trials.items()}
    most = max(right - wrong for right, wrong in means.values())
    # Length rewards differ a little between forms.
    similar = [form for form, (right, wrong) in means.items() if right - wrong >= most - _SIMILAR * abs(most)]
    return max(similar, key=lambda form: (form == wanted, round(means[form][0], 2)))


def agreement_of(scored: Iterable[Scored]) -> Agreement | None:
    """Return the agreement with the labels, None without pairs. Probes that are not sure do not count."""
    rewards: dict[int, dict[str, list[float]]] = {}
    for one in scored:
        if _is_scored(one) and one.probe.role in ("right", "wrong") and one.probe.is_sure:
            rewards.setdefault(one.probe.row, {"right": [], "wrong": []})[one.probe.role].append(one.value)
    pairs = [(right, wrong) for row in rewards.values() for right in row["right"] for wrong in row["wrong"]]
    if not pairs:
        return None
    return Agreement(fmean((right > wrong) + (right == wrong) / 2 for right, wrong in pairs), len(pairs))


def lines_of(scored: Iterable[Scored], paid: Callable[[Scored], bool] | None) -> list[Line]:
    """Return a line per role and name, in order of appearance.

    `paid` decides whether a response earns as if it were right, None if that cannot be said.
    """
    groups: dict[tuple[Role, str], list[Scored]] = {}
    for one in scored:
        groups.setdefault((one.probe.role, one.probe.name), []).append(one)
    return [_line(role, name, ones, paid) for (role, name), ones in groups.items()]


@dataclass(frozen=True, slots=True)
class Failure:
    """Responses without a reward, for the same reason: kinds of responses, their number, and the first."""

    reason: str
    names: list[str]
    count: int
    first: Scored


def failures_of(scored: Iterable[Scored]) -> list[Failure]:
    """Return the failures by reason, in order of appearance."""
    groups: dict[str, list[Scored]] = {}
    for one in scored:
        if not _is_scored(one):
            groups.setdefault(one.score.detail.partition("\n")[0], []).append(one)
    return [
        Failure(reason, list(dict.fromkeys(one.probe.name for one in ones)), len(ones), ones[0])
        for reason, ones in groups.items()
    ]


def without_spelling_faults(lines: Sequence[Line]) -> list[Line]:
    """Return the lines without findings about spellings, for a reward that compares text."""
    return [replace(line, level="") if line.role == "spelling" else line for line in lines]


def compares_text(lines: Sequence[Line]) -> bool:
    """Return whether the reward refuses each spelling that differs from the label, as an exact match does."""
    paid = [line.paid for line in lines if line.role == "spelling" and line.paid is not None]
    return bool(paid) and not any(paid)


def _is_scored(one: Scored) -> bool:
    return one.score.value is not None


def _line(role: Role, name: str, ones: list[Scored], paid: Callable[[Scored], bool] | None) -> Line:
    scored = [one for one in ones if _is_scored(one)]
    paying = None if paid is None else [one for one in scored if paid(one)]
    level: Literal["", "note", "fault"] = ""
    says, cases = "", list[Scored]()
    if paying is not None:
        level, says, cases = _verdict(role, scored, paying)
    return Line(
        role,
        name,
        len(ones),
        len(ones) - len(scored),
        None if paying is None else len(paying),
        fmean(one.value for one in scored) if scored else None,
        means(one.score.parts for one in scored),
        level,
        says,
        cases,
    )


def means(parts: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """Return the mean of each reward."""
    values: dict[str, list[float]] = {}
    for part in parts:
        for name, value in part.items():
            values.setdefault(name, []).append(value)
    return {name: fmean(found) for name, found in values.items()}


def _verdict(
    role: Role, scored: list[Scored], paying: list[Scored]
) -> tuple[Literal["", "note", "fault"], str, list[Scored]]:
    if role in _EARNING:
        refused = [one for one in scored if one not in paying]
        says = f"refused: {len(refused)} of {len(scored)}"
        if not refused or role == "form":
            return "", "", []
        is_fault = role == "right" or any(one.probe.is_sure for one in refused)
        return "fault" if is_fault else "note", says, refused
    if not paying or role == "other":
        return "", "", []
    sure = [one for one in paying if one.probe.is_sure]
    is_fault = bool(sure) or (role == "wrong" and len(paying) > _MAX_LUCK * len(scored))
    return "fault" if is_fault else "note", f"paid: {len(paying)} of {len(scored)}", paying


def overpaid_junk(scored: Iterable[Scored]) -> list[str]:
    """Return a fault if the reward, which is not constant, pays for responses without an answer.

    That is: most kinds of them earn as much as any answer, or one earns more than all answers, on average, by more than
    answers in different forms differ.
    """
    lines = lines_of((one for one in scored if one.probe.is_sure), None)
    answers = [line.mean for line in lines if line.role in _EARNING and line.mean is not None]
    junk = [line.mean for line in lines if line.role == "junk" and line.mean is not None]
    if not answers or not junk:
        return []
    num_paid = sum(mean >= max(answers) - _ROUNDING for mean in junk)
    if 2 * num_paid > len(junk) and min([*junk, *answers]) < max(answers):
        return earning_junk(lines)
    return earning_junk(lines, margin=max(answers) - min(answers), is_more=True)


def earning_junk(lines: Sequence[Line], *, margin: float = 0.0, is_more: bool = False) -> list[str]:
    """Return a sentence if a response without an answer earns at least as much as an answer in any form, on average.

    Args:
        lines: results of all probes.
        margin: what it must earn in addition.
        is_more: whether it must earn more than that.
    """
    answers = [line.mean for line in lines if line.role in _EARNING and line.mean is not None]
    junk = [(line.mean, line.name) for line in lines if line.role == "junk" and line.mean is not None]
    if not answers or not junk:
        return []
    least = max(answers) + margin
    kinds = {name: mean for mean, name in junk if (mean > least + _ROUNDING if is_more else mean >= least - _ROUNDING)}
    if not kinds:
        return []
    first, *others = sorted(kinds, key=lambda name: -round(kinds[name], 9))
    kind = "kind" if len(others) == 1 else "kinds"
    more = f" and {len(others)} more {kind} of responses without an answer earn up to" if others else " earns"
    return [f'"{first}"{more} {kinds[first]:.3g}, an answer at most {max(answers):.3g}']


def depends_on_row(same_text: Iterable[tuple[Score, Score]]) -> set[str]:
    """Return the rewards that differ for equal responses to two rows, with "" for the sum."""
    pairs = [(_values(one), _values(other)) for one, other in same_text]
    return {name for one, other in pairs for name in one.keys() & other.keys() if one[name] != other[name]}


def _values(score: Score) -> dict[str, float]:
    """Return each reward, and the sum under ""; nothing for a failed one."""
    return {} if score.value is None else {"": score.value, **score.parts}


def constant_parts(scored: Sequence[Scored]) -> dict[str, float]:
    """Return the rewards with the same value for all responses, with "" for the sum."""
    values: dict[str, set[float]] = {}
    for one in scored:
        for name, value in _values(one.score).items():
            values.setdefault(name, set()).add(value)
    return {name: next(iter(found)) for name, found in values.items() if len(found) == 1}
