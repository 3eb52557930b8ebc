"""Implementation of `rlhf quickstart`: writes data, runs the actual commands in order, and prints a summary."""

import json
import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path

from rich.console import Console
from rich.table import Table

from rlhf_cli.backends.process.output_lock import output_lock
from rlhf_cli.backends.process.signals import stops_forwarded
from rlhf_cli.commands.quickstart import QuickstartConfig, QuickstartGroup
from rlhf_cli.errors import RunError, UsageError
from rlhf_cli.runs.calculator_walkthrough import CalculatorWalkthrough
from rlhf_cli.runs.walkthroughs import PicturesWalkthrough, SumsWalkthrough, Walkthrough
from rlhf_cli.tracking.figures import duration, number
from rlhf_cli.tracking.summary import Summary, summarise
from rlhf_cli.tracking.view.export import write_report

_PARTS = ("data", "untrained", "sft", "practice", "practice_alone", "eval", "eval_alone", "report.html")


def walkthrough(settings: QuickstartGroup) -> Walkthrough:
    """Select the walkthrough for the settings."""
    kind: type[Walkthrough] = SumsWalkthrough
    if settings.images:
        kind = PicturesWalkthrough
    elif settings.environment is not None:
        kind = CalculatorWalkthrough
    given = {} if settings.algorithm is None else {"algorithm": settings.algorithm}
    return kind(Path(settings.output), settings.seed, **given)


def run_quickstart(settings: QuickstartGroup) -> None:
    """Run all stages and print the results. Raises RunError if a stage fails."""
    with output_lock(Path(settings.output)):
        _run_stages(settings)


def _run_stages(settings: QuickstartGroup) -> None:
    walk = walkthrough(settings)
    console = Console(highlight=False)
    # Before writing data: a refused folder must stay unchanged.
    _make_room(walk.root, overwrite=settings.overwrite)
    walk.write_data()
    console.print(walk.introduction, soft_wrap=True)
    seconds: dict[str, float] = {}
    for step in walk.steps():
        begin = time.perf_counter()
        _run(console, step.title, step.words)
        if step.stage is not None:
            seconds[step.stage] = time.perf_counter() - begin
    accuracies = _accuracies(walk)
    headline = {
        f"{what} after {stage}": accuracy for stage, found in accuracies.items() for what, accuracy in found.items()
    }
    report = write_report(walk.root, stages=walk.folders, headline=headline)
    console.print()
    console.print(_results(walk, accuracies, seconds))
    console.print(f"Report   {report}")
    run = shlex.quote(str(walk.root / "practice"))
    console.print(f"Model    {walk.root / 'practice' / 'model'}")
    # The tiny models have few positions.
    commands = (f"rlhf chat {run} --max_new_tokens 16", f"rlhf view {run}", "rlhf sft --help")
    for prefix, command in zip(("Next", "", ""), commands, strict=True):
        console.print(f"{prefix:<9}{command}", markup=False, soft_wrap=True)


def _make_room(root: Path, *, overwrite: bool) -> None:
    left = [root / part for part in _PARTS if (root / part).exists()]
    if left and not overwrite:
        raise UsageError(
            f"--output {root} contains an earlier quickstart: replace it with --overwrite, or choose another folder"
        )
    for path in left:
        shutil.rmtree(path) if path.is_dir() else path.unlink()


def _run(console: Console, title: str, words: list[str]) -> None:
    console.print(f"\n[bold cyan]{title}[/]")
    console.print(f"$ rlhf {shlex.join(words)}", style="dim", soft_wrap=True, markup=False)
    # A new process per command, as in a terminal, so that memory and GPUs are released.
    command = subprocess.Popen([sys.executable, "-m", "rlhf_cli", *words])
    with stops_forwarded(command):
        status = command.wait()
    # 130 is the status after Ctrl-C.
    if status == 130:
        raise KeyboardInterrupt
    if status:
        raise RunError(f"the step above failed with status {status}; see the message there")


def _accuracies(walk: Walkthrough) -> dict[str, dict[str, float]]:
    """Return the accuracies on held-out data by stage and column, for evaluated models."""
    accuracies: dict[str, dict[str, float]] = {stage: {} for stage in walk.folders}
    stages = {str(folder): stage for stage, folder in walk.folders.items()}
    for what, measured in walk.measured.items():
        results = json.loads((walk.root / measured.evaluation / "eval.json").read_text())["results"]
        for one in results:
            if Path(one["source"]).name == Path(measured.data).name:
                accuracies[stages[one["pretrain"]]][what] = one["figures"]["accuracy"]["value"]
    return accuracies


def _results(walk: Walkthrough, accuracies: dict[str, dict[str, float]], seconds: dict[str, float]) -> Table:
    table = Table(box=None, pad_edge=False, title="Quickstart", title_justify="left", title_style="bold")
    measured = list(walk.measured)
    for column in ("stage", *(f"{what} on held-out data" for what in measured), "time", "of which", "tokens/s"):
        table.add_column(column, justify="left" if column in ("stage", "of which") else "right")
    for stage, folder in walk.folders.items():
        summary, found = summarise(folder), accuracies[stage]
        speed = summary.tokens_per_second
        table.add_row(
            f"after {stage}",
            *(f"{found[what]:.1%}" if what in found else "" for what in measured),
            duration(seconds[stage]),
            _phases(summary),
            number(speed) if speed is not None else "",
        )
    return table


def _phases(summary: Summary) -> str:
    longest = sorted(summary.phases.items(), key=lambda item: -item[1])[:4]
    return ", ".join(f"{name} {duration(spent)}" for name, spent in longest if spent >= 0.5)


def quickstart(config: QuickstartConfig) -> None:
    """Run `rlhf quickstart`."""
    run_quickstart(config.quickstart)
