"""HTML report for one or more runs: results, curves, time, rollouts, evaluation samples and settings.

The page is self-contained: it loads no other file and needs no network. data.py reads the data, charts.py draws the
charts, and page.css and page.js are embedded.
"""

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from html import escape
from pathlib import Path

from rlhf_cli.tracking.figures import Reading, duration, interval, number, prominent, scaled, title
from rlhf_cli.tracking.report.charts import Series, line_chart, stacked_bars
from rlhf_cli.tracking.report.data import ReportRollouts, Stage, non_finite_steps, points, read_stage
from rlhf_cli.version import __version__

_REPORT_FILE = "report.html"
_NUM_MAIN_CHARTS = 7
_NUM_TILES = 4
# Width and height in pixels.
_WIDE, _NARROW = (1090, 250), (520, 210)
# Metrics that share a chart. Every other metric has a separate one.
_TOGETHER = {
    "Clipped share of tokens": ("clip_low", "clip_high", "clip_dual"),
    "Learning rate": ("lr", "critic/lr"),
    "Gradient norm": ("grad_norm", "critic/grad_norm"),
    "KL of the update": ("approx_kl", "approx_k3"),
    "Probability ratio": ("ratio_mean", "ratio_max"),
    "Values and returns": ("critic/value_mean", "critic/return_mean"),
    "Turns and tool calls": ("episode/turns", "episode/calls", "episode/malformed_calls"),
    "Memory, GiB": ("memory/host_gib", "memory/gpu_gib_max", "memory/gpu_gib"),
}
_PHASE_COLOURS = {
    "generate": "--c1",
    "train": "--c2",
    "forward": "--c3",
    "reward": "--c4",
    "transfer": "--c5",
    "advantage": "--c6",
    "data": "--c7",
    "eval": "--c7",
    "other": "--c8",
}
_OUTCOMES = {"finished": "good", "failed": "bad", "interrupted": "warn", "running": "warn"}


def write_report(
    output: Path, *, stages: Mapping[str, Path] | None = None, headline: Mapping[str, float | str] | None = None
) -> Path:
    """Write <output>/report.html and return its path.

    Args:
        output: run directory, or the folder for a page about multiple runs.
        stages: run directories by heading, in order. Default: `output`, headed by the command name.
        headline: results to show first, by name. Default: the main metrics of the last stage.
    """
    named = [replace(read_stage(path), command=heading) for heading, path in (stages or {}).items()]
    read = named or [read_stage(output)]
    path = output / _REPORT_FILE
    # Replace atomically: the page may be open in a browser, or the run may be killed while writing.
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text(_page(output.resolve().name, read, headline), encoding="utf-8", errors="replace")
    os.replace(temporary, path)
    return path


def _page(name: str, stages: Sequence[Stage], headline: Mapping[str, float | str] | None) -> str:
    """Build the page."""
    links = "".join(f'<a href="#stage{i}">{escape(stage.command)}</a>' for i, stage in enumerate(stages))
    body = "".join(_stage_section(stage, number=i) for i, stage in enumerate(stages))
    commands = " → ".join(stage.command for stage in stages)
    return (
        f'<!DOCTYPE html><html lang="en"><head><meta charset="utf-8">'
        f'<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>{escape(name)} · rlhf</title><style>{packaged('page.css')}</style></head><body>"
        f'<div class="bar"><div><b>rlhf</b><nav><a href="#top">Overview</a>{links}</nav></div></div>'
        f'<main id="top"><header><div class="overline">{escape(commands)}</div><h1>{escape(name)}</h1></header>'
        f"{_tiles(stages, headline)}{body}</main>"
        f"<footer>Written by rlhf-cli {escape(__version__)}. Everything on this page is in the file itself.</footer>"
        f"<script>{packaged('page.js')}</script></body></html>"
    )


def packaged(name: str) -> str:
    """Read a file next to this module."""
    return Path(__file__).with_name(name).read_text(encoding="utf-8")


def _tiles(stages: Sequence[Stage], headline: Mapping[str, float | str] | None) -> str:
    """Build the tiles with the main results."""
    if headline is not None:
        shown = [(name, value if isinstance(value, str) else number(value), "") for name, value in headline.items()]
    else:
        summary = stages[-1].summary
        names = [name for name in prominent(summary.last) if name != "lr"][: _NUM_TILES - 1]
        shown = [(title(name), number(summary.last[name]), f"from {number(summary.first[name])}") for name in names]
    seconds = sum(stage.summary.seconds for stage in stages)
    if seconds > 0 and headline is None:
        speed = stages[-1].summary.tokens_per_second
        shown.append(("time", duration(seconds), f"{scaled(speed)} tokens/s" if speed else ""))
    cells = "".join(
        f'<div class="tile"><div class="label">{escape(label)}</div><div class="value">{escape(value)}</div>'
        f'<div class="note">{escape(note)}</div></div>'
        for label, value, note in shown
    )
    return f'<div class="tiles">{cells}</div>' if cells else ""


def _stage_section(stage: Stage, *, number: int) -> str:
    """Build the section for one run."""
    done = f"{max(stage.metrics, default=0)}/{stage.total_steps} {stage.unit}s"
    facts = {**stage.facts, "Run directory": str(stage.path), "Done": done}
    alarms = "".join(f'<p class="broken-note">Alarm: {escape(message)}</p>' for message in stage.alarms)
    listed = "".join(f"<span><b>{escape(name)}</b>{escape(text)}</span>" for name, text in facts.items())
    return (
        f'<section class="stage" id="stage{number}"><div class="head"><h2>{escape(stage.command)}</h2>'
        f'<span class="chip {_OUTCOMES.get(stage.outcome, "")}">{escape(stage.outcome)}</span></div>'
        f'<div class="facts">{listed}</div>{alarms}'
        f"{_curves(stage)}{_evaluations(stage)}{_times(stage)}{_planned(stage)}{_samples(stage)}{settings(stage)}</section>"
    )


def _curves(stage: Stage) -> str:
    """Build one chart per metric or metric group: the main ones visible, the rest folded."""
    charts = chart_groups(stage)
    if not charts:
        return '<p class="soft">This run has logged nothing yet.</p>'
    main, rest = charts[:_NUM_MAIN_CHARTS], charts[_NUM_MAIN_CHARTS:]
    cards = [_chart_card(stage, *chart, wide=not i) for i, chart in enumerate(main)]
    # Cards are half as wide as the page, except the first: widen the last one if it would leave a gap.
    if len(cards) > 1 and len(cards) % 2 == 0:
        cards[-1] = _chart_card(stage, *main[-1], wide=True)
    folded = "".join(_chart_card(stage, *chart, wide=False) for chart in rest)
    more = (
        f'<details><summary>{len(rest)} more curves</summary><div class="grid">{folded}</div></details>' if rest else ""
    )
    return f'<div class="grid">{"".join(cards)}</div>{more}'


def chart_groups(stage: Stage) -> list[tuple[str, list[str]]]:
    """Return (heading, metrics) for each chart, most important first, and last those that are 0 in all steps."""
    logged = dict.fromkeys(name for metrics in stage.metrics.values() for name in metrics)
    groups: list[tuple[str, list[str]]] = []
    taken: set[str] = set()
    for name in prominent(name for name in logged if not name.startswith("eval/")):
        if name in taken:
            continue
        heading, together = next(
            ((heading, members) for heading, members in _TOGETHER.items() if name in members), (title(name), (name,))
        )
        members = [member for member in (*together, f"eval/{name}") if member in logged]
        taken.update(members)
        groups.append((heading, members))
    rest = [n for n in prominent(logged) if n.startswith("eval/") and n not in taken and "/num_" not in n]
    groups += [(title(name), [name]) for name in sorted(rest)]
    return sorted(groups, key=lambda group: all(value == 0 for name in group[1] for _, value in points(stage, name)))


def _chart_card(stage: Stage, heading: str, names: list[str], *, wide: bool) -> str:
    """Build a card with a chart, and the last value next to the heading."""
    series = [
        Series(title(name), points(stage, name), colour=i + 1, marked=name.startswith("eval/"))
        for i, name in enumerate(names)
    ]
    broken = sorted({step for name in names for step in non_finite_steps(stage, name)})
    drawing = line_chart(series, unit=stage.unit, size=_NARROW, broken=broken)
    # A wide drawing is scaled down on a narrow screen until the text is unreadable, so embed both.
    if wide:
        large = line_chart(series, unit=stage.unit, size=_WIDE, broken=broken)
        drawing = f'<div class="wide-only">{large}</div><div class="narrow-only">{drawing}</div>'
    last = series[0].points[-1][1] if series[0].points else None
    now = "" if last is None else f'<span class="now">{number(last)}</span>'
    legend = ""
    if len(series) > 1:
        entries = "".join(
            f'<span><i style="background:var(--c{line.colour})"></i>{escape(line.name)}</span>' for line in series
        )
        legend = f'<div class="legend">{entries}</div>'
    where = ", ".join(map(str, broken[:8])) + (", …" if len(broken) > 8 else "")
    note = f'<div class="broken-note">non-finite value in {escape(stage.unit)} {where}</div>' if broken else ""
    keys = escape(", ".join(names))
    return (
        f'<div class="card{" wide" if wide else ""}"><div class="cardhead">'
        f'<h3 title="{keys}">{escape(heading)}</h3>{now}</div>{legend}{drawing}{note}</div>'
    )


def _times(stage: Stage) -> str:
    """Build the time section: share per phase, a bar per step, speed and memory."""
    readings = [Reading(step, metrics) for step, metrics in stage.metrics.items() if "time/step" in metrics]
    if not readings:
        return ""
    totals = dict(sorted(stage.summary.phases.items(), key=lambda phase: -phase[1]))
    whole = sum(totals.values())
    if whole <= 0:
        return ""
    # Unknown phases get a color from their name, so that it is the same in every report.
    colours = {name: _PHASE_COLOURS.get(name, f"--c{sum(name.encode()) % 7 + 1}") for name in totals}
    shares = "".join(
        f'<i style="flex:{seconds / whole:.4f};background:var({colours[name]})"></i>'
        for name, seconds in totals.items()
    )
    rows = "".join(
        f'<tr><td><span class="legend" style="margin:0"><span><i style="background:var({colours[name]})"></i>'
        f'{escape(name)}</span></span></td><td class="num">{duration(seconds)}</td>'
        f'<td class="num">{duration(seconds / len(readings))}</td><td class="num">{seconds / whole:.1%}</td></tr>'
        for name, seconds in totals.items()
    )
    unit = escape(stage.unit)
    bars = stacked_bars(
        [reading.step for reading in readings],
        {name: [reading.phases.get(name, 0.0) for reading in readings] for name in totals},
        colours=colours,
        unit=stage.unit,
        size=(_NARROW[0], _NARROW[1] + 50),
    )
    return (
        f'<h3 class="part">Time and memory</h3><div class="grid">'
        f'<div class="card"><div class="cardhead"><h3>Time by phase</h3>'
        f'<span class="now">{duration(whole)}</span></div>'
        f'<div class="share">{shares}</div><table><thead><tr><th>phase</th><th class="num">total</th>'
        f'<th class="num">per {unit}</th><th class="num">share</th></tr></thead><tbody>{rows}</tbody></table></div>'
        f'<div class="card"><div class="cardhead"><h3>Seconds of each {unit}</h3></div>{bars}</div>'
        f"{_measured_cards(stage)}</div>"
    )


def _measured_cards(stage: Stage) -> str:
    """Build the charts for speed and memory."""
    logged = {name for metrics in stage.metrics.values() for name in metrics}
    speed = sorted(name for name in logged if name.startswith("perf/"))
    memory = sorted(name for name in logged if name.startswith("memory/"))
    cards = [_chart_card(stage, title(name), [name], wide=False) for name in speed]
    cards += [_chart_card(stage, "Memory, GiB", memory[:4], wide=False)] if memory else []
    return "".join(cards)


def _planned(stage: Stage) -> str:
    """Build the table of planned and measured values, or "" without a plan."""
    if not stage.plan.get("values"):
        return ""
    rows = "".join(
        f'<tr><td>{escape(name)}</td><td class="num">{number(planned)}</td><td class="num">{number(measured)}</td>'
        f'<td class="num">{planned / measured - 1:+.0%}</td></tr>'
        for name, (planned, measured) in stage.plan["values"].items()
    )
    return (
        f'<h3 class="part">Plan and measured</h3><div class="card"><table class="fit"><thead><tr><th></th>'
        f'<th class="num">plan</th><th class="num">measured</th><th class="num">difference</th></tr></thead>'
        f'<tbody>{rows}</tbody></table></div><p class="small faint">{escape(stage.plan["assumed"])}</p>'
    )


def _evaluations(stage: Stage) -> str:
    """Build the evaluation table, newest first."""
    rows = [
        (step, {name: value for name, value in metrics.items() if name.startswith("eval/")})
        for step, metrics in reversed(stage.metrics.items())
    ]
    rows = [(step, found) for step, found in rows if found]
    if not rows:
        return ""
    names = prominent(dict.fromkeys(name for _, found in rows for name in found))
    head = "".join(f'<th class="num">{escape(title(name.removeprefix("eval/")))}</th>' for name in names)
    lines = "".join(
        f"<tr><td>{step}</td>"
        + "".join(f'<td class="num">{_with_interval(name, found)}</td>' for name in names)
        + "</tr>"
        for step, found in rows
    )
    return (
        f'<h3 class="part">Evaluations</h3><div class="card"><div class="scroll"><table class="fit"><thead><tr>'
        f"<th>{escape(stage.unit)}</th>{head}</tr></thead><tbody>{lines}</tbody></table></div></div>"
    )


def _with_interval(name: str, metrics: Mapping[str, float]) -> str:
    return number(metrics[name]) + interval(name, metrics) if name in metrics else ""


def _samples(stage: Stage) -> str:
    """Build browsers for training rollouts and for evaluation responses."""
    evaluated = _browser("Evaluation samples", stage.evaluated, unit=stage.unit)
    return _browser("Rollouts", stage.rollouts, unit=stage.unit) + evaluated


def _browser(heading: str, rollouts: ReportRollouts, *, unit: str) -> str:
    """Build a sample browser with filters for step, score and text, or "" without samples."""
    if not rollouts.rows:
        return ""
    steps = sorted({row["step"] for row in rollouts.rows})
    options = "".join(f'<option value="{step}">{step}</option>' for step in steps)
    images = f'<script type="application/json" class="images">{_script_json(rollouts.images)}</script>'
    note = f"{len(rollouts.rows):,} of {rollouts.num_all:,}; all are in {rollouts.file}"
    return (
        f'<h3 class="part">{escape(heading)}</h3><div class="rollouts" data-unit="{escape(unit)}"><div class="tools">'
        f'<label>{escape(unit)} <select name="step"><option value="">all</option>{options}</select></label>'
        f'<label>order <select name="order"><option value="late">newest</option><option value="early">oldest</option>'
        f'<option value="best">best score</option><option value="worst">worst score</option></select></label>'
        f'<label>score <input name="low" type="number" step="any" placeholder="from" style="width:74px">'
        f'<input name="high" type="number" step="any" placeholder="to" style="width:74px"></label>'
        f'<input name="text" type="search" placeholder="Search prompts and responses">'
        f'<span class="count small faint"></span></div><div class="panes"><div class="list"></div>'
        f'<div class="detail"></div></div><script type="application/json">{_script_json(rollouts.rows)}</script>'
        f"{images if rollouts.images else ''}</div>"
        f'<p class="small faint">{note}</p>'
    )


def _script_json(value: object) -> str:
    """Encode JSON such that text from a model cannot close the surrounding script element."""
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


def settings(stage: Stage) -> str:
    """Build the folded settings table."""
    if not stage.settings:
        return ""
    groups = "".join(
        f"<div><h4>{escape(group)}</h4><table>"
        + "".join(
            f'<tr><td class="mono">{escape(name)}</td><td class="mono">{escape(_setting_text(value))}</td></tr>'
            for name, value in values.items()
        )
        + "</table></div>"
        for group, values in stage.settings.items()
    )
    return f'<details><summary>Settings</summary><div class="card"><div class="settings">{groups}</div></div></details>'


def _setting_text(value: object) -> str:
    """Format a setting as in config.yaml."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
