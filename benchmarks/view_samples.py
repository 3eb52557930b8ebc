"""Time until `rlhf view` shows a run with a million samples, without and with an index.

python benchmarks/view_samples.py --samples 1000000
"""

import argparse
import json
import random
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rlhf_cli.tracking.sinks import METRICS_FILE, RUN_FILE, SAMPLES_FILE
from rlhf_cli.tracking.view import app
from rlhf_cli.tracking.view.runs import ViewedRuns

_GROUP, _ITERATION = 8, 1024
"""Samples per prompt and per iteration."""


def made_up_run(folder: Path, num_samples: int) -> None:
    """Write a run with samples of about 700 bytes and an iteration per 1,024 samples."""
    noise = random.Random(1)
    (folder / RUN_FILE).write_text(json.dumps({"command": "grpo", "unit": "iteration", "outcome": "running"}))
    with (folder / METRICS_FILE).open("w") as metrics:
        for step in range(1, num_samples // _ITERATION + 1):
            metrics.write(json.dumps({"step": step, "reward": step / num_samples, "time/step": 1.0}) + "\n")
    with (folder / SAMPLES_FILE).open("w") as lines:
        for number in range(num_samples):
            lines.write(json.dumps(_sample(number, noise)) + "\n")


def _sample(number: int, noise: random.Random) -> dict[str, Any]:
    group, place = divmod(number, _GROUP)
    length = noise.randrange(5, 400)
    return {
        "step": number // _ITERATION + 1,
        "id": f"data.jsonl:{group % 20_000}/{group}.{place}@{number // _ITERATION}",
        "source": "data.jsonl",
        "row": group % 20_000,
        "group": group,
        "sample": place,
        "weight_version": number // _ITERATION,
        "prompt": f"<|im_start|>user\nHow many of {group % 20_000} birds are left?<|im_end|>\n<|im_start|>assistant\n",
        "response": f"There are {length} birds. " * 10,
        "label": str(group % 7),
        "reward": float(noise.random() < 0.4),
        "verdict": "wrong",
        "length": length,
        "finish_reason": "stop",
        "rollout_logprob": -noise.random() * length,
        "advantage": noise.gauss(0, 1),
    }


def requests(run: int) -> Iterator[tuple[str, str, dict[str, str]]]:
    """Yield what a page requests: name, kind of answer and parameters."""
    at = {"run": str(run)}
    yield "runs", "runs", {}
    yield "metrics", "metrics", at
    yield "newest samples", "samples", {**at, "order": "number", "descending": "1"}
    yield "lowest rewards of 10 iterations", "samples", {
        **at, "step_min": "100", "step_max": "110", "order": "reward"
    }  # fmt: skip
    yield "longest samples", "samples", {**at, "order": "length", "descending": "1"}
    yield "page 5,000 by advantage", "samples", {**at, "order": "advantage", "skip": "250000"}
    yield "a text", "samples", {**at, "text": "19999 birds"}
    yield "groups by spread", "groups", {**at, "order": "spread", "descending": "1"}
    yield "histogram of lengths", "histogram", {**at, "column": "length"}


def timed(runs: ViewedRuns, name: str, parameters: dict[str, str]) -> tuple[float, Any]:
    """Return the seconds of an answer, with its JSON, and the answer."""
    start = time.perf_counter()
    text = app.answer(name, runs, parameters)
    return time.perf_counter() - start, json.loads(text)


def main() -> None:
    """Print the seconds of each request, first without an index."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--samples", type=int, default=1_000_000)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        made_up_run(Path(folder), arguments.samples)
        size = (Path(folder) / SAMPLES_FILE).stat().st_size
        runs = ViewedRuns([Path(folder)])
        seconds = [timed(runs, name, parameters)[0] for _, name, parameters in list(requests(0))[:3]]
        print(f"{arguments.samples:,} samples, {size / 1e6:,.0f} MB; page without an index {sum(seconds):.2f} s")
        start, indexed = time.perf_counter(), 0.0
        while indexed < 1:
            indexed = timed(runs, "samples", {"run": "0"})[1]["indexed"]
        print(f"index complete after {time.perf_counter() - start:.1f} s more")
        runs.close()
        runs = ViewedRuns([Path(folder)])
        for title, name, parameters in requests(0):
            print(f"{title:32} {timed(runs, name, parameters)[0]:8.3f} s")
        index = (Path(folder) / f"{SAMPLES_FILE}.index").stat().st_size
        print(f"index {index / 1e6:.0f} MB")
        runs.close()


if __name__ == "__main__":
    main()
