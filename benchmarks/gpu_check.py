"""Run ten steps on one NVIDIA GPU and write a Markdown report.

    python benchmarks/gpu_check.py [--steps 1 4 9] [--folder runs/gpu_check]      (make gpu-check ARGS="--steps 1 4 9")

Creates a model and rows in the folder, runs the commands of each step with a time limit, logs each of them, and
updates gpu_check.md after every command. Later steps run even if one fails. Exits with 2 if no GPU is visible, with 1
if a step failed. Takes about 40 minutes on an H200.
"""

import argparse
import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import torch
from common import OFFLINE, machine, make_model, make_parser, read_metrics, table, write_word_problems

from rlhf_cli.backends.doctor.gpus import gpus
from rlhf_cli.backends.doctor.gpus import run as run_tool
from rlhf_cli.commands.plan import PLANNED
from rlhf_cli.runs.doctor import redacted

REPOSITORY = Path(__file__).parents[1]
MODEL = (
    "--hidden_size 1024 --intermediate_size 4096 --num_hidden_layers 12 --num_attention_heads 16 "
    "--num_key_value_heads 4 --vocab_size 4096"
)
"""182M parameters with head size 64: large enough for memory figures, small enough for one-minute runs."""
NUM_ROWS = 1024
INTERRUPTED = 130
POLL_SECONDS, SECONDS_TO_END = 0.5, 60.0
TAIL_LINES = 30


Figures = Callable[[str], str]
"""Extracts the key figures from the output of a successful command."""

RUN_METRICS = {"time/step": "s an iteration", "perf/tokens_per_second": "tokens/s"}
RUN_METRICS |= {
    "perf/transfer_gb_per_s": "GB/s of weights",
    "rollout_diff_max": "nats between engine and trainer at most",
}
MEMORY_SHARE = 0.5
"""Fraction of GPU memory for an engine that shares the GPU with other models."""


@dataclass(frozen=True)
class Command:
    """One process.

    Args:
        words: arguments of the Python interpreter.
        seconds: time limit.
        figures: extracts the key figures from the output.
        needs: required modules.
        interrupt_at: Ctrl-C is sent when this file exists; the command must save and exit.
    """

    words: tuple[str, ...]
    seconds: int
    figures: Figures
    needs: tuple[str, ...] = ()
    interrupt_at: Path | None = None

    @property
    def shown(self) -> str:
        """Return the command as typed in a terminal."""
        words = self.words[1:] if self.words[0] == "-m" else ("python", *self.words)
        return " ".join(words).replace("rlhf_cli", "rlhf", 1)


@dataclass(frozen=True)
class Step:
    """Commands that check one question."""

    number: int
    title: str
    commands: tuple[Command, ...]


@dataclass(frozen=True)
class Files:
    """Inputs for the commands, and the output folder."""

    model: Path
    rows: Path
    outputs: Path


def steps(files: Files) -> list[Step]:
    """Return all steps in order."""
    found = [
        ("versions, driver, each part once", [_rlhf("doctor --report", 400, _findings)]),
        ("attention kernels and log-probs against float64", [_tests("tests/gpu/test_gpu_kernels.py", 300)]),
        ("packing, log-probs, Liger", [_gpu("packing logits", 600), *_sft(files)]),
        ("training: MFU, sleep and wake", [_gpu("training", 600)]),
        ("unit tests with the GPU visible; sleep at every ZeRO stage", _unit_tests()),
        ("grpo with the transformers engine", [_online(files, "grpo", "transformers", f"{SLEEPS} {TRANSFORMERS}")]),
        ("generation with vLLM; its log-probs and pushes", _generation(files)),
        ("vLLM: speed, sleep, wake by tag, ipc", [_gpu("rollout", 600, needs=VLLM)]),
        ("ppo with vLLM, ipc and both sleeps, continued", list(_continued_ppo(files))),
        ("grpo with an adapter; a killed engine and a killed run", _adapters(files)),
    ]
    return [Step(number, title, tuple(commands)) for number, (title, commands) in enumerate(found, 1)]


VLLM = ("vllm",)
SLEEPS = "--colocate_all_models --vllm_enable_sleep --deepspeed_enable_sleep"
TRANSFORMERS = "--rollout_backend transformers --vllm_sync_backend shm --max_iterations 2"
IPC = f"{SLEEPS} --rollout_backend vllm --vllm_sync_backend ipc --vllm_gpu_memory_utilization {MEMORY_SHARE}"


def _rlhf(line: str, seconds: int, figures: Figures, *, needs: tuple[str, ...] = ()) -> Command:
    return Command(("-m", "rlhf_cli", *line.split()), seconds, figures, needs)


def _gpu(parts: str, seconds: int, *, needs: tuple[str, ...] = ()) -> Command:
    return Command(("benchmarks/gpu.py", "--shape", "1.5b", "--parts", *parts.split()), seconds, _last_table, needs)


def _tests(files: str, seconds: int, *, marker: str = "gpu", needs: tuple[str, ...] = ()) -> Command:
    words = ("-m", "pytest", "-q", "-m", marker, "-p", "no:cacheprovider", *files.split())
    return Command(words, seconds, last_line, needs)


def _unit_tests() -> list[Command]:
    models = [f"models/test_{part}.py" for part in ("logprobs", "attention", "models")]
    others = ["backends/test_deepspeed_engine.py", "backends/test_sleep.py", "data/test_shared_prompts.py"]
    files = " ".join(f"tests/unit/{file}" for file in models + others)
    return [_tests(files, 600, marker="not gpu and not slow"), _tests("tests/gpu/test_gpu_sleep.py", 400)]


def _sft(files: Files) -> Iterator[Command]:
    line = (
        f"sft --pretrain {files.model} --dataset {files.rows} --train_batch_size 64 --max_len 512 --max_steps 20 "
        f"--train_max_tokens_per_gpu 16384 --overwrite --output {files.outputs}/sft"
    )
    yield _rlhf(f"{line} --no_use_liger_kernel", 300, _metrics_of(files.outputs / "sft"))
    liger = files.outputs / "sft_liger"
    yield _rlhf(f"{line}_liger --use_liger_kernel", 300, _metrics_of(liger), needs=("liger_kernel",))


def _online(
    files: Files, algorithm: str, name: str, added: str, *, replaces: bool = True, needs: tuple[str, ...] = ()
) -> Command:
    output = files.outputs / f"{algorithm}_{name}"
    start = "--overwrite" if replaces else "--load_checkpoint"
    line = (
        f"{algorithm} --pretrain {files.model} --prompt_data {files.rows} --reward_funcs gsm8k --max_len 512 "
        f"--max_new_tokens 192 --rollout_batch_size 32 --n_samples_per_prompt 8 --train_batch_size 128 "
        f"--train_max_tokens_per_gpu 16384 {start} --output {output} {added}"
    )
    return _rlhf(line, 400, _metrics_of(output), needs=needs)


def _generation(files: Files) -> list[Command]:
    line = (
        f"generate --pretrain {files.model} --prompt_data {files.rows} --rollout_backend vllm --max_len 512 "
        f"--max_new_tokens 256 --max_samples 256 --stop #### --overwrite --output {files.outputs}"
    )
    runs = [_rlhf(f"{line}/{mode} --{mode}", 300, _speed, needs=VLLM) for mode in ("enforce_eager", "no_enforce_eager")]
    return [*runs, _tests("tests/gpu/test_gpu_engine.py", 300, needs=VLLM)]


def _continued_ppo(files: Files) -> Iterator[Command]:
    added = f"{IPC} --init_kl_coef 0.01 --max_iterations 8 --save_steps 1"
    whole = _online(files, "ppo", "vllm", added, needs=VLLM)
    saved = files.outputs / "ppo_vllm" / "checkpoints" / "step_000001" / "manifest.json"
    yield Command(whole.words, whole.seconds, whole.figures, VLLM, interrupt_at=saved)
    yield _online(files, "ppo", "vllm", added, replaces=False, needs=VLLM)


def _adapters(files: Files) -> list[Command]:
    runs = []
    for stage in (2, 3):
        added = f"{IPC} --lora_rank 16 --zero_stage {stage} --max_iterations 2"
        runs.append(_online(files, "grpo", f"lora_zero{stage}", added, needs=VLLM))
    return [*runs, _tests("tests/gpu/test_gpu_runs.py", 600, needs=VLLM)]


def last_line(output: str) -> str:
    """Return the last nonempty line."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    return lines[-1].strip("= ") if lines else ""


def _speed(output: str) -> str:
    """Return the speed from the final summary of a command."""
    return next(line.split(maxsplit=1)[1] for line in output.splitlines() if line.startswith("  speed "))


def _findings(output: str) -> str:
    """Return the number of `rlhf doctor --report` findings that are not ok, with their text."""
    rows = [line.strip("| ").split(" | ") for line in output.splitlines() if line.startswith("| ")][1:]
    others = [f"{part}: {message}" for status, part, message, *_ in rows if status != "ok"]
    return "; ".join([f"{len(rows)} findings", *others])


def _last_table(output: str) -> str:
    """Return the rows of the last table from benchmarks/gpu.py."""
    rows = output.rsplit("|---|---|---|", 1)[-1].strip().splitlines()
    return "; ".join(": ".join(cell.strip() for cell in row.strip("| ").split(" | ")) for row in rows)


def _metrics_of(run: Path) -> Figures:
    """Return a reader for the last training step in a run, where the first step is warm-up."""

    def figures(_: str) -> str:
        last = read_metrics(run)[-1]
        return ", ".join(f"{last[name]:.3g} {unit}" for name, unit in RUN_METRICS.items() if name in last)

    return figures


@dataclass(frozen=True)
class Outcome:
    """Command result: `ok`, or `failed` or `skipped` with the reason."""

    step: Step
    command: Command
    result: str
    seconds: float = 0.0
    planned: str = ""  # memory and time from `rlhf plan` before the command
    figures: str = ""
    tail: str = ""  # end of a failed command's log


def make_files(folder: Path, *, size: str = MODEL) -> Files:
    """Create or reuse the model and rows for all steps; remove old outputs."""
    outputs, rows = folder / "outputs", folder / "rows.jsonl"
    shutil.rmtree(outputs, ignore_errors=True)  # otherwise a run would resume from an old checkpoint
    if not (folder / "model").exists():
        write_word_problems(rows, num_rows=NUM_ROWS)
    return Files(make_model(folder, rows, shape=size, name="model"), rows, outputs)


def planned(command: Command, *hardware: str) -> str:
    """Plan a command for this GPU, or for the hardware of these flags; empty for commands without a plan."""
    if command.words[:2] != ("-m", "rlhf_cli") or command.words[2] not in PLANNED:
        return ""
    words = ["-m", "rlhf_cli", "plan", *command.words[2:], *hardware, "--json"]
    done = subprocess.run([sys.executable, *words], cwd=REPOSITORY, capture_output=True, text=True, check=False)
    try:
        plan = json.loads(done.stdout)
        memory = max(phase["total"] for gpu in plan["gpus"] for phase in gpu["memory_gib"].values())
        return f"GPU memory at most {memory:.1f} GiB, {sum(plan['seconds'].values()):.3g} s an iteration"
    except (LookupError, ValueError):
        return f"no plan: {last_line(done.stderr)}"


def run_step(step: Step, folder: Path, *, gpu_memory: Callable[[], int | None]) -> Iterable[Outcome]:
    """Yield the outcome for each command in the step."""
    for number, command in enumerate(step.commands, 1):
        missing = [module for module in command.needs if importlib.util.find_spec(module) is None]
        if missing:
            yield Outcome(step, command, f"skipped: {', '.join(missing)} is not installed")
        else:
            yield run_command(step, command, log=folder / f"step_{step.number}_{number}.log", gpu_memory=gpu_memory)


def run_command(step: Step, command: Command, *, log: Path, gpu_memory: Callable[[], int | None]) -> Outcome:
    """Run a command, log its output, and return the outcome."""
    plan, begin = planned(command), time.monotonic()
    environment = os.environ | OFFLINE | {"COLUMNS": "200"}
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
        return Outcome(step, command, f"failed: {reason}: {last_line(text)}", seconds, plan, _memory(peak), tail)
    figures = "interrupted, saved" if command.interrupt_at else _figures(command, text)
    return Outcome(step, command, "ok", seconds, plan, ", ".join(filter(None, (figures, _memory(peak)))))


def _figures(command: Command, text: str) -> str:
    """Return the key figures; unexpected output does not turn success into failure."""
    try:
        return command.figures(text)
    except (OSError, LookupError, ValueError, StopIteration) as error:
        return f"no figures: {type(error).__name__}: {error}"


def _watch(
    process: subprocess.Popen, command: Command, gpu_memory: Callable[[], int | None]
) -> tuple[bool, int | None]:
    """Wait for a process; return whether it finished in time, with the peak memory on the first GPU in MiB."""
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
    """Stop a running process: SIGTERM lets it stop its children, SIGKILL follows."""
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
    """Return a table with all commands, then the last log lines for each failed command."""
    found = list(outcomes)

    def cells(one: Outcome) -> list[str]:
        step, seconds = f"{one.step.number}. {one.step.title}", f"{one.seconds:.0f}"
        row = (step, f"`{one.command.shown}`", one.result, seconds, one.planned, one.figures)
        return [cell.replace("|", "\\|").replace("\n", " ") for cell in row]

    tails = [f"\n`{one.command.shown}`\n\n```text\n{one.tail}\n```" for one in found if one.tail]
    return "\n".join([table("step | what ran | result | seconds | planned | measured", map(cells, found)), *tails])


def parser() -> argparse.ArgumentParser:
    """Return the command line parser."""
    found = make_parser(__doc__)
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
    """Run the steps, update gpu_check.md, and print it at the end; return 1 if a step failed."""
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
