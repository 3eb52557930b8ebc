"""Paired statistics for two `rlhf eval` outputs: metrics, categories, and the prompts that differ most."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import fmean

from rlhf_cli.algorithms.answer_statistics import mean_interval, prompts_needed, sign_flip_p_value
from rlhf_cli.data.reading.sources import Rows, load_rows
from rlhf_cli.errors import UsageError, listed
from rlhf_cli.runs.inference.outputs import EvalOutput, EvaluatedPrompt, Key

_FEW = 30
"""With fewer prompts, intervals of the mean are too narrow, so a difference must also pass an exact test."""
_FEWEST = 6
"""With fewer prompts, that test never passes: even if all differences have the same sign, p is at least 2 / 2**5."""


@dataclass(frozen=True)
class Paired:
    """Metric values for the same prompts under A and B, one per prompt: the mean over the samples."""

    first: Sequence[float]
    second: Sequence[float]

    @cached_property
    def differences(self) -> list[float]:
        """B - A per prompt."""
        return [after - before for before, after in zip(self.first, self.second, strict=True)]

    @cached_property
    def means(self) -> tuple[float, float]:
        """Means of A and B."""
        return fmean(self.first), fmean(self.second)

    @cached_property
    def difference(self) -> float:
        """Mean of B - A."""
        return fmean(self.differences)

    @cached_property
    def interval(self) -> tuple[float, float] | None:
        """95% interval of the difference; None for one prompt."""
        return mean_interval(self.differences)

    @cached_property
    def p_value(self) -> float | None:
        """Sign-flip test; None with enough prompts for the interval."""
        return sign_flip_p_value(self.differences) if len(self.differences) < _FEW else None

    @property
    def is_shown(self) -> bool:
        """Whether the interval excludes 0 and, with few prompts, the p-value is below 5%."""
        excludes = self.interval is not None and not self.interval[0] <= 0 <= self.interval[1]
        return excludes and (self.p_value is None or self.p_value < 0.05)

    def needed(self, size: float | None = None) -> int | None:
        """Return how many prompts show a difference as large as `size`, by default the observed one."""
        needed = prompts_needed(self.differences, abs(self.difference) if size is None else size)
        return None if needed is None else max(needed, _FEWEST)

    def as_dict(self) -> dict[str, object]:
        """Return all numbers for JSON."""
        low, high = self.interval or (None, None)
        return {
            "a": self.means[0],
            "b": self.means[1],
            "difference": self.difference,
            "low": low,
            "high": high,
            "p_value": self.p_value,
            "is_shown": self.is_shown,
            "num_prompts": len(self.differences),
        }


@dataclass(frozen=True)
class Comparison:
    """Two outputs on their common prompts. `metric` decides."""

    a: EvalOutput
    b: EvalOutput
    keys: Sequence[Key]
    metric: str

    @cached_property
    def metrics(self) -> dict[str, Paired]:
        """Metrics that both outputs have, by name."""
        names = dict.fromkeys(name for key in self.keys for name in self.a.prompts[key].values)
        pairs = {name: self._paired(name, self.keys) for name in names}
        return {name: pair for name, pair in pairs.items() if pair is not None}

    @property
    def decisive(self) -> Paired:
        """The decisive metric."""
        return self.metrics[self.metric]

    def categories(self, column: str) -> dict[str, Paired]:
        """Compare by column value: source, data_source, or a column in the prompt data."""
        groups: dict[str, list[Key]] = {}
        values = _column(column, [self.a.prompts[key] for key in self.keys], str(self.a.settings["prompt_split"]))
        for key, value in zip(self.keys, values, strict=True):
            groups.setdefault(value, []).append(key)
        pairs = {value: self._paired(self.metric, groups[value]) for value in sorted(groups)}
        return {value: pair for value, pair in pairs.items() if pair is not None}

    def most_different(self, number: int) -> list[Key]:
        """Return the prompts with the largest differences, alternating between losses and gains."""
        sizes = {key: size for key in self._both(self.metric, self.keys) if (size := self.size(key))}
        losses, gains = (
            sorted((key for key in sizes if sign * sizes[key] > 0), key=lambda key: -abs(sizes[key]))
            for sign in (-1, 1)
        )
        in_turn = [key for pair in zip(losses, gains, strict=False) for key in pair]
        shorter = min(len(losses), len(gains))
        return [*in_turn, *losses[shorter:], *gains[shorter:]][:number]

    def size(self, key: Key) -> float:
        """Return B - A for a prompt."""
        return self.b.prompts[key].values[self.metric] - self.a.prompts[key].values[self.metric]

    def _paired(self, name: str, keys: Sequence[Key]) -> Paired | None:
        both = self._both(name, keys)
        values = [[one.prompts[key].values[name] for key in both] for one in (self.a, self.b)]
        return Paired(*values) if both else None

    def _both(self, name: str, keys: Sequence[Key]) -> list[Key]:
        """Return the prompts for which both models have a value: a failed reward is none."""
        return [key for key in keys if name in self.a.prompts[key].values and name in self.b.prompts[key].values]


def compared(
    a: EvalOutput, b: EvalOutput, *, metric: str | None, common: bool = False, may_differ: Sequence[str] = ()
) -> Comparison:
    """Pair prompts by content.

    Raises:
        UsageError: settings or prompts differ more than allowed, or the metric does not exist.
    """
    names = dict.fromkeys([*a.facts, *b.facts])
    if unknown := next((name for name in may_differ if name not in names), None):
        raise UsageError(f"--may_differ {unknown}: the settings of an evaluation are {listed(names)}")
    different = [name for name in names if name not in may_differ and a.facts.get(name) != b.facts.get(name)]
    if different:
        listing = listed(f"{name} ({_shown(a.facts.get(name))}, {_shown(b.facts.get(name))})" for name in different)
        raise UsageError(
            f"{_name(a)} and {_name(b)} differ in {listing}: evaluate with equal settings, or set "
            f"--may_differ {','.join(different)} to compare them anyway"
        )
    keys = [key for key in a.prompts if key in b.prompts]
    if not keys:
        raise UsageError(f"{_name(a)} and {_name(b)} have no prompt in common")
    if not common and not len(keys) == len(a.prompts) == len(b.prompts):
        raise UsageError(
            f"{_name(a)} and {_name(b)} have {len(keys)} prompts in common, of {len(a.prompts)} and {len(b.prompts)}: "
            "set --common to compare on these"
        )
    comparison = Comparison(a, b, keys, metric or "")
    known = comparison.metrics
    if metric is not None and metric not in known:
        raise UsageError(f"--metric {metric}: the outputs have {listed(known)}")
    default = next((name for name in ("accuracy", "reward") if name in known), None)
    if metric is None and default is None:
        raise UsageError(f"{_name(a)} and {_name(b)} have no prompt with rewards for both")
    return Comparison(a, b, keys, metric or str(default))


def _name(output: EvalOutput) -> str:
    return f"{output.root} ({output.pretrain})"


def _shown(value: object) -> str:
    text = str(value)
    return text if len(text) <= 40 else f"{text[:37]}..."


def _column(name: str, prompts: Sequence[EvaluatedPrompt], split: str) -> list[str]:
    """Return each prompt's column value. Raises UsageError if a row does not have it."""
    if name in ("source", "data_source"):
        return [str(getattr(prompt, name)) for prompt in prompts]
    data: Mapping[str, Rows] = {
        source: load_rows(source, split=split, seed=0) for source in {prompt.source for prompt in prompts}
    }
    values = []
    for prompt in prompts:
        row = data[prompt.source].sources[0].row(prompt.row)
        if name not in row:
            raise UsageError(
                f"--by {name}: {row.where} has no such column, but {listed(['source', 'data_source', *row])}"
            )
        values.append(str(row[name]))
    return values
