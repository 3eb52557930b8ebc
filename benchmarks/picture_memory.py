"""Host memory of an iteration with pictures, by the samples of a prompt: pixels must not be copied for each sample.

    python benchmarks/picture_memory.py [--samples 1 4 16] [--pictures 32] [--rollout_backend vllm] [--folder DIR]

Runs `rlhf reinforce++` with actor, reference and a rollout engine on a tiny Idefics3 and photos of 1008 x 756 pixels,
and reads the memory of the driver and of all other processes while it runs. Prints the peaks as a table. Exits with 1
if the peak of all processes grows by more than two copies of the pixels from the fewest samples to the most.
"""

import argparse
import json
import random
import sys
import threading
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import gettempdir
from typing import Self

import numpy as np
import psutil
from PIL import Image
from setting import RLHF, machine, run_quietly

WIDTH, HEIGHT = 1008, 756
BLOCK = 12  # pixels that have one colour, so that a photo's file is much smaller than its pixels
MODEL = "--hidden_size 64 --intermediate_size 128 --num_hidden_layers 2 --num_attention_heads 2 --vocab_size 300"
TOWER = f"--image_size {WIDTH} --patch_size 28 --scale_factor 4"  # 81 tokens and 1,296 patches a picture
POLL_SECONDS = 0.1
ALLOWED_COPIES = 2
MIB = 1 << 20


def write_photos(folder: Path, count: int) -> Path:
    """Write that many photos as JPEG files, and a row that asks about each; return the file of rows."""
    rng = np.random.default_rng(0)
    (folder / "photos").mkdir(parents=True, exist_ok=True)
    rows = []
    for number in range(count):
        colours = rng.integers(0, 256, (HEIGHT // BLOCK, WIDTH // BLOCK, 3), dtype=np.uint8)
        name = f"photos/{number:04}.jpg"
        Image.fromarray(np.kron(colours, np.ones((BLOCK, BLOCK, 1), np.uint8))).save(folder / name, quality=90)
        rows.append({"images": [name], "prompt": f"<image>How many? {number}", "answer": str(random.randrange(9))})
    path = folder / "photos.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def make_model(folder: Path, rows: Path) -> Path:
    """Make a tiny Idefics3; one that is there is taken."""
    model = folder / "tiny_idefics3"
    if not model.exists():
        command = [*RLHF, "scratch", "--dataset", str(rows), "--output", str(model), *MODEL.split(), *TOWER.split()]
        run_quietly(command, log=folder / "scratch.log")
    return model


@dataclass
class Peaks:
    """The most private memory in bytes at one look: of the driver, and of all other processes of its run."""

    driver: int = 0
    others: int = 0

    @property
    def total(self) -> int:
        """Both; they need not have been reached at the same time."""
        return self.driver + self.others

    def look(self) -> None:
        """Raise the peaks to the present memory of the command that this process started, if it is higher."""
        commands = psutil.Process().children()
        driver, others = 0, 0
        for command in commands:
            driver += private_bytes(command)
            others += sum(map(private_bytes, command.children(recursive=True)))
        self.driver, self.others = max(self.driver, driver), max(self.others, others)


def private_bytes(process: psutil.Process) -> int:
    """Return the memory of a process that it does not share; 0 if it has just ended."""
    with suppress(psutil.Error):
        usage = process.memory_info()
        return int(usage.rss - getattr(usage, "shared", 0))
    return 0


class Watch:
    """Looks at the memory of this process's commands until the end of the block."""

    def __init__(self) -> None:
        self.peaks = Peaks()
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._look)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *failure: object) -> None:
        self._is_over.set()
        self._thread.join()

    def _look(self) -> None:
        while not self._is_over.wait(POLL_SECONDS):
            with suppress(psutil.Error):
                self.peaks.look()


def run(args: argparse.Namespace, model: Path, rows: Path, samples: int) -> Peaks:
    """Return the peaks of an iteration over all pictures, with that many samples of each prompt."""
    output = args.folder / f"samples_{samples}"
    where = ["--pretrain", model, "--prompt_data", rows, "--output", output, "--overwrite"]
    rollout = ["--rollout_backend", args.rollout_backend, "--rollout_batch_size", args.pictures]
    rollout += ["--n_samples_per_prompt", samples, "--max_new_tokens", 4, "--max_len", 256, "--enforce_eager"]
    update = ["--train_batch_size", args.pictures * samples, "--max_iterations", 1]
    update += ["--train_max_tokens_per_gpu", 4096, "--reward_funcs", "gsm8k"]
    with Watch() as watch:
        command = [*RLHF, "reinforce++", *map(str, where + rollout + update)]
        run_quietly(command, log=args.folder / f"samples_{samples}.log")
    return watch.peaks


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path(gettempdir()) / "rlhf-benchmark-pictures")
    parser.add_argument("--samples", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--pictures", type=int, default=32)
    parser.add_argument("--rollout_backend", choices=("vllm", "transformers"), default="transformers")
    args = parser.parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    rows = write_photos(args.folder, args.pictures)
    model, pixels = make_model(args.folder, rows), args.pictures * WIDTH * HEIGHT * 3
    print(f"{machine()}\n{args.pictures} pictures, {pixels / MIB:,.0f} MiB of pixels, {args.rollout_backend}\n")
    print("| samples of a prompt | driver, MiB | roles and engine, MiB |\n|---|---|---|")
    totals = []
    for samples in args.samples:
        peaks = run(args, model, rows, samples)
        totals.append(peaks.total)
        print(f"| {samples} | {peaks.driver / MIB:,.0f} | {peaks.others / MIB:,.0f} |", flush=True)
    growth = (totals[-1] - totals[0]) / pixels
    print(f"\nThe sum grows by {growth:.1f} copies of the pixels (limit {ALLOWED_COPIES})")
    return int(growth > ALLOWED_COPIES)


if __name__ == "__main__":
    sys.exit(main())
