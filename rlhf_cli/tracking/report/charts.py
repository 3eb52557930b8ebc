"""Line charts and stacked bars as inline SVG.

Colors are the page's CSS variables (--c1 ... --c8, --grid, --ink), so one drawing fits light and dark mode. The page's
script implements hovering, from data in the drawing's attributes.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from itertools import pairwise

from rlhf_cli.tracking.figures import scaled

# Above these, points and bars are averaged: more would not be visible and would slow the page down.
_MAX_POINTS = 240
_MAX_BARS = 60
# Smooth a line only if it has this many points and changes direction in at least this fraction of them.
_SMOOTH_FROM = 30
_NOISY = 1 / 8
# Half the smoothing window, as a fraction of all points.
_SMOOTH_SHARE = 1 / 24
_NUM_TICKS = 5
# Margins around the plotted area in pixels.
_LEFT, _RIGHT, _TOP, _BOTTOM = 50, 12, 10, 26


@dataclass(frozen=True)
class Series:
    """One line. `points` are (step, value) pairs with increasing steps and finite values."""

    name: str
    points: Sequence[tuple[int, float]]
    # Index of a page color.
    colour: int = 1
    # Draw each point as a dot, without smoothing: for evaluations, which are few and exact.
    marked: bool = False


@dataclass(frozen=True)
class _Frame:
    """Plotted area with the values at the edges."""

    width: int
    height: int
    steps: tuple[float, float]
    values: tuple[float, float]

    def x(self, step: float) -> float:
        """Return pixels from the left."""
        low, high = self.steps
        return _LEFT + (step - low) / (high - low) * (self.width - _LEFT - _RIGHT)

    def y(self, value: float) -> float:
        """Return pixels from the top."""
        low, high = self.values
        return self.height - _BOTTOM - (value - low) / (high - low) * (self.height - _TOP - _BOTTOM)


def line_chart(
    series: Sequence[Series],
    *,
    unit: str,
    size: tuple[int, int],
    broken: Sequence[int] = (),
) -> str:
    """Draw series over steps (labeled `unit`) as one SVG. `broken` steps, with non-finite values, are marked below."""
    drawn = [
        (line, list(line.points) if line.marked else binned(line.points, _MAX_POINTS)) for line in series if line.points
    ]
    every = [point for _, kept in drawn for point in kept]
    if not every:
        return ""
    steps = [step for step, _ in every]
    values = [value for _, value in every]
    ticks = nice_ticks(min(values), max(values), _NUM_TICKS)
    low, high = min(ticks[0], *values), max(ticks[-1], *values)
    frame = _Frame(*size, _padded(min(steps), max(steps)), (low, high))
    parts = [_grid(frame, ticks, unit=unit)]
    hover = []
    for line, kept in drawn:
        smooth = smoothed(kept) if _is_noisy(kept) and not line.marked else None
        parts.append(_draw_line(frame, kept, line, faint=smooth is not None))
        if smooth:
            parts.append(_draw_line(frame, smooth, line, faint=False))
        hover.append({"n": line.name, "c": line.colour, "p": [(step, _figure(value)) for step, value in kept]})
    parts += [
        f'<path class="broken" d="M{frame.x(step) - 3:.1f} {frame.height - _BOTTOM - 3}l6 6m0 -6l-6 6"/>'
        for step in broken
    ]
    return _svg(frame, parts, hover, unit=unit)


def stacked_bars(
    steps: Sequence[int],
    phases: Mapping[str, Sequence[float]],
    *,
    colours: Mapping[str, str],
    unit: str,
    size: tuple[int, int],
) -> str:
    """Draw seconds by phase for each step. If there are many steps, neighbors are averaged."""
    if not steps:
        return ""
    edges = [len(steps) * i // min(_MAX_BARS, len(steps)) for i in range(min(_MAX_BARS, len(steps)) + 1)]
    bars = [
        {name: sum(values[start:end]) / (end - start) for name, values in phases.items()}
        for start, end in pairwise(edges)
    ]
    ticks = nice_ticks(0.0, max(sum(bar.values()) for bar in bars), _NUM_TICKS)
    frame = _Frame(*size, (0, len(bars)), (0.0, max(ticks[-1], *(sum(bar.values()) for bar in bars))))
    labels = [
        f"{steps[start]}" if end - start == 1 else f"{steps[start]}-{steps[end - 1]}" for start, end in pairwise(edges)
    ]
    parts = [_grid(frame, ticks, unit=unit, x_labels=labels)]
    thick = max(1.0, (frame.x(1) - frame.x(0)) * 0.78)
    for number, bar in enumerate(bars):
        bottom = 0.0
        for name, seconds in bar.items():
            top, below = frame.y(bottom + seconds), frame.y(bottom)
            left = frame.x(number + 0.5) - thick / 2
            parts.append(
                f'<rect x="{left:.1f}" y="{top:.2f}" width="{thick:.1f}" height="{max(0.0, below - top):.2f}" '
                f'fill="var({colours[name]})"/>'
            )
            bottom += seconds
    hover = [
        {"n": name, "v": colours[name], "p": [(i + 0.5, _figure(bar[name])) for i, bar in enumerate(bars)]}
        for name in phases
    ]
    return _svg(frame, parts, hover, unit=unit, labels=labels)


def _svg(
    frame: _Frame, parts: Sequence[str], hover: Sequence[Mapping[str, object]], *, unit: str, labels: Sequence[str] = ()
) -> str:
    """Assemble the SVG, with data for hovering."""
    data = {
        "s": hover,
        "x": [frame.steps[0], frame.steps[1]],
        "y": [frame.values[0], frame.values[1]],
        "box": [_LEFT, frame.width - _RIGHT, _TOP, frame.height - _BOTTOM],
        "unit": unit,
        "labels": list(labels),
    }
    text = escape(json.dumps(data, separators=(",", ":")), quote=True)
    return (
        f'<svg class="chart" viewBox="0 0 {frame.width} {frame.height}" data-chart="{text}" role="img">'
        f"{''.join(parts)}</svg>"
    )


def _grid(frame: _Frame, ticks: Sequence[float], *, unit: str, x_labels: Sequence[str] = ()) -> str:
    """Draw horizontal grid lines with values, and step labels below."""
    parts = []
    gap = ticks[1] - ticks[0] if len(ticks) > 1 else 1.0
    right, bottom = frame.width - _RIGHT, frame.height - _BOTTOM
    for tick in ticks:
        y = frame.y(tick)
        parts.append(f'<path class="grid" d="M{_LEFT} {y:.1f}H{right}"/>')
        parts.append(
            f'<text class="tick" x="{_LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{tick_label(tick, gap)}</text>'
        )
    parts.append(f'<path class="axis" d="M{_LEFT} {bottom}H{right}"/>')
    parts.append(f'<text class="tick" x="{_LEFT - 8}" y="{bottom + 17}" text-anchor="end">{escape(unit)}</text>')
    if x_labels:
        every = max(1, -(-len(x_labels) // 8))
        marks = [(i + 0.5, label.split("-")[0]) for i, label in enumerate(x_labels) if i % every == 0]
    else:
        marks = [(tick, tick_label(tick, 1.0)) for tick in _step_ticks(*frame.steps)]
    parts += [
        f'<text class="tick" x="{frame.x(at):.1f}" y="{bottom + 17}" text-anchor="middle">{label}</text>'
        for at, label in marks
    ]
    return "".join(parts)


def _draw_line(frame: _Frame, kept: Sequence[tuple[float, float]], line: Series, *, faint: bool) -> str:
    """Draw a path through the points, with dots for marked series and single points."""
    at = [(frame.x(step), frame.y(value)) for step, value in kept]
    colour = f"var(--c{line.colour})"
    path = "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in at)
    drawn = f'<path class="line{" faint" if faint else ""}" stroke="{colour}" d="{path}"/>'
    if line.marked or len(kept) == 1:
        drawn += "".join(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.5" fill="{colour}" class="dot"/>' for x, y in at)
    return drawn


def binned(points: Sequence[tuple[int, float]], limit: int) -> list[tuple[float, float]]:
    """Average neighbors if there are more than `limit` points."""
    if len(points) <= limit:
        return [(float(step), value) for step, value in points]
    edges = [len(points) * i // limit for i in range(limit + 1)]
    means = []
    for start, end in pairwise(edges):
        part = points[start:end]
        means.append((sum(step for step, _ in part) / len(part), sum(value for _, value in part) / len(part)))
    return means


def _is_noisy(points: Sequence[tuple[float, float]]) -> bool:
    """Return whether the line changes direction often enough to smooth it. Schedules are monotonic and stay exact."""
    moves = [b - a for (_, a), (_, b) in pairwise(points)]
    turns = sum(before * after < 0 for before, after in pairwise(moves))
    return len(points) >= _SMOOTH_FROM and turns > _NOISY * len(points)


def smoothed(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Compute moving averages over a centered window that shrinks toward the ends, so the line has no lag."""
    reach = max(1, round(len(points) * _SMOOTH_SHARE))
    # Prefix sums make each window O(1).
    sums = [0.0]
    for _, value in points:
        sums.append(sums[-1] + value)
    means = []
    for i, (step, _) in enumerate(points):
        half = min(reach, i, len(points) - 1 - i)
        means.append((step, (sums[i + half + 1] - sums[i - half]) / (2 * half + 1)))
    return means


def nice_ticks(low: float, high: float, count: int) -> list[float]:
    """Return about `count` round values that cover the range, in steps of 1, 2 or 5 times a power of ten."""
    if high <= low:
        low, high = (low - abs(low) / 2, low + abs(low) / 2) if low else (0.0, 1.0)
    rough = (high - low) / (count - 1)
    power = 10.0 ** math.floor(math.log10(rough))
    # 0.999 and 1e-9 absorb float rounding: a range of exactly 4 steps must not become 5.
    gap = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough * 0.999)
    first, last = math.floor(low / gap + 1e-9), math.ceil(high / gap - 1e-9)
    return [i * gap for i in range(first, last + 1)]


def _step_ticks(low: float, high: float) -> list[float]:
    """Return integer steps inside the range."""
    return [tick for tick in nice_ticks(low, high, 7) if low <= tick <= high and float(tick).is_integer()]


def _padded(low: float, high: float) -> tuple[float, float]:
    """Widen the range if it is a single value."""
    return (low, high) if high > low else (low - 1, high + 1)


def tick_label(value: float, gap: float) -> str:
    """Format a value with as many decimals as the tick distance requires."""
    if abs(value) < gap * 1e-6:
        return "0"
    if abs(value) >= 10_000:
        return scaled(value)
    if gap < 1e-4:
        return f"{value:.1e}".replace("e-0", "e-").replace(".0e", "e")
    return f"{value:.{max(0, math.ceil(-math.log10(gap) - 1e-9))}f}"


def _figure(value: float) -> float:
    """Round to six significant digits: enough to read, and small in the page."""
    return float(f"{value:.6g}")
