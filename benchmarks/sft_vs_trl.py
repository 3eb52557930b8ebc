"""`rlhf sft` and TRL's SFTTrainer on the same model, rows and machine, in turns.

    python benchmarks/sft_vs_trl.py [--dataset rows.jsonl] [--steps 12] [--runs 3] [--folder DIR]

Makes an 11M-parameter Qwen2 with a 4k vocabulary and installs TRL into the folder, which a next run takes again. Every
run is a process of its own; both train the same tokens in the same order from the same weights, with the same batch
size, optimizer and schedule. Prints trained tokens per second without the first steps, the ratio to TRL's best
setting, and how far the loss curves are apart. TRL packs rows its own way, so its packed losses are not compared.
"""

import argparse
import json
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import gettempdir
from typing import Any

from setting import RLHF, machine, make_small_model, read_metrics, run_quietly, write_word_problems

TRL = "trl==1.16.*"
WARM_UP_STEPS = 3  # kernels are chosen and memory is taken in the first steps
LEARNING_RATE = 1e-3
BETAS = (0.9, 0.95)
WARM_UP_SHARE, MIN_LR = 0.1, 0.1
PACKED_LENGTH = 1024  # TRL's default max_length


@dataclass(frozen=True)
class Result:
    """What one process measured, by step."""

    seconds: list[float]
    tokens: list[float]
    loss: list[float]

    @property
    def speed(self) -> float:
        """Trained tokens per second after the warm-up."""
        return sum(self.tokens[WARM_UP_STEPS:]) / sum(self.seconds[WARM_UP_STEPS:])


@dataclass(frozen=True)
class Setting:
    """Where things are and what both programs are given."""

    folder: Path
    dataset: Path
    model: Path
    steps: int
    batch_size: int
    trl_micro_batch: int


def run_rlhf(setting: Setting, name: str, flags: list[str]) -> Result:
    """One run of `rlhf sft`."""
    output = setting.folder / name.replace(" ", "_")
    shape = ["--train_batch_size", setting.batch_size, "--max_steps", setting.steps, "--max_epochs", 1]
    rate = ["--learning_rate", LEARNING_RATE, "--adam_betas", *BETAS, "--lr_warmup_ratio", WARM_UP_SHARE]
    where = ["--pretrain", setting.model, "--dataset", setting.dataset, "--output", output, "--overwrite"]
    command = [*RLHF, "sft", *map(str, where + shape + rate), "--min_lr_ratio", str(MIN_LR), *flags]
    run_quietly(command, log=setting.folder / "rlhf.log")
    steps = read_metrics(output)
    times, tokens, losses = ([step[key] for step in steps] for key in ("time/step", "num_tokens", "loss"))
    return Result(times, tokens, losses)


def run_trl(setting: Setting, name: str, dtype: str, **own: Any) -> Result:
    """One run of SFTTrainer."""
    micro_batch = own.pop("micro_batch", setting.trl_micro_batch)
    packed = bool(own.get("packing"))
    accumulate = packed_rows(setting) // micro_batch if packed else setting.batch_size // micro_batch
    settings = {
        "max_steps": setting.steps,
        "per_device_train_batch_size": micro_batch,
        "gradient_accumulation_steps": max(1, accumulate),
        "learning_rate": LEARNING_RATE,
        "adam_beta1": BETAS[0],
        "adam_beta2": BETAS[1],
        "max_grad_norm": 1.0,
        "lr_scheduler_type": "cosine_with_min_lr",
        "lr_scheduler_kwargs": {"min_lr_rate": MIN_LR},
        "warmup_steps": round(WARM_UP_SHARE * setting.steps),
        "max_length": PACKED_LENGTH if packed else None,
        **own,
    }
    result = setting.folder / f"{name.replace(' ', '_')}.result.json"
    spec = {
        "model": str(setting.model),
        "rows": str(setting.folder / "tokenised.jsonl"),
        "output": str(setting.folder / "trl_output"),
        "dtype": dtype,
        "result": str(result),
        "settings": settings,
    }
    (setting.folder / "trl.json").write_text(json.dumps(spec))
    script = Path(__file__).with_name("trl_sft.py")
    command = [sys.executable, str(script), str(setting.folder / "trl.json")]
    environment = {"PYTHONPATH": str(setting.folder / "trl"), "TRL_EXPERIMENTAL_SILENCE": "1"}
    run_quietly(command, log=setting.folder / "trl.log", environment=environment)
    return Result(**json.loads(result.read_text()))


def packed_rows(setting: Setting) -> int:
    """Rows of TRL's packed length that hold about as many tokens as a batch of sequences."""
    with (setting.folder / "tokenised.jsonl").open() as lines:
        lengths = [len(json.loads(line)["input_ids"]) for line in lines]
    return max(1, round(setting.batch_size * statistics.mean(lengths) / PACKED_LENGTH))


VARIANTS: dict[str, Callable[..., Result]] = {
    "rlhf bf16": partial(run_rlhf, flags=["--param_dtype", "bf16"]),
    "rlhf fp32": partial(run_rlhf, flags=["--param_dtype", "fp32"]),
    "TRL fp32": partial(run_trl, dtype="float32", bf16=False),
    "TRL bf16 autocast": partial(run_trl, dtype="float32", bf16=True),
    "TRL bf16": partial(run_trl, dtype="bfloat16", bf16=False),
    "TRL bf16 packed": partial(run_trl, dtype="bfloat16", bf16=False, packing=True, micro_batch=1),
}


def write_tokenised(setting: Setting) -> None:
    """The rows as `rlhf sft` tokenises them, in the order in which it takes them."""
    from rlhf_cli.config.data import DataConfig
    from rlhf_cli.config.model import ModelConfig
    from rlhf_cli.config.train import BatchConfig
    from rlhf_cli.data.sampling import StepBatches
    from rlhf_cli.data.sft_data import load_sft_sequences
    from rlhf_cli.models.loading import load_tokenizer

    tokenizer = load_tokenizer(ModelConfig(pretrain=str(setting.model)))
    seed, dataset = BatchConfig().seed, str(setting.dataset)
    data = load_sft_sequences(DataConfig(dataset=dataset), tokenizer, dataset=dataset, split="train", seed=seed)
    order = StepBatches(len(data.lengths), batch_size=setting.batch_size, epochs=1, seed=seed)
    with (setting.folder / "tokenised.jsonl").open("w") as lines:
        for indices in order[: setting.steps + 1]:
            for sequence in (data.sequences[int(i)] for i in indices):
                mask = sequence.loss_mask.astype(int).tolist()
                lines.write(json.dumps({"input_ids": sequence.token_ids.tolist(), "completion_mask": mask}) + "\n")


def install_trl(folder: Path) -> None:
    """TRL alone, in a folder of its own; what it needs is installed already."""
    if not (folder / "trl" / "trl").is_dir():
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(folder / "trl"), TRL]
        subprocess.run(command, check=True)


def prepare(args: argparse.Namespace) -> Setting:
    """Everything both programs need, in the folder."""
    folder: Path = args.folder
    folder.mkdir(parents=True, exist_ok=True)
    install_trl(folder)
    dataset = args.dataset or write_word_problems(folder / "rows.jsonl", num_rows=4000)
    model = make_small_model(folder, dataset)
    setting = Setting(folder, dataset, model, args.steps, args.batch_size, args.trl_micro_batch)
    write_tokenised(setting)
    return setting


def interleaved(setting: Setting, names: list[str], runs: int) -> Iterator[tuple[str, Result]]:
    """Results of the variants in turns, so that what else the machine does meets all of them."""
    for _ in range(runs):
        for name in names:
            result = VARIANTS[name](setting, name)
            print(f"  {name:<18} {result.speed:8.0f} trained tokens/s, loss {result.loss[-1]:.3f}", flush=True)
            yield name, result


def report(results: dict[str, list[Result]]) -> str:
    """The table: medians over the runs, and each run's ratio to TRL's best setting."""
    speeds = {name: [result.speed for result in found] for name, found in results.items()}
    peers = [name for name in speeds if name.startswith("TRL")]
    best = max(peers, key=lambda name: statistics.median(speeds[name]))
    lines = [f"| setting | ratio to {best} | range | trained tokens/s | final loss |", "|---|---|---|---|---|"]
    for name, found in speeds.items():
        ratios = [own / peer for own, peer in zip(found, speeds[best], strict=True)]
        loss = statistics.median(result.loss[-1] for result in results[name])
        lines.append(
            f"| {name} | {statistics.median(ratios):.2f} | {min(ratios):.2f}-{max(ratios):.2f} "
            f"| {statistics.median(found):,.0f} | {loss:.3f} |"
        )
    return "\n".join([*lines, "", *loss_curves(results)])


def loss_curves(results: dict[str, list[Result]]) -> Iterator[str]:
    """How far each loss curve is from TRL's in float32, step by step."""
    anchor = results["TRL fp32"][0].loss if "TRL fp32" in results else None
    for name, found in results.items():
        if anchor is not None and "packed" not in name and name != "TRL fp32":
            apart = [abs(own - other) for own, other in zip(found[0].loss, anchor, strict=True)]
            mean, most = statistics.mean(apart), max(apart)
            yield f"Loss of {name} against TRL fp32: {mean:.4f} apart on average, {most:.4f} at most"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dataset", type=Path, help="jsonl with question and answer; made-up word problems if absent")
    parser.add_argument("--folder", type=Path, default=Path(gettempdir()) / "rlhf-benchmark", help="kept and reused")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--batch_size", type=int, default=32, help="sequences per optimizer step")
    parser.add_argument("--trl_micro_batch", type=int, default=8, help="sequences TRL takes at once")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--only", nargs="+", choices=VARIANTS, default=list(VARIANTS), metavar="SETTING")
    args = parser.parse_args()
    if args.steps <= WARM_UP_STEPS:
        parser.error(f"--steps must be more than the {WARM_UP_STEPS} that are not counted")
    setting = prepare(args)
    print(f"{machine()}\n{args.steps} steps of {args.batch_size} sequences, {args.runs} runs in turns", flush=True)
    results: dict[str, list[Result]] = {name: [] for name in args.only}
    for name, result in interleaved(setting, args.only, args.runs):
        results[name].append(result)
    print(report(results))


if __name__ == "__main__":
    main()
