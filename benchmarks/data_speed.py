"""Rows per second from a file to tokens with their labels: `rlhf sft` without and with its cache, and TRL's SFTTrainer.

    python benchmarks/data_speed.py [--rows 100000] [--runs 3] [--model DIR] [--folder DIR]

The rows are word problems of GSM8K's length, as prompt and completion in messages, in one file for both programs. TRL
prepares them with one process, its default, and with one for each core. All ways take turns and begin with empty
caches, and both programs make the same tokens, which is checked. What imports and the model take does not count.
"""

import argparse
import json
import os
import random
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import gettempdir

from comparison import empty_cache, install_trl, run_spec, trl_environment
from setting import machine, make_small_model, word_problem, write_word_problems

MAX_LEN = 1024
PEER = "TRL"


@dataclass(frozen=True)
class Setting:
    """The data to tokenise, the model, and the folders of caches and results."""

    folder: Path
    rows: Path
    model: str


@dataclass(frozen=True)
class Prepared:
    """The seconds of one way, and its result."""

    seconds: float
    tokens: int
    trained: int


def by_rlhf(setting: Setting) -> Prepared:
    """As `rlhf sft` prepares them."""
    from transformers import AutoTokenizer

    from rlhf_cli.config.data import DataConfig
    from rlhf_cli.data.sft_data import load_sft_sequences

    tokenizer = AutoTokenizer.from_pretrained(setting.model)
    config = DataConfig(dataset=str(setting.rows), max_len=MAX_LEN, data_cache=str(setting.folder / "cache" / "rlhf"))
    start = time.perf_counter()
    data = load_sft_sequences(config, tokenizer, dataset=config.dataset, split="train", seed=0)
    return Prepared(time.perf_counter() - start, int(data.lengths.sum()), int(data.num_trained.sum()))


def by_trl(setting: Setting, *, num_proc: int | None) -> Prepared:
    """As SFTTrainer prepares them in a process of its own."""
    spec = {
        "rows": str(setting.rows),
        "model": setting.model,
        "output": str(setting.folder / "trl_output"),
        "max_length": MAX_LEN,
        "num_proc": num_proc,
    }
    environment = trl_environment(setting.folder) | empty_cache(setting.folder)
    found, _peak = run_spec(setting.folder, "trl data", script="trl_data.py", spec=spec, environment=environment)
    return Prepared(**found)


def ways(setting: Setting) -> dict[str, Callable[[], Prepared]]:
    """Every way to prepare the rows, in the order of a round; the second finds the cache of the first."""
    cores = os.cpu_count()
    return {
        "rlhf": partial(by_rlhf, setting),
        "rlhf, cached": partial(by_rlhf, setting),
        PEER: partial(by_trl, setting, num_proc=None),
        f"{PEER}, {cores} processes": partial(by_trl, setting, num_proc=cores),
    }


def one_round(setting: Setting) -> dict[str, float]:
    """Seconds of every way, beginning with empty caches. Ends the program if tokens differ."""
    empty_cache(setting.folder)
    found = {name: way() for name, way in ways(setting).items()}
    ours, theirs = found["rlhf"], found[PEER]
    # The text that the template writes behind the end of turn is not trained here, and is there.
    if len({made.tokens for made in found.values()}) > 1 or ours.trained > theirs.trained:
        raise SystemExit(f"the ways do not make the same tokens: {found}")
    return {name: made.seconds for name, made in found.items()}


def write_rows(path: Path, num_rows: int) -> Path:
    """A jsonl file of word problems, each a prompt and a completion in messages."""
    rng = random.Random(0)
    problems = (word_problem(rng) for _ in range(num_rows))
    with path.open("w", encoding="utf-8") as lines:
        for problem in problems:
            turns = {"prompt": ("user", problem["question"]), "completion": ("assistant", problem["answer"])}
            row = {name: [{"role": role, "content": text}] for name, (role, text) in turns.items()}
            lines.write(json.dumps(row) + "\n")
    return path


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rows", type=int, default=100_000)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--model", help="model whose tokenizer is used; a small one is made if not given")
    parser.add_argument("--folder", type=Path, default=Path(gettempdir()) / "rlhf_data_speed")
    args = parser.parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    install_trl(args.folder)
    rows = write_rows(args.folder / "rows.jsonl", args.rows)
    texts = write_word_problems(args.folder / "texts.jsonl", num_rows=4000)
    setting = Setting(args.folder, rows, args.model or str(make_small_model(args.folder, texts)))
    print(f"{machine()}\n{args.rows:,} rows, median of {args.runs}", flush=True)
    rounds = [one_round(setting) for _ in range(args.runs)]
    print(f"{'':<18} {'seconds':>9} {'rows/s':>9} {'to ' + PEER:>9}")
    for way in rounds[0]:
        seconds = statistics.median(found[way] for found in rounds)
        ratio = statistics.median(found[PEER] / found[way] for found in rounds)
        print(f"{way:<18} {seconds:>9.2f} {args.rows / seconds:>9,.0f} {ratio:>8.1f}x")


if __name__ == "__main__":
    main()
