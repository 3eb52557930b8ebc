"""Measure time and memory in online runs.

    python benchmarks/online.py phases [--dataset X] [--iterations 6] [--rollout_backend vllm] [--param_dtype fp32]
    python benchmarks/online.py memory [--iterations 200] [--rollout_backend vllm] [--param_dtype fp32]
    python benchmarks/online.py images [--samples 1 4 16] [--images 32] [--rollout_backend vllm]

phases  time fraction per phase in an `rlhf ppo` iteration with the 11M-parameter model, critic and reference. Exits
        with 1 if more than 15 % is neither generation, forward passes nor training.
memory  total memory by fifths of an `rlhf ppo` run with critic, reference and engine on a tiny model. Exits
        with 1 if a line through the last four fifths rises by more than 20 MiB in 100 iterations.
images  `rlhf reinforce++` on a tiny Idefics3 and photos of 1008 x 756 pixels: peak private memory of the driver
        and in all other processes. Exits with 1 if it grows by more than two copies of the pixels from the
        fewest samples per prompt to the most.
"""

import argparse
import os
import random
import statistics
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np
import psutil
from common import (
    FOLDER,
    TINY_MODEL,
    machine,
    make_model,
    make_parser,
    read_metrics,
    rlhf,
    run_quietly,
    table,
    watched_processes,
    write_rows,
    write_word_problems,
)
from PIL import Image

BACKENDS = ("vllm", "transformers")
WORK = ("generate", "forward", "train")
OVERHEAD_LIMIT = 0.15
WARM_UP_ITERATIONS = 2
MEMORY_LIMIT = 20.0
"""MiB per 100 iterations, from a total of several GiB; less than the measurement error with shared memory."""
MIB = 1 << 20
FIFTHS = 5
WIDTH, HEIGHT = 1008, 756
BLOCK = 12
"""Side in pixels of single-colour blocks, which compress a photo well."""
VISION = f"--image_size {WIDTH} --patch_size 28 --scale_factor 4"
"""81 tokens and 1,296 patches per image."""
ALLOWED_COPIES = 2
COMMON = {"overwrite": True, "enforce_eager": True, "reward_funcs": "gsm8k"}


def run_ppo(args: argparse.Namespace, model: Path, dataset: Path, *flags: object, batch: tuple[int, int]) -> Path:
    """Run `rlhf ppo` with two optimizer steps per iteration on prompts x samples; return the run directory."""
    output = args.folder / "ppo"
    settings = {"pretrain": model, "prompt_data": dataset, "output": output, "rollout_batch_size": batch[0]}
    settings |= {"n_samples_per_prompt": batch[1], "train_batch_size": batch[0] * batch[1] // 2, "max_len": 512}
    settings |= {name: getattr(args, name) for name in ("rollout_backend", "param_dtype")}
    settings |= {"max_iterations": args.iterations, **COMMON}
    run_quietly([*rlhf("ppo", settings), *flags], log=args.folder / "ppo.log")
    return output


def shares(steps: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return the time fraction for each phase in these iterations; `rest` is outside all phases."""
    total = sum(step["time/step"] for step in steps)
    names = dict.fromkeys(name for step in steps for name in step if name.startswith("time/") and name != "time/step")
    parts = {name.removeprefix("time/"): sum(step.get(name, 0.0) for step in steps) / total for name in names}
    return parts | {"rest": 1 - sum(parts.values())}


def overhead(parts: Mapping[str, float]) -> float:
    """Return the time fraction outside generation, forward passes and training."""
    return sum(share for name, share in parts.items() if name not in WORK)


def phases(args: argparse.Namespace) -> int:
    """Measure the phases in a ppo run."""
    dataset = args.dataset or write_word_problems(args.folder / "rows.jsonl")
    flags = ("--max_new_tokens", 128, "--colocate_all_models")
    output = run_ppo(args, make_model(args.folder, dataset), dataset, *flags, batch=(32, 4))
    steps = read_metrics(output)[WARM_UP_ITERATIONS:]
    parts = shares(steps)
    seconds, tokens = (statistics.mean(step[name] for step in steps) for name in ("time/step", "num_tokens"))
    print(f"{len(steps)} iterations, {seconds:.1f} s and {tokens:,.0f} tokens each\n")
    ordered = sorted(parts.items(), key=lambda part: -part[1])
    print(table("phase | share | seconds", ((name, f"{part:.1%}", f"{part * seconds:.3f}") for name, part in ordered)))
    print(f"\nNeither generation, forward nor training: {overhead(parts):.1%} (limit {OVERHEAD_LIMIT:.0%})")
    return int(overhead(parts) > OVERHEAD_LIMIT)


def fifths(memory: Sequence[float]) -> list[tuple[int, int, float]]:
    """Return first iteration, last iteration and mean memory for each fifth of a run."""
    bounds = [len(memory) * part // FIFTHS for part in range(FIFTHS + 1)]
    return [(start + 1, stop, float(np.mean(memory[start:stop]))) for start, stop in pairwise(bounds)]


def rise(memory: Sequence[float]) -> float:
    """Return the growth in 100 iterations: least squares without the first fifth, in which caches fill."""
    settled = np.asarray(memory[len(memory) // FIFTHS :])
    return 100 * float(np.polyfit(np.arange(len(settled)), settled, deg=1)[0])


def memory(args: argparse.Namespace) -> int:
    """Measure memory over iterations in a ppo run."""
    dataset = args.dataset or write_word_problems(args.folder / "rows.jsonl")
    model = make_model(args.folder, dataset, shape=TINY_MODEL, name="tiny_model")
    output = run_ppo(args, model, dataset, "--max_new_tokens", 16, "--num_episodes", 1000, batch=(4, 4))
    used = [step["memory/host_gib"] * 1024 for step in read_metrics(output)]
    print(table("iterations | MiB", ((f"{first} to {last}", f"{mean:,.1f}") for first, last, mean in fifths(used))))
    print(f"\nMemory rises by {rise(used):+.1f} MiB in 100 iterations (limit {MEMORY_LIMIT:g})")
    return int(rise(used) > MEMORY_LIMIT)


def write_photos(folder: Path, count: int) -> Path:
    """Write photos with one question each; return the data file."""
    rng, rows = np.random.default_rng(0), []
    (folder / "photos").mkdir(parents=True, exist_ok=True)
    for number in range(count):
        colours = rng.integers(0, 256, (HEIGHT // BLOCK, WIDTH // BLOCK, 3), dtype=np.uint8)
        name = f"photos/{number:04}.jpg"
        Image.fromarray(np.kron(colours, np.ones((BLOCK, BLOCK, 1), np.uint8))).save(folder / name, quality=90)
        rows.append({"images": [name], "prompt": f"<image>How many? {number}", "answer": str(random.randrange(9))})
    return write_rows(folder / "photos.jsonl", rows)


@dataclass
class Peaks:
    """Peak private memory in bytes, for the driver and for all other processes in its run."""

    driver: int = 0
    others: int = 0

    def look(self, processes: Sequence[psutil.Process]) -> None:
        """Update the peaks with the current memory of child processes and their descendants."""
        driver = others = 0
        for process in processes:
            with suppress(psutil.Error):
                usage = process.memory_info()
                private = int(usage.rss - getattr(usage, "shared", 0))
                is_driver = process.ppid() == os.getpid()
                driver, others = driver + private * is_driver, others + private * (not is_driver)
        self.driver, self.others = max(self.driver, driver), max(self.others, others)


def images(args: argparse.Namespace) -> int:
    """Measure memory by samples per prompt."""
    dataset = write_photos(args.folder, args.images)
    model = make_model(args.folder, dataset, shape=f"{TINY_MODEL} {VISION}", name="tiny_idefics3")
    pixels, rows, totals = args.images * WIDTH * HEIGHT * 3, [], []
    print(f"{args.images} images, {pixels / MIB:,.0f} MiB of pixels, {args.rollout_backend}\n")
    for samples in args.samples:
        output, peaks = args.folder / f"samples_{samples}", Peaks()
        settings = {"pretrain": model, "prompt_data": dataset, "output": output, "max_iterations": 1, **COMMON}
        settings |= {"rollout_backend": args.rollout_backend, "rollout_batch_size": args.images}
        settings |= {"n_samples_per_prompt": samples, "max_new_tokens": 4, "max_len": 256}
        settings |= {"train_batch_size": args.images * samples, "train_max_tokens_per_gpu": 4096}
        with watched_processes(peaks.look):
            run_quietly(rlhf("reinforce++", settings), log=args.folder / f"samples_{samples}.log")
        totals.append(peaks.driver + peaks.others)
        rows.append((samples, f"{peaks.driver / MIB:,.0f}", f"{peaks.others / MIB:,.0f}"))
    growth = (totals[-1] - totals[0]) / pixels
    print(table("samples of a prompt | driver, MiB | roles and engine, MiB", rows))
    print(f"\nThe sum grows by {growth:.1f} copies of the pixels (limit {ALLOWED_COPIES})")
    return int(growth > ALLOWED_COPIES)


def main() -> int:
    parser = make_parser(__doc__)
    parser.add_argument("--folder", type=Path, default=FOLDER, help="for models, data and logs; reused")
    parts = parser.add_subparsers(required=True)
    for run, iterations, least, backend in ((phases, 6, 3, "vllm"), (memory, 200, 2 * FIFTHS, "transformers")):
        part = parts.add_parser(run.__name__)
        part.add_argument("--iterations", type=int, default=iterations, help=f"{least} or more")
        part.add_argument("--rollout_backend", choices=BACKENDS, default=backend)
        part.add_argument("--param_dtype", choices=("bf16", "fp32"), default="bf16")
        part.add_argument("--dataset", type=Path, help="jsonl with question and answer; synthetic if absent")
        part.set_defaults(run=run, least=least)
    part = parts.add_parser("images")
    part.add_argument("--rollout_backend", choices=BACKENDS, default="transformers")
    part.add_argument("--samples", type=int, nargs="+", default=[1, 4, 16])
    part.add_argument("--images", type=int, default=32)
    part.set_defaults(run=images)
    args = parser.parse_args()
    if "least" in args and args.iterations < args.least:
        parser.error(f"--iterations must be {args.least} or more")
    args.folder.mkdir(parents=True, exist_ok=True)
    print(machine(), flush=True)
    return args.run(args)


if __name__ == "__main__":
    sys.exit(main())
