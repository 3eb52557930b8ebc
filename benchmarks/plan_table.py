"""Print the tables of docs/hardware.md: how many GPUs each command needs for each model, as `rlhf plan` forecasts.

    python benchmarks/plan_table.py [--gpus h100] [--models Qwen/Qwen3-8B]

A cell is the smallest of 1, 2, 4 and 8 GPUs, and 2 and 4 nodes with 8 GPUs, on which the command fits with no other
flags, and its time. Takes about five minutes on two cores and needs no GPU and no network.
"""

import json
import subprocess

from common import RLHF, make_parser, table

GPUS = ("rtx4090", "l40s", "a100-80", "h100", "b200")
MODELS = (
    "Qwen/Qwen3-0.6B",
    "Qwen/Qwen3-1.7B",
    "Qwen/Qwen3-4B",
    "Qwen/Qwen3-8B",
    "Qwen/Qwen3-14B",
    "Qwen/Qwen3-32B",
    "meta-llama/Llama-3.1-70B",
)
LAYOUTS = ((1, 1), (1, 2), (1, 4), (1, 8), (2, 8), (4, 8))
"""(nodes, GPUs per node)."""
COMMANDS = (
    "sft --max_len 4096 --row_tokens 1024 --zero_stage 3",
    "sft --max_len 4096 --row_tokens 1024 --zero_stage 3 --lora_rank 32",
    "dpo --max_len 4096 --row_tokens 2048 --zero_stage 3",
    "grpo --max_new_tokens 2048 --max_len 3072 --response_tokens 1024 --zero_stage 3",
)


def plan(command: str, model: str, gpu: str, nodes: int, gpus: int) -> dict[str, object]:
    """Return the JSON output of `rlhf plan`; status 3, which is not an error here, means that it does not fit."""
    hardware = ["--gpu", gpu, "--num_gpus", gpus, "--num_nodes", nodes]
    words = [*RLHF, "plan", *command.split(), "--pretrain", model, *hardware, "--json"]
    done = subprocess.run(list(map(str, words)), capture_output=True, text=True)
    if done.returncode not in (0, 3):
        raise RuntimeError(done.stderr)
    answer: dict[str, object] = json.loads(done.stdout)
    return answer


def cell(command: str, model: str, gpu: str) -> str:
    """Return the first layout that fits, with the seconds per iteration (online) or the tokens per second (offline)."""
    for nodes, gpus in LAYOUTS:
        forecast = plan(command, model, gpu, nodes, gpus)
        if forecast["fits"]:
            size = f"{nodes} x {gpus}" if nodes > 1 else str(gpus)
            seconds = forecast["seconds"]
            assert isinstance(seconds, dict)
            if command.startswith("grpo"):
                return f"{size} ({sum(seconds.values()):,.0f} s)"
            return f"{size} ({float(str(forecast['tokens_per_second'])):,.0f}/s)"
    return "more"


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--gpus", nargs="+", default=GPUS)
    parser.add_argument("--models", nargs="+", default=MODELS)
    args = parser.parse_args()
    for command in COMMANDS:
        rows = ([model.split("/")[1], *(cell(command, model, gpu) for gpu in args.gpus)] for model in args.models)
        print(f"`rlhf {command}`\n")
        print(table(" | ".join(["model", *args.gpus]), rows), end="\n\n", flush=True)


if __name__ == "__main__":
    main()
