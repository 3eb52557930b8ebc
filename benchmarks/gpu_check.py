"""Ten steps on one NVIDIA GPU, and one Markdown file about them that can be sent to others.

    python benchmarks/gpu_check.py [--steps 1 4 9] [--folder runs/gpu_check]      (make gpu-check ARGS="--steps 1 4 9")

Makes a model and rows in the folder, runs each step's commands (gpu_steps.py) with a time limit, keeps a log of each,
and writes gpu_check.md there after every command. A step that fails does not stop the others. Ends with 2 if no GPU is
visible, with 1 if a step failed. About 40 minutes on an H200.
"""

import argparse
import importlib.util
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import torch
from gpu_steps import Command, Files, Step, last_line, steps
from setting import RLHF, machine, run_quietly, write_word_problems

from rlhf_cli.backends.doctor.gpus import gpus
from rlhf_cli.backends.doctor.gpus import run as run_tool
from rlhf_cli.runs.doctor import redacted

REPOSITORY = Path(__file__).parents[1]
MODEL = (
    "--hidden_size 1024 --intermediate_size 4096 --num_hidden_layers 12 --num_attention_heads 16 "
    "--num_key_value_heads 4 --vocab_size 4096"
)
"""182M parameters in heads of 64: large enough for figures of memory, small enough for a minute a run."""
NUM_ROWS = 1024
INTERRUPTED = 130
POLL_SECONDS, SECONDS_TO_END = 0.5, 60.0
TAIL_LINES = 30


@dataclass(frozen=True)
class Outcome:
    """How one command ended: `result` is `ok`, `failed` or `skipped`, with the reason."""

    step: Step
    command: Command
    result: str
    seconds: float = 0.0
    figures: str = ""
    tail: str = ""  # of the log of a command that failed


def make_files(folder: Path, *, size: str = MODEL) -> Files:
    """Make the model and the rows that all steps work on, unless they are there; remove an earlier check's outputs."""
    folder.mkdir(parents=True, exist_ok=True)
    files = Files(folder / "model", folder / "rows.jsonl", folder / "outputs")
    shutil.rmtree(files.outputs, ignore_errors=True)  # a checkpoint of then would end a run of now
    if not files.model.exists():
        write_word_problems(files.rows, num_rows=NUM_ROWS)
        words = ["scratch", "--dataset", str(files.rows), *size.split(), "--output", str(files.model)]
        run_quietly([*RLHF, *words], log=folder / "scratch.log")
    return files


def run_step(step: Step, folder: Path, *, gpu_memory: Callable[[], int | None]) -> Iterable[Outcome]:
    """Yield the outcome of each of the step's commands."""
    for number, command in enumerate(step.commands, 1):
        missing = [module for module in command.needs if importlib.util.find_spec(module) is None]
        if missing:
            yield Outcome(step, command, f"skipped: {', '.join(missing)} is not installed")
        else:
            yield run_command(step, command, log=folder / f"step_{step.number}_{number}.log", gpu_memory=gpu_memory)


def run_command(step: Step, command: Command, *, log: Path, gpu_memory: Callable[[], int | None]) -> Outcome:
    """Run a command with its output in a log, and return how it ended."""
    begin = time.monotonic()
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "COLUMNS": "200"}
    with log.open("w") as output:
        process = subprocess.Popen(
            [sys.executable, *command.words],
            cwd=REPOSITORY,
            env=environment,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            in_time, peak = _watch(process, command, gpu_memory)
        finally:
            _end(process)
    seconds = time.monotonic() - begin
    text = log.read_text(errors="replace")
    expected = 0 if command.interrupt_at is None else INTERRUPTED
    if not in_time or process.returncode != expected:
        reason = f"status {process.returncode}" if in_time else f"no end within {command.seconds} s"
        tail = "\n".join(text.splitlines()[-TAIL_LINES:])
        return Outcome(step, command, f"failed: {reason}: {last_line(text)}", seconds, _memory(peak), tail)
    figures = "interrupted, saved" if command.interrupt_at else _figures(command, text)
    return Outcome(step, command, "ok", seconds, ", ".join(filter(None, (figures, _memory(peak)))))


def _figures(command: Command, text: str) -> str:
    """Return the key figures; a command that succeeded stays so, even if its output is not as expected."""
    try:
        return command.figures(text)
    except (OSError, LookupError, ValueError, StopIteration) as error:
        return f"no figures: {type(error).__name__}: {error}"


def _watch(
    process: subprocess.Popen, command: Command, gpu_memory: Callable[[], int | None]
) -> tuple[bool, int | None]:
    """Wait for the end of a process; whether it came in time, and the most memory in use on the first GPU, in MiB."""
    deadline, peak, sent = time.monotonic() + command.seconds, None, False
    while process.poll() is None and time.monotonic() < deadline:
        used = gpu_memory()
        peak = peak if used is None else max(used, peak or 0)
        if command.interrupt_at is not None and command.interrupt_at.exists() and not sent:
            os.killpg(process.pid, signal.SIGINT)
            sent = True
        time.sleep(POLL_SECONDS)
    return process.poll() is not None, peak


def _end(process: subprocess.Popen) -> None:
    """End a process that still runs: SIGTERM lets it end its own children, SIGKILL comes after."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        if process.poll() is not None:
            return
        os.killpg(process.pid, number)
        try:
            process.wait(SECONDS_TO_END)
        except subprocess.TimeoutExpired:
            continue


def _memory(peak: int | None) -> str:
    return "" if peak is None else f"GPU memory at most {peak / 1024:.1f} GiB"


def used_gpu_memory() -> int | None:
    """Return the memory in use on the first GPU, in MiB."""
    listed = run_tool(["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"])
    first = (listed or "").split()
    return int(first[0]) if first and first[0].isdigit() else None


def header() -> str:
    """Return date, commit, GPUs, driver and versions."""
    commit = run_tool(["git", "-C", str(REPOSITORY), "describe", "--always", "--dirty"]) or "unknown"
    found = gpus()
    cards = ", ".join(f"{gpu.name} ({gpu.memory} MiB)" for gpu in found) or "no GPU"
    driver = found[0].driver if found else "none"
    now = datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")
    return (
        f"# GPU check\n\n- {now}, commit {commit.strip()}\n- {cards}; driver {driver}; CUDA {torch.version.cuda}\n"
        f"- {machine()}"
    )


def report(outcomes: Iterable[Outcome]) -> str:
    """Return the table of all commands, then the end of each log of a failed command."""
    found = list(outcomes)
    lines = ["| step | what ran | result | seconds | figures |", "|---|---|---|---|---|"]
    for one in found:
        cells = (
            f"{one.step.number}. {one.step.title}",
            f"`{one.command.shown}`",
            one.result,
            f"{one.seconds:.0f}",
            one.figures,
        )
        lines.append("| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in cells) + " |")
    tails = [f"\n`{one.command.shown}`\n\n```text\n{one.tail}\n```" for one in found if one.tail]
    return "\n".join(lines + tails)


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    found = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    found.add_argument("--steps", nargs="+", type=int, choices=range(1, 11), default=list(range(1, 11)))
    found.add_argument("--folder", type=Path, default=Path("runs/gpu_check"), help="of the model, logs and report")
    return found


def main() -> int:
    args = parser().parse_args()
    if not torch.cuda.is_available():
        print("No NVIDIA GPU is visible to PyTorch here, so there is nothing to check.", file=sys.stderr)
        return 2
    folder = args.folder.absolute()
    chosen = [step for step in steps(make_files(folder)) if step.number in args.steps]
    return check(chosen, folder, gpu_memory=used_gpu_memory)


def check(chosen: Iterable[Step], folder: Path, *, gpu_memory: Callable[[], int | None]) -> int:
    """Run the steps, keep gpu_check.md up to date, and print it at the end; 1 if one of them failed."""
    about, outcomes, file = header(), [], folder / "gpu_check.md"
    for step in chosen:
        print(f"{step.number}. {step.title}", flush=True)
        for outcome in run_step(step, folder, gpu_memory=gpu_memory):
            print(f"   {outcome.result} after {outcome.seconds:.0f} s: {outcome.command.shown}", flush=True)
            outcomes.append(outcome)
            text = f"{about}\n\n{report(outcomes)}\n".replace(f"{REPOSITORY}/", "")
            file.write_text(redacted(text), encoding="utf-8")
    print(f"\n{file.read_text(encoding='utf-8')}\nwritten to {file}")
    return int(any(outcome.result.startswith("failed") for outcome in outcomes))


if __name__ == "__main__":
    sys.exit(main())
