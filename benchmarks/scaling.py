"""Seconds a step and peak memory of `rlhf sft` and `rlhf dpo` against sequence length and against rows in a step.

    python benchmarks/scaling.py [--steps 6] [--tokens 8192] [--folder DIR]

Sequences of 128 to 2,048 tokens, always the same number of tokens in a step; then 1 to 16 times as many rows of 256
tokens. Every sequence is cut to its exact length, its prompt of about half of that included; of `dpo` both sides are.
Where cost is linear in tokens, a token takes equally long in all lines; with the length attention alone should grow.
Prints the tables, and writes them as a page with charts, scaling.html in the folder.
"""

import argparse
import json
import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from tempfile import gettempdir

from setting import RLHF, machine, make_small_model, read_metrics, run_quietly, word_problem, write_word_problems

WARM_UP_STEPS = 2  # kernels are chosen and memory is taken in the first steps
LENGTHS = (128, 256, 512, 1024, 2048)
ROW_LENGTH = 256
ROWS = (8, 16, 32, 64, 128)
SIDES = {"sft": 1, "dpo": 2}
"""Sequences that a row of each command has."""
CHARTS = {"cost": "us a token", "peak_memory": "peak memory, MiB"}


@dataclass(frozen=True)
class Point:
    """The figures of a command on `rows` rows a step, whose sequences have `length` tokens."""

    command: str
    length: int
    rows: int
    seconds: float
    peak_memory: float  # MiB

    @property
    def tokens(self) -> int:
        """Tokens of a step, a prompt counted with every sequence that begins with it."""
        return self.rows * self.length * SIDES[self.command]

    @property
    def cost(self) -> float:
        """Return the microseconds of a token: if they do not change, time is linear."""
        return self.seconds / self.tokens * 1e6


def words(rng: random.Random, count: int) -> str:
    """So many words of word problems; at least as many tokens."""
    found: list[str] = []
    while len(found) < count:
        found += word_problem(rng)["question"].split()
    return " ".join(found[:count])


def write_rows(path: Path, command: str, *, length: int, num_rows: int) -> Path:
    """Rows for a command, of which every sequence has more than `length` tokens, about half that in its prompt."""
    rng = random.Random(0)
    prompt, *responses = ("question", "answer") if command == "sft" else ("prompt", "chosen", "rejected")
    with path.open("w", encoding="utf-8") as lines:
        for _ in range(num_rows):
            said = {name: words(rng, length) for name in responses}
            lines.write(json.dumps({prompt: words(rng, length // 3), **said}) + "\n")
    return path


def measure(folder: Path, model: Path, command: str, *, param_dtype: str, length: int, rows: int, steps: int) -> Point:
    """One run of a command."""
    dataset = write_rows(folder / "scaling.jsonl", command, length=length, num_rows=rows * steps)
    output = folder / f"scaling_{command}"
    data = ["--pretrain", model, "--dataset", dataset, "--max_len", length, "--output", output, "--overwrite"]
    shape = ["--train_batch_size", rows, "--param_dtype", param_dtype]
    peak = run_quietly([*RLHF, command, *map(str, data + shape)], log=folder / "scaling.log")
    seconds = [step["time/step"] for step in read_metrics(output)][WARM_UP_STEPS:]
    return Point(command, length, rows, statistics.median(seconds), peak)


def table(points: Sequence[Point]) -> str:
    """One line a point, in Markdown; the last column is the time of a token as a multiple of the first point's."""
    lines = [
        "| command | tokens a sequence | rows a step | tokens a step | s a step | us a token | to the first | MiB |",
        "|---|---|---|---|---|---|---|---|",
    ]
    first: dict[str, float] = {}
    for point in points:
        ratio = point.cost / first.setdefault(point.command, point.cost)
        lines.append(
            f"| {point.command} | {point.length:,} | {point.rows} | {point.tokens:,} | {point.seconds:.2f} "
            f"| {point.cost:.0f} | {ratio:.2f} | {point.peak_memory:,.0f} |"
        )
    return "\n".join(lines)


def chart(points: Sequence[Point], axis: str, value: str, heading: str) -> str:
    """One of the points' fields over another, with a line for each command, as SVG."""
    from rlhf_cli.tracking.report.charts import Series, line_chart

    commands = list(dict.fromkeys(point.command for point in points))
    series = [
        Series(
            name,
            [(getattr(p, axis), getattr(p, value)) for p in points if p.command == name],
            colour=number,
            marked=True,
        )
        for number, name in enumerate(commands, start=1)
    ]
    legend = " ".join(f'<b style="color: var(--c{line.colour})">{line.name}</b>' for line in series)
    return f"<h3>{escape(heading)} {legend}</h3>" + line_chart(series, unit=axis, size=(900, 260), from_zero=True)


def page(sweeps: Sequence[tuple[str, str, Sequence[Point]]]) -> str:
    """The sweeps (title, field that varies, points) as a page with charts and tables."""
    from rlhf_cli.tracking.report.page import packaged

    parts = [f"<title>Scaling</title><style>{packaged('page.css')}</style><main><p class=small>{escape(machine())}</p>"]
    for title, axis, points in sweeps:
        charts = "".join(chart(points, axis, value, heading) for value, heading in CHARTS.items())
        parts.append(f"<h2>{escape(title)}</h2>{charts}<pre>{escape(table(points))}</pre>")
    return f"<!doctype html><meta charset=utf-8>{''.join(parts)}</main>"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path(gettempdir()) / "rlhf-benchmark", help="kept and reused")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--param_dtype", default="bf16", help="fp32 where the processor has no bfloat16")
    parser.add_argument("--tokens", type=int, default=8192, help="tokens of a step while the length varies")
    args = parser.parse_args()
    if args.steps <= WARM_UP_STEPS:
        parser.error(f"--steps must be more than the {WARM_UP_STEPS} that are not counted")
    if args.tokens < max(LENGTHS) * max(SIDES.values()):
        parser.error(f"--tokens must be {max(LENGTHS) * max(SIDES.values())} or more: one row of the longest sequences")
    folder: Path = args.folder
    folder.mkdir(parents=True, exist_ok=True)
    problems = write_word_problems(folder / "scaling_words.jsonl", num_rows=4000)
    model = make_small_model(folder, problems, name="small_model_of_words")

    def sweep(shapes: Sequence[tuple[str, int, int]]) -> list[Point]:
        points = []
        for command, length, rows in shapes:
            points.append(
                measure(
                    folder, model, command, param_dtype=args.param_dtype, length=length, rows=rows, steps=args.steps
                )
            )
            print(f"  {command}, {rows} rows of {length} tokens: {points[-1].seconds:.2f} s a step", flush=True)
        return points

    print(machine(), flush=True)
    by_length = sweep([(name, n, args.tokens // (n * sides)) for n in LENGTHS for name, sides in SIDES.items()])
    by_rows = sweep([(name, ROW_LENGTH, rows // sides) for rows in ROWS for name, sides in SIDES.items()])
    sweeps = (
        (f"Sequence length, {args.tokens:,} tokens a step", "length", by_length),
        (f"Rows a step, {ROW_LENGTH} tokens a sequence", "rows", by_rows),
    )
    for title, _, points in sweeps:
        print(f"\n{title}\n\n{table(points)}")
    (folder / "scaling.html").write_text(page(sweeps), encoding="utf-8")
    print(f"\n{folder / 'scaling.html'}")


if __name__ == "__main__":
    main()
