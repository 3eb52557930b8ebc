"""Share of each phase of a PPO iteration on this machine.

    python benchmarks/ppo_phases.py [--dataset X] [--iterations 6] [--rollout_backend vllm] [--param_dtype fp32]

Runs `rlhf ppo` with the 11M-parameter Qwen2 of the other benchmarks, critic and reference included, and reads its
metrics.jsonl. Work is generation, forward passes and training; everything else (rewards, advantages, the push of
weights, and time outside of all phases) is overhead, and has to stay below 15 %. Exits with 1 if it does not.
"""

import argparse
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import gettempdir

from setting import RLHF, machine, make_small_model, read_metrics, run_quietly, write_word_problems

WORK = ("generate", "forward", "train")
LIMIT = 0.15  # of an iteration
WARM_UP_ITERATIONS = 2  # kernels are chosen and memory is taken in the first iterations
PROMPTS, SAMPLES = 32, 4
MAX_NEW_TOKENS = 128


def run_ppo(args: argparse.Namespace, model: Path, dataset: Path) -> Path:
    """The run directory of a PPO run of a few iterations."""
    output: Path = args.folder / "ppo"
    where = ["--pretrain", model, "--prompt_data", dataset, "--output", output, "--overwrite"]
    rollout = ["--rollout_backend", args.rollout_backend, "--rollout_batch_size", PROMPTS]
    rollout += ["--n_samples_per_prompt", SAMPLES, "--max_new_tokens", MAX_NEW_TOKENS, "--max_len", 512]
    update = ["--train_batch_size", PROMPTS * SAMPLES // 2, "--max_iterations", args.iterations]
    update += ["--param_dtype", args.param_dtype]
    command = [*RLHF, "ppo", *map(str, where + rollout + update), "--reward_funcs", "gsm8k", "--enforce_eager"]
    run_quietly([*command, "--colocate_all_models"], log=args.folder / "ppo.log")
    return output


def shares(steps: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Each phase's part of the time of these iterations; `rest` is what no phase accounts for."""
    total = sum(step["time/step"] for step in steps)
    names = dict.fromkeys(name for step in steps for name in step if name.startswith("time/") and name != "time/step")
    parts = {name.removeprefix("time/"): sum(step.get(name, 0.0) for step in steps) / total for name in names}
    return parts | {"rest": 1 - sum(parts.values())}


def overhead(parts: Mapping[str, float]) -> float:
    """Everything but generation, forward passes and training."""
    return sum(share for name, share in parts.items() if name not in WORK)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dataset", type=Path, help="jsonl with question and answer; made-up word problems if absent")
    parser.add_argument("--folder", type=Path, default=Path(gettempdir()) / "rlhf-benchmark", help="kept and reused")
    parser.add_argument("--iterations", type=int, default=6)
    parser.add_argument("--rollout_backend", choices=("vllm", "transformers"), default="vllm")
    parser.add_argument("--param_dtype", choices=("bf16", "fp32"), default="bf16")
    args = parser.parse_args()
    if args.iterations <= WARM_UP_ITERATIONS:
        parser.error(f"--iterations must be more than the {WARM_UP_ITERATIONS} that are not counted")
    args.folder.mkdir(parents=True, exist_ok=True)
    dataset = args.dataset or write_word_problems(args.folder / "rows.jsonl", num_rows=4000)
    steps = read_metrics(run_ppo(args, make_small_model(args.folder, dataset), dataset))[WARM_UP_ITERATIONS:]
    parts = shares(steps)
    seconds = statistics.mean(step["time/step"] for step in steps)
    tokens = statistics.mean(step["num_tokens"] for step in steps)
    print(f"{machine()}\n{len(steps)} iterations of {PROMPTS} x {SAMPLES} responses, {args.rollout_backend}")
    print(f"{seconds:.1f} s an iteration, {tokens:,.0f} tokens of prompts and responses in each\n")
    print("| phase | share | seconds |\n|---|---|---|")
    for name, share in sorted(parts.items(), key=lambda part: -part[1]):
        print(f"| {name} | {share:.1%} | {share * seconds:.3f} |")
    print(f"\nNeither generation, forward nor training: {overhead(parts):.1%} (limit {LIMIT:.0%})")
    return int(overhead(parts) > LIMIT)


if __name__ == "__main__":
    sys.exit(main())
