"""Formats comparisons as text and JSON."""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rlhf_cli.config.comparison import CompareGroup
from rlhf_cli.rewards.evaluation import evaluate_answers
from rlhf_cli.runs.inference.bisection import Bisection
from rlhf_cli.runs.inference.evaluate import answer_of
from rlhf_cli.runs.inference.paired import Comparison, Paired
from rlhf_cli.tracking.figures import number
from rlhf_cli.tracking.terminal.evaluation_table import is_share

_WIDTH = 160
"""Maximum characters in a quote."""


def comparison_lines(comparison: Comparison, settings: CompareGroup) -> Iterator[str]:
    """Yield the comparison as text: means and differences, the verdict, categories and quoted prompts."""
    a, b, metric, decisive = comparison.a, comparison.b, comparison.metric, comparison.decisive
    samples = a.settings["n_samples_per_prompt"]
    yield f"A  {a.pretrain}  ({a.root})"
    yield f"B  {b.pretrain}  ({b.root})"
    yield f"{len(comparison.keys)} prompts with {samples} {'sample' if samples == 1 else 'samples'} each"
    yield ""
    yield from _table({name: (name, pair) for name, pair in comparison.metrics.items()})
    yield ""
    yield verdict(metric, decisive)
    yield from _needed(metric, decisive, settings.detect)
    if settings.by is not None:
        categories = comparison.categories(settings.by)
        yield ""
        yield f"{metric} by {settings.by}"
        yield from _table({value: (metric, pair) for value, pair in categories.items()})
        if len(categories) > 2:
            by_chance = f"{0.05 * len(categories):.2g} of {len(categories)}"
            yield f"If no category differed, about {by_chance} would still seem to, by chance"
    yield from _quotes(comparison, settings.print_samples)


def verdict(metric: str, pair: Paired) -> str:
    """Return whether a difference is shown, with the interval and, for few prompts, the p-value."""
    if not any(pair.differences):
        return f"{metric}: no difference shown (all prompts have equal values)"
    p = "" if pair.p_value is None else f", p = {pair.p_value:.2g}"
    interval = f"(95 % interval {_interval(metric, pair)}{p})"
    if not pair.is_shown:
        return f"{metric}: no difference shown {interval}"
    direction = "higher" if pair.difference > 0 else "lower"
    return f"{metric}: B is {direction} by {_signed(metric, pair.difference)[1:]}{_unit(metric)} {interval}"


def _needed(metric: str, pair: Paired, size: float | None) -> Iterator[str]:
    needed = pair.needed(size)
    if needed is not None:
        given = abs(pair.difference) if size is None else size
        yield f"To see a difference of {_signed(metric, given)[1:]}{_unit(metric)} with 80 % power: {needed} prompts"


def _table(rows: Mapping[str, tuple[str, Paired]]) -> Iterator[str]:
    """Yield a table with one line per metric or category."""
    width = max(len("prompts"), *(len(name) for name in rows)) + 2
    yield f"  {'':{width}}{'prompts':>8}{'A':>10}{'B':>10}{'B - A':>10}   95 % interval"
    for name, (metric, pair) in rows.items():
        first, second = (_value(metric, mean) for mean in pair.means)
        yield (
            f"  {name:{width}}{len(pair.differences):>8}{first:>10}{second:>10}{_signed(metric, pair.difference):>10}"
            f"   {_interval(metric, pair)}"
        )


def _interval(metric: str, pair: Paired) -> str:
    if pair.interval is None:
        return "none"
    low, high = (_signed(metric, end) for end in pair.interval)
    return f"{low} to {high}{_unit(metric)}"


def _value(metric: str, value: float) -> str:
    return f"{100 * value:.1f}%" if is_share(metric) else number(value)


def _signed(metric: str, difference: float) -> str:
    size = f"{100 * abs(difference):.1f}" if is_share(metric) else number(abs(difference))
    return f"{'-' if difference < 0 else '+'}{size}"


def _unit(metric: str) -> str:
    return " pp" if is_share(metric) else ""


def _quotes(comparison: Comparison, count: int) -> Iterator[str]:
    keys = comparison.most_different(count)
    if not keys:
        return
    yield ""
    yield f"Prompts with the largest differences in {comparison.metric}"
    rows = [one.rows([one.prompts[key].group for key in keys]) for one in (comparison.a, comparison.b)]
    for key in keys:
        samples = [found[one.prompts[key].group] for one, found in zip((comparison.a, comparison.b), rows, strict=True)]
        first = samples[0][0]
        values = [one.prompts[key].values[comparison.metric] for one in (comparison.a, comparison.b)]
        label = "" if first["label"] is None else f", label {_end(str(first['label']), 40)}"
        yield f"  {first['source']} row {first['row']}{label}: {_start(_text(first['prompt']))}"
        for letter, value, of_prompt in zip("AB", values, samples, strict=True):
            response = _typical(of_prompt, comparison.metric, value)
            yield f"    {letter} {_value(comparison.metric, value)}: {_end(response)}"


def _typical(rows: Sequence[dict[str, Any]], metric: str, value: float) -> str:
    """Return the response whose own metric is closest to the prompt's value."""

    def distance(row: dict[str, Any]) -> float:
        figure = evaluate_answers([[answer_of(row)]]).figures.get(metric)
        return math.inf if figure is None else abs(figure.value - value)

    return str(min(rows, key=distance)["response"])


def _text(prompt: object) -> str:
    """Return the last message, or the prompt itself if it is text."""
    if isinstance(prompt, list) and prompt:
        content = prompt[-1]["content"]
        return content if isinstance(content, str) else json.dumps(content, ensure_ascii=False)
    return str(prompt)


def _start(text: str) -> str:
    line = " ".join(text.split())
    return repr(line if len(line) <= _WIDTH else f"{line[: _WIDTH - 3]}...")


def _end(text: str, width: int = _WIDTH) -> str:
    """Quote the end, where a response has the result."""
    line = " ".join(text.split())
    return repr(line if len(line) <= width else f"...{line[3 - width :]}")


def comparison_json(comparison: Comparison, settings: CompareGroup) -> dict[str, object]:
    """Return the comparison as a JSON object."""
    named = {
        letter: {"pretrain": one.pretrain, "output": str(one.root)}
        for letter, one in (("a", comparison.a), ("b", comparison.b))
    }
    decisive = comparison.decisive
    categories = {} if settings.by is None else comparison.categories(settings.by)
    return {
        **named,
        "metric": comparison.metric,
        "num_prompts": len(comparison.keys),
        "num_samples": comparison.a.settings["n_samples_per_prompt"],
        "is_shown": decisive.is_shown,
        "detect": abs(decisive.difference) if settings.detect is None else settings.detect,
        "prompts_needed": decisive.needed(settings.detect),
        "metrics": {name: pair.as_dict() for name, pair in comparison.metrics.items()},
        "by": {value: pair.as_dict() for value, pair in categories.items()},
        "prompts": [
            {"source": prompt.source, "row": prompt.row, "difference": comparison.size(key)}
            for key in comparison.most_different(settings.print_samples)
            if (prompt := comparison.a.prompts[key])
        ],
    }


def bisection_lines(found: Bisection, detect: float | None) -> Iterator[str]:
    """Yield the evaluated checkpoints, the one at which the metric broke, and how to compare it."""
    metric = found.metric
    how = "best logged value" if found.is_best else "first checkpoint" if found.reference.step else "first"
    yield f"A  {found.reference.name}, the reference ({how} of {len(found.points)})"
    yield ""
    evaluated = [point for point in found.points if point.step in found.compared]
    yield from _table({point.name: (metric, found.paired(point)) for point in evaluated})
    yield ""
    if found.broken is None:
        pair = found.paired(found.points[-1])
        direction = " in this direction" if pair.is_shown else ""
        yield f"No checkpoint broke{direction}: {verdict(metric, pair)}"
        yield from _needed(metric, pair, detect)
        return
    before = [point for point in evaluated if point.step < found.broken.step]
    yield f"{metric} broke at {found.broken.name} ({found.broken.path}): {verdict(metric, found.paired(found.broken))}"
    if before:
        yield f"The checkpoint before, {before[-1].name}: {verdict(metric, found.paired(before[-1]))}"
    comparison = found.compared[found.broken.step]
    yield f"Compare the two: rlhf compare {comparison.a.root} {comparison.b.root}"
