"""The steps of benchmarks/gpu_check.py: ten things that only an NVIDIA GPU can show, as command lines.

Leaves out running them. Every command works on a model and on rows that gpu_check.py makes.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from setting import read_metrics

Figures = Callable[[str], str]
"""Reads the key figures of a command that succeeded from its output."""

RUN_METRICS = {"time/step": "s an iteration", "perf/tokens_per_second": "tokens/s"}
RUN_METRICS |= {
    "perf/transfer_gb_per_s": "GB/s of weights",
    "rollout_diff_max": "nats between engine and trainer at most",
}
MEMORY_SHARE = 0.5
"""Share of the GPU's memory for an engine that other models share the GPU with."""


@dataclass(frozen=True)
class Command:
    """One process.

    Args:
        words: what follows the Python interpreter.
        seconds: the limit.
        figures: reads the key figures from the output.
        needs: modules that must be installed.
        interrupt_at: the command gets Ctrl-C when this file exists, and must save and end.
    """

    words: tuple[str, ...]
    seconds: int
    figures: Figures
    needs: tuple[str, ...] = ()
    interrupt_at: Path | None = None

    @property
    def shown(self) -> str:
        """Return the command as a person types it."""
        words = self.words[1:] if self.words[0] == "-m" else ("python", *self.words)
        return " ".join(words).replace("rlhf_cli", "rlhf", 1)


@dataclass(frozen=True)
class Step:
    """Commands that answer one question."""

    number: int
    title: str
    commands: tuple[Command, ...]


@dataclass(frozen=True)
class Files:
    """The inputs of the commands, and the folder for their output."""

    model: Path
    rows: Path
    outputs: Path


def steps(files: Files) -> list[Step]:
    """Return all steps in their order."""
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
    """Return the last line that is not empty."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    return lines[-1].strip("= ") if lines else ""


def _speed(output: str) -> str:
    """Return the speed from the summary that ends the output of a command."""
    return next(line.split(maxsplit=1)[1] for line in output.splitlines() if line.startswith("  speed "))


def _findings(output: str) -> str:
    """Return the findings of `rlhf doctor --report` that are not ok, and how many there are."""
    rows = [line.strip("| ").split(" | ") for line in output.splitlines() if line.startswith("| ")][1:]
    others = [f"{part}: {message}" for status, part, message, *_ in rows if status != "ok"]
    return "; ".join([f"{len(rows)} findings", *others])


def _last_table(output: str) -> str:
    """Return the rows of the table that ends the output of benchmarks/gpu.py."""
    rows = output.rsplit("|---|---|---|", 1)[-1].strip().splitlines()
    return "; ".join(": ".join(cell.strip() for cell in row.strip("| ").split(" | ")) for row in rows)


def _metrics_of(run: Path) -> Figures:
    """Return the reader of a training run's last step, whose first one warms up."""

    def figures(_: str) -> str:
        last = read_metrics(run)[-1]
        return ", ".join(f"{last[name]:.3g} {unit}" for name, unit in RUN_METRICS.items() if name in last)

    return figures
