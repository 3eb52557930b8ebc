"""`rlhf data --contamination`: searches the rows of a training command for the prompts of benchmarks."""

from collections import Counter
from dataclasses import dataclass

from rich.console import Console
from rich.text import Text

from rlhf_cli.commands.data import DataCommandConfig
from rlhf_cli.data.contamination import BenchmarkIndex, BenchmarkPrompt, Overlap, texts_in
from rlhf_cli.data.formats.choosing import prompt_formats
from rlhf_cli.data.reading.sources import load_rows
from rlhf_cli.errors import UsageError
from rlhf_cli.runs.data_settings import benchmark_settings, settings_of
from rlhf_cli.tracking.terminal.rows_bar import rows_bar

_MAX_LINES = 100
"""Overlaps to print; JSON has all."""
_MAX_WORDS = 20
_NAME_WIDTH = 48


@dataclass(frozen=True)
class ContaminationReport:
    """Overlaps, and per benchmark the number of prompts and of those without a word to search for."""

    num_rows: int
    prompts: Counter[str]
    unchecked: Counter[str]
    overlaps: list[Overlap]

    @property
    def num_prompts(self) -> int:
        """Number of prompts in all benchmarks."""
        return self.prompts.total()

    @property
    def found(self) -> Counter[str]:
        """Number of overlapping prompts per benchmark."""
        return Counter(overlap.prompt.benchmark for overlap in self.overlaps)


def find_overlaps(config: DataCommandConfig) -> ContaminationReport:
    """Search all texts of the rows that the command would load.

    Raises:
        UsageError: the data or a benchmark is missing, or a row of a benchmark has no prompt.
    """
    # Only for its errors: the rows are searched as they are stored, in any format.
    settings_of(config.show.for_, config.data, config.template)
    assert config.show.contamination is not None
    prompts = _benchmark_prompts(config.show.contamination)
    index, data = BenchmarkIndex(prompts), config.data
    rows = load_rows(
        data.dataset,
        split=data.dataset_split,
        probs=data.dataset_probs,
        seed=config.show.seed,
        max_samples=data.max_samples,
        data_format=data.data_format,
    )
    with rows_bar(shown=True) as update:
        for number, row in enumerate(rows, start=1):
            index.add(row.where, texts_in(dict(row)))
            update(number, len(rows))
    counts = Counter(prompt.benchmark for prompt in prompts)
    return ContaminationReport(len(rows), counts, index.num_unchecked, index.overlaps())


def _benchmark_prompts(benchmarks: str) -> list[BenchmarkPrompt]:
    settings = benchmark_settings(benchmarks)
    try:
        rows = load_rows(benchmarks, split=settings.prompt_split, seed=0)
        formats = prompt_formats(settings, rows.sources)
        read = [(row, formats[row.source.name].read_prompt(row)) for row in rows]
    except UsageError as error:
        # The flag selects the column of the data, not of the benchmark.
        message = str(error).replace("--input_key", "rename the column")
        raise UsageError(f"--contamination: {message}") from error
    # System messages are instructions that many rows share.
    return [
        BenchmarkPrompt(
            row.source.name,
            row.where,
            "\n".join(message.content for message in prompt.messages if message.role != "system"),
        )
        for row, prompt in read
    ]


def show_overlaps(report: ContaminationReport, console: Console) -> None:
    """Print a table of benchmarks, then the overlapping prompts."""

    def line(text: Text | str = "") -> None:
        console.print(text, soft_wrap=True, highlight=False)

    line(Text(f"Benchmark prompts in {report.num_rows:,} rows", "bold cyan"))
    line(Text(f"{'  benchmark':<{_NAME_WIDTH}}{'prompts':>9}{'overlap':>9}{'share':>9}{'unchecked':>11}", "bold"))
    for name, count in report.prompts.items():
        found, unchecked = report.found[name], report.unchecked[name]
        line(Text(f"  {name:<{_NAME_WIDTH - 2}}{count:>9,}{found:>9,}{found / count:>9.1%}{unchecked:>11,}"))
    line()
    for overlap in report.overlaps[:_MAX_LINES]:
        line(_described(overlap))
    if len(report.overlaps) > _MAX_LINES:
        line(f"... and {len(report.overlaps) - _MAX_LINES:,} more: --json lists all")
    if not report.overlaps:
        line("no overlap found")


def _described(overlap: Overlap) -> Text:
    others = f" and {overlap.num_rows - 1:,} more" if overlap.num_rows > 1 else ""
    words = overlap.shared.split()
    shared = " ".join(words[:_MAX_WORDS]) + (" ..." if len(words) > _MAX_WORDS else "")
    place = f"{overlap.prompt.where}: {overlap.share:.0%} in {overlap.row}{others}: "
    return Text(place).append(f'"{shared}"', "yellow")


def overlaps_as_json(report: ContaminationReport) -> dict[str, object]:
    """Return the report as JSON values."""
    benchmarks = [
        {"name": name, "prompts": count, "overlap": report.found[name], "unchecked": report.unchecked[name]}
        for name, count in report.prompts.items()
    ]
    overlaps = [
        {
            "benchmark": overlap.prompt.benchmark,
            "prompt": overlap.prompt.where,
            "row": overlap.row,
            "rows": overlap.num_rows,
            "share": overlap.share,
            "shared": overlap.shared,
        }
        for overlap in report.overlaps
    ]
    return {"rows": report.num_rows, "benchmarks": benchmarks, "overlaps": overlaps}
