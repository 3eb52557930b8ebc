"""Tables of docs/hardware.md: time per step and the flags that a command needs, by model and GPUs, as planned.

python benchmarks/plan_table.py
"""

import io
import json
import sys
from contextlib import redirect_stderr, redirect_stdout
from typing import Any

from common import make_parser, table

from rlhf_cli import cli

MODELS = (
    "HuggingFaceTB/SmolLM2-360M-Instruct",
    "Qwen/Qwen3-0.6B",
    "Qwen/Qwen2.5-1.5B-Instruct",
    "Qwen/Qwen3-4B",
    "Qwen/Qwen2.5-7B-Instruct",
    "Qwen/Qwen3-14B",
    "Qwen/Qwen2.5-32B-Instruct",
    "meta-llama/Llama-3.3-70B-Instruct",
)
HARDWARE = {
    "RTX 4090": "--gpu rtx4090",
    "H100": "--gpu h100",
    "8 x H100": "--gpu h100 --num_gpus 8",
    "4 x 8 x H100": "--gpu h100 --num_gpus 8 --num_nodes 4",
}
WORKLOADS = {
    "sft": "--max_len 1024 --train_batch_size 64",
    "dpo": "--max_len 1024 --train_batch_size 64",
    "grpo": "--rollout_batch_size 64 --n_samples_per_prompt 8 --max_new_tokens 1024 --max_len 2048",
    "ppo": "--rollout_batch_size 64 --n_samples_per_prompt 8 --max_new_tokens 1024 --max_len 2048",
}
GIVEN_UP = "no"


def planned(command: str, model: str, hardware: str) -> dict[str, Any]:
    """Return the plan as `rlhf plan --json` prints it."""
    words = f"plan {command} --pretrain {model} {WORKLOADS[command]} {hardware} --json".split()
    output, errors = io.StringIO(), io.StringIO()
    with redirect_stdout(output), redirect_stderr(errors):
        status = cli.main(words)
    # 3: it does not fit.
    if status not in (0, 3):
        raise SystemExit(f"rlhf {' '.join(words)}: {errors.getvalue()}")
    found: dict[str, Any] = json.loads(output.getvalue())
    return found


def cell(plan: dict[str, Any]) -> str:
    """Return the time per step, with the flags of the fastest change with which it fits if it does not fit without."""
    if plan["fits"]:
        return duration(sum(plan["seconds"].values()))
    fitting = [change for change in plan["changes"] if change["fits"]]
    if not fitting:
        return GIVEN_UP
    best = min(fitting, key=lambda change: change["seconds"])
    return f"{duration(best['seconds'])} `{best['flags']}`"


def duration(seconds: float) -> str:
    """Format with two digits: 0.31 s, 14 s, 2.5 min."""
    if seconds < 120:
        return f"{seconds:.2g} s" if seconds < 99.5 else f"{seconds:.0f} s"
    return f"{seconds / 60:.2g} min" if seconds < 99.5 * 60 else f"{seconds / 3600:.2g} h"


def main() -> None:
    make_parser(__doc__).parse_args()
    for command, workload in WORKLOADS.items():
        rows = []
        for model in MODELS:
            rows.append([model, *(cell(planned(command, model, flags)) for flags in HARDWARE.values())])
            print(command, rows[-1], file=sys.stderr, flush=True)
        print(f"`{command} {workload}`\n")
        print(table(["model", *HARDWARE], rows), end="\n\n")


if __name__ == "__main__":
    main()
