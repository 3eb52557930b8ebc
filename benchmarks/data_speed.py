"""Rows per second from a file to tokens with a loss mask: `rlhf` without and with its cache, and `datasets`.

    python benchmarks/data_speed.py [--rows 100000] [--runs 3] [--model DIR] [--folder DIR]

The peer does what TRL does with a conversational prompt and its completion: one `datasets.map` in which each row is
rendered and tokenised twice, without and with its completion, and one that truncates; its own cache is empty in every
round. All ways take turns; both make the same tokens, which is checked. Rows are word problems of GSM8K's length.
"""

import argparse
import shutil
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from tempfile import gettempdir
from typing import Any

from setting import machine, make_small_model, write_word_problems

MAX_LEN = 1024


@dataclass(frozen=True)
class Setting:
    """What is tokenised, and where caches go."""

    rows: Path
    tokenizer: Any
    cache: Path


def rlhf_way(setting: Setting) -> tuple[int, int]:
    """Tokens and trained tokens as `rlhf sft` prepares them."""
    from rlhf_cli.config.data import DataConfig
    from rlhf_cli.data.sft_data import load_sft_sequences

    config = DataConfig(dataset=str(setting.rows), max_len=MAX_LEN, data_cache=str(setting.cache / "rlhf"))
    data = load_sft_sequences(config, setting.tokenizer, dataset=config.dataset, split="train", seed=0)
    return int(data.lengths.sum()), int(data.num_trained.sum())


def datasets_way(setting: Setting) -> tuple[int, int]:
    """The same counts as a trainer prepares them that maps row by row."""
    import datasets
    import numpy as np

    datasets.disable_progress_bars()
    tokenizer = setting.tokenizer

    def tokenised(row: dict[str, Any]) -> dict[str, list[int]]:
        prompt = [{"role": "user", "content": row["question"]}]
        whole = [*prompt, {"role": "assistant", "content": row["answer"]}]
        prompt_ids = tokenizer.apply_chat_template(prompt, add_generation_prompt=True, return_dict=True)["input_ids"]
        ids = tokenizer.apply_chat_template(whole, return_dict=True)["input_ids"]
        return {"input_ids": ids, "completion_mask": [0] * len(prompt_ids) + [1] * (len(ids) - len(prompt_ids))}

    def truncated(row: dict[str, list[int]]) -> dict[str, list[int]]:
        return {name: values[:MAX_LEN] for name, values in row.items()}

    cache = str(setting.cache / "datasets")
    rows = datasets.load_dataset("json", data_files=str(setting.rows), split="train", cache_dir=cache)
    done = rows.map(tokenised, remove_columns=rows.column_names).map(truncated).with_format("numpy")
    batches = done.select_columns("completion_mask").iter(batch_size=1000)
    masks = [mask for batch in batches for mask in batch["completion_mask"]]
    return sum(mask.size for mask in masks), int(sum(np.count_nonzero(mask) for mask in masks))


def timed(way: Callable[[Setting], tuple[int, int]], setting: Setting) -> tuple[float, tuple[int, int]]:
    """Seconds a way takes, and what it counts."""
    start = time.perf_counter()
    counts = way(setting)
    return time.perf_counter() - start, counts


def one_round(setting: Setting) -> dict[str, float]:
    """Seconds of every way, beginning with empty caches. Ends the program if tokens differ."""
    shutil.rmtree(setting.cache, ignore_errors=True)
    cold, ours = timed(rlhf_way, setting)
    cached, again = timed(rlhf_way, setting)
    peer, theirs = timed(datasets_way, setting)
    # What the template writes behind the end of turn is not trained here, and is there.
    if ours != again or ours[0] != theirs[0] or ours[1] > theirs[1]:
        raise SystemExit(f"tokens and trained tokens differ: {ours}, {again} with the cache, {theirs} with datasets")
    return {"rlhf": cold, "rlhf, cached": cached, "datasets.map": peer}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rows", type=int, default=100_000)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--model", help="model whose tokenizer is used; a small one is made if not given")
    parser.add_argument("--folder", type=Path, default=Path(gettempdir()) / "rlhf_data_speed")
    args = parser.parse_args()
    from transformers import AutoTokenizer

    args.folder.mkdir(parents=True, exist_ok=True)
    rows = write_word_problems(args.folder / "rows.jsonl", num_rows=args.rows)
    model = args.model or make_small_model(args.folder, rows)
    setting = Setting(rows, AutoTokenizer.from_pretrained(model), args.folder / "cache")
    rounds = [one_round(setting) for _ in range(args.runs)]
    print(f"{machine()}\n{args.rows:,} rows, median of {args.runs}")
    print(f"{'':<14} {'seconds':>9} {'rows/s':>9} {'to datasets.map':>16}")
    for way in rounds[0]:
        seconds = statistics.median(found[way] for found in rounds)
        ratio = statistics.median(found["datasets.map"] / found[way] for found in rounds)
        print(f"{way:<14} {seconds:>9.2f} {args.rows / seconds:>9,.0f} {ratio:>15.1f}x")


if __name__ == "__main__":
    main()
