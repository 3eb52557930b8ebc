"""Host memory over the iterations of an online run: it has to stay the same once everything has been touched.

    python benchmarks/memory_iterations.py [--iterations 200] [--rollout_backend vllm] [--param_dtype fp32]
        [--folder DIR]

Runs `rlhf ppo` with actor, critic, reference and a rollout engine on a tiny model and reads the memory of all processes
of the run from its metrics.jsonl. Prints the memory over fifths of the run and a line through all but the first, and
writes a chart. Exits with 1 if the line rises by more than the limit.
"""

import argparse
import sys
from collections.abc import Sequence
from html import escape
from itertools import pairwise
from pathlib import Path
from tempfile import gettempdir

import numpy as np
from setting import RLHF, machine, read_metrics, run_quietly, write_word_problems

LIMIT = 20.0  # MiB in 100 iterations, of several GiB: less than readings of shared memory differ
PARTS = 5  # of the run; in the first one allocators and caches fill
TINY_MODEL = "--hidden_size 64 --intermediate_size 128 --num_hidden_layers 2 --num_attention_heads 2 --vocab_size 300"
PROMPTS, SAMPLES = 4, 4


def make_tiny_model(folder: Path, dataset: Path) -> Path:
    """A two-layer Qwen2; one that is there is taken."""
    model = folder / "tiny_model"
    if not model.exists():
        command = [*RLHF, "scratch", "--dataset", str(dataset), "--output", str(model), *TINY_MODEL.split()]
        run_quietly(command, log=folder / "scratch.log")
    return model


def run_ppo(args: argparse.Namespace, model: Path, dataset: Path) -> Path:
    """The run directory of a PPO run of that many iterations."""
    output: Path = args.folder / "memory"
    where = ["--pretrain", model, "--prompt_data", dataset, "--output", output, "--overwrite"]
    rollout = ["--rollout_backend", args.rollout_backend, "--rollout_batch_size", PROMPTS, "--max_new_tokens", 16]
    rollout += ["--n_samples_per_prompt", SAMPLES, "--max_len", 512, "--num_episodes", 1000]
    update = ["--train_batch_size", PROMPTS * SAMPLES // 2, "--max_iterations", args.iterations]
    update += ["--param_dtype", args.param_dtype]
    command = [*RLHF, "ppo", *map(str, where + rollout + update), "--reward_funcs", "gsm8k", "--enforce_eager"]
    run_quietly(command, log=args.folder / "memory.log")
    return output


def fifths(memory: Sequence[float]) -> list[tuple[int, int, float]]:
    """(first iteration, last, mean memory) of each fifth of a run."""
    bounds = [len(memory) * part // PARTS for part in range(PARTS + 1)]
    return [(start + 1, stop, float(np.mean(memory[start:stop]))) for start, stop in pairwise(bounds)]


def rise(memory: Sequence[float]) -> float:
    """By how much memory grows in 100 iterations: least squares over all but the first fifth of a run."""
    settled = np.asarray(memory[len(memory) // PARTS :])
    return 100 * float(np.polyfit(np.arange(len(settled)), settled, deg=1)[0])


def page(memory: Sequence[float]) -> str:
    """A chart of the memory in MiB."""
    from rlhf_cli.tracking.report.charts import Series, line_chart
    from rlhf_cli.tracking.report.page import packaged

    series = [Series("MiB", [(step, value) for step, value in enumerate(memory, start=1)], colour=1)]
    chart = line_chart(series, unit="iteration", size=(720, 300))
    title = "<title>Memory</title>"
    style = packaged("page.css")
    return f"<!doctype html><meta charset=utf-8>{title}<style>{style}</style><main>{escape(machine())}{chart}</main>"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path(gettempdir()) / "rlhf-benchmark", help="kept and reused")
    parser.add_argument("--iterations", type=int, default=200)
    parser.add_argument("--rollout_backend", choices=("vllm", "transformers"), default="transformers")
    parser.add_argument(
        "--param_dtype", choices=("bf16", "fp32"), default="bf16", help="with bf16 oneDNN keeps products"
    )
    args = parser.parse_args()
    if args.iterations < 2 * PARTS:
        parser.error(f"--iterations must be {2 * PARTS} or more")
    args.folder.mkdir(parents=True, exist_ok=True)
    dataset = write_word_problems(args.folder / "rows.jsonl", num_rows=4000)
    steps = read_metrics(run_ppo(args, make_tiny_model(args.folder, dataset), dataset))
    memory = [step["memory/host_gib"] * 1024 for step in steps]
    what = f"{PROMPTS} x {SAMPLES} responses, {args.rollout_backend}, {args.param_dtype}"
    print(f"{machine()}\n{len(memory)} iterations of {what}\n")
    print("| iterations | MiB |\n|---|---|")
    for first, last, mean in fifths(memory):
        print(f"| {first} to {last} | {mean:,.1f} |")
    print(f"\nMemory rises by {rise(memory):+.1f} MiB in 100 iterations (limit {LIMIT:g})")
    chart = args.folder / "memory.html"
    chart.write_text(page(memory), encoding="utf-8")
    print(chart)
    return int(rise(memory) > LIMIT)


if __name__ == "__main__":
    sys.exit(main())
