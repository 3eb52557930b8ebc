"""Draw the curves of the examples from their runs, as SVG files for the READMEs and the documentation.

    python examples/curves.py [EXAMPLE...]

Run it in the folder that contains `runs/`. It draws the named examples, or all whose run exists.
"""

import sys
from collections.abc import Iterator
from datetime import datetime
from html import escape
from itertools import accumulate, count, repeat
from pathlib import Path

from rlhf_cli import Run

FOLDER = Path(__file__).parents[1] / "docs" / "assets" / "curves"
CURVES = {
    "calculator": (
        "runs/calculator/practice",
        {"accuracy": "right answers", "episode/calls": "calls per episode"},
    ),
    "distillation": (
        "runs/distillation/gkd",
        {"accuracy": "right answers of the student", "forward_kl": "divergence from the teacher, nats per token"},
    ),
    "eight_words": (
        "runs/eight_words/grpo",
        {
            "reward": "reward of sampled answers",
            "reward_func/exact": "share with exactly eight words",
            "eval/reward": "reward of greedy held-out answers",
        },
    ),
    "gsm8k": (
        "runs/gsm8k/sft",
        {"loss": "loss per token of the worked solutions"},
    ),
    "images": (
        "runs/images/practice",
        {"accuracy": "right answers"},
    ),
    "preferences": (
        "runs/preferences/dpo",
        {"accuracy": "pairs with a positive margin", "eval/accuracy": "held-out pairs with a positive margin"},
    ),
    "tickets": (
        "runs/tickets_sft/sft",
        {"loss": "loss per token", "eval/loss": "loss on held-out rows"},
    ),
}
"""Run and metrics of each example, with the names of the metrics in the legend."""
COLORS = ("#2a6fd6", "#e0632b", "#16a085")
LEFT, TOP, WIDTH, HEIGHT = 48, 30, 660, 240
STYLE = ".grid{stroke:#ccc}.text{fill:#777;font:11.5px sans-serif}.line{fill:none;stroke-width:2;stroke-linejoin:round}"

Points = list[tuple[float, float]]


def ticks(highest: float) -> list[float]:
    """Return three to six round numbers from 0 to at least `highest`."""
    steps = (factor * 10.0**power for power in count(-6) for factor in (1, 2, 5))
    step = next(step for step in steps if 5 * step >= highest)
    values = list(accumulate(repeat(step, 5), initial=0.0))
    return values[: next(place for place, value in enumerate(values) if value >= highest) + 1]


def text(x: float, y: float, words: str, anchor: str = "start") -> str:
    """Return a text element."""
    return f'<text class="text" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(words)}</text>'


def chart(lines: dict[str, Points], unit: str, note: str) -> str:
    """Return an SVG image of lines over steps, with a legend on top and a note at the bottom."""
    first = min(x for points in lines.values() for x, _ in points)
    last = max(x for points in lines.values() for x, _ in points)
    marks = ticks(max(y for points in lines.values() for _, y in points))

    def place(x: float, y: float) -> tuple[float, float]:
        """Return the coordinates of a point in the image."""
        across = (x - first) / max(last - first, 1)
        return LEFT + across * WIDTH, TOP + HEIGHT * (1 - y / marks[-1])

    def parts() -> Iterator[str]:
        for mark in marks:
            x, y = place(first, mark)
            yield f'<path class="grid" d="M{x:.1f} {y:.1f}h{WIDTH}"/>' + text(x - 6, y + 4, f"{mark:g}", "end")
        for step in sorted({round(first + part * (last - first) / 5) for part in range(6)}):
            yield text(place(step, 0)[0], TOP + HEIGHT + 16, str(step), "middle")
        across = LEFT
        for (name, points), color in zip(lines.items(), COLORS, strict=False):
            path = " ".join(f"{x:.1f},{y:.1f}" for x, y in (place(*point) for point in points))
            yield f'<polyline class="line" stroke="{color}" points="{path}"/>'
            yield f'<rect x="{across}" y="6" width="10" height="10" fill="{color}"/>' + text(across + 15, 15, name)
            across += 34 + round(6.2 * len(name))
        yield text(LEFT, TOP + HEIGHT + 34, f"{unit}; {note}")

    width, height = LEFT + WIDTH + 12, TOP + HEIGHT + 42
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" role="img">'
    return head + f"<style>{STYLE}</style>" + "".join(parts()) + "</svg>\n"


def draw(example: str) -> Path:
    """Write the curve of an example, and return the file."""
    folder, names = CURVES[example]
    run = Run(folder)
    lines = {name: [(row["step"], row[key]) for row in run.metrics if key in row] for key, name in names.items()}
    day = datetime.fromtimestamp((run.folder / "metrics.jsonl").stat().st_mtime).date()
    status = run.status()
    path = FOLDER / f"{example}.svg"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(chart(lines, status.unit, f"rlhf {status.command}, {day}"), encoding="utf-8")
    return path


if __name__ == "__main__":
    for example in sys.argv[1:] or [name for name, (folder, _) in CURVES.items() if Path(folder).exists()]:
        print(draw(example))
