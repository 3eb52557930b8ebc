"""The common part of the comparisons with TRL: one process a run, all variants in turns, and their table of figures.

Which variants there are, and on which data, is the business of the scripts; which trainer TRL runs is in trl_run.py.
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import gettempdir
from typing import Any

from setting import RLHF, make_small_model, read_metrics, run_quietly

TRL = "trl==1.16.*"
BETAS = (0.9, 0.95)
WARM_UP_SHARE, MIN_LR = 0.1, 0.1
OPTIMIZER_FLAGS = ["--adam_betas", *BETAS, "--lr_warmup_ratio", WARM_UP_SHARE, "--min_lr_ratio", MIN_LR]


@dataclass(frozen=True)
class Result:
    """The figures of one process: by step, and the most memory in MiB that it held from its start to its end.

    `course` judges the steps, by a loss or a reward; it is empty if there is nothing to judge.
    """

    seconds: list[float]
    trained: list[float]
    course: list[float]
    peak_memory: float


@dataclass(frozen=True)
class Measure:
    """The counted unit of a comparison, its course, and its first steps, which do not count."""

    unit: str
    course: str
    warm_up_steps: int

    def speed(self, result: Result) -> float:
        """Units trained per second after the warm-up."""
        return sum(result.trained[self.warm_up_steps :]) / sum(result.seconds[self.warm_up_steps :])


TOKENS = Measure("trained tokens", "loss", warm_up_steps=3)  # kernels are chosen and memory is taken in the first


@dataclass(frozen=True)
class Setting:
    """Where things are and what both programs are given.

    `tokenised` are the rows of `dataset` as `rlhf` tokenises them, in the order in which it takes them. `batch_size`
    and `trl_micro_batch` count rows of it.
    """

    folder: Path
    dataset: Path
    tokenised: Path
    model: Path
    steps: int
    batch_size: int
    trl_micro_batch: int
    learning_rate: float


Variant = Callable[[Setting, str], Result]
"""(setting, name of the variant) -> the figures of one run of it."""


def run_rlhf(setting: Setting, name: str, *, command: str, flags: list[str]) -> Result:
    """One run of an offline command of `rlhf`."""
    output = setting.folder / f"{command}_{name}".replace(" ", "_")
    shape = ["--train_batch_size", setting.batch_size, "--max_steps", setting.steps, "--max_epochs", 1]
    rate = ["--learning_rate", setting.learning_rate, *OPTIMIZER_FLAGS]
    where = ["--pretrain", setting.model, "--dataset", setting.dataset, "--output", output, "--overwrite"]
    line = [*RLHF, command, *map(str, where + shape + rate), *flags]
    log, environment = setting.folder / "rlhf.log", empty_cache(setting.folder)
    peak = run_quietly(line, log=log, environment=environment)
    steps = read_metrics(output)
    times, tokens, losses = ([step[key] for step in steps] for key in ("time/step", "num_tokens", "loss"))
    return Result(times, tokens, losses, peak)


def run_rlhf_grpo(setting: Setting, name: str, *, num_samples: int, flags: Sequence[object]) -> Result:
    """One run of `rlhf grpo` without a reference, with `num_samples` responses to a prompt; memory of all processes."""
    output = setting.folder / f"grpo_{name}".replace(" ", "_")
    where = ["--pretrain", setting.model, "--prompt_data", setting.dataset, "--output", output, "--overwrite"]
    rollout = ["--rollout_backend", "vllm", "--rollout_batch_size", setting.batch_size // num_samples]
    rollout += ["--n_samples_per_prompt", num_samples, "--init_kl_coef", 0]
    update = ["--train_batch_size", setting.batch_size, "--max_iterations", setting.steps]
    update += ["--actor_learning_rate", setting.learning_rate, *OPTIMIZER_FLAGS]
    line = [*RLHF, "grpo", *map(str, [*where, *rollout, *update, *flags])]
    run_quietly(line, log=setting.folder / "rlhf.log", environment=empty_cache(setting.folder))
    steps = read_metrics(output)
    times, rewards, memory = ([step[key] for step in steps] for key in ("time/step", "reward", "memory/host_gib"))
    return Result(times, [setting.batch_size] * len(steps), rewards, max(memory) * 1024)


def run_trl(setting: Setting, name: str, *, trainer: str, dtype: str, torchvision: bool = False, **own: Any) -> Result:
    """One run of a trainer of trl_run.py, with `own` beside the settings that both programs share.

    `torchvision`: it is there, as processors of some vision-language models need it.
    """
    settings = {
        "max_steps": setting.steps,
        "per_device_train_batch_size": setting.trl_micro_batch,
        "gradient_accumulation_steps": max(1, setting.batch_size // setting.trl_micro_batch),
        "learning_rate": setting.learning_rate,
        "adam_beta1": BETAS[0],
        "adam_beta2": BETAS[1],
        "max_grad_norm": 1.0,
        "lr_scheduler_type": "cosine_with_min_lr",
        "lr_scheduler_kwargs": {"min_lr_rate": MIN_LR},
        "warmup_steps": round(WARM_UP_SHARE * setting.steps),
        **own,
    }
    spec = {
        "trainer": trainer,
        "model": str(setting.model),
        "rows": str(setting.tokenised),
        "output": str(setting.folder / "trl_output"),
        "dtype": dtype,
        "settings": settings,
    }
    environment = trl_environment(setting.folder, torchvision=torchvision)
    return run_script(setting, f"{trainer} {name}", script="trl_run.py", spec=spec, environment=environment)


def run_script(
    setting: Setting, name: str, *, script: str, spec: dict[str, Any], environment: dict[str, str]
) -> Result:
    """One run of a script beside this one, which writes its result to the file that its specification names."""
    environment = environment | empty_cache(setting.folder)
    measured, peak = run_spec(setting.folder, name, script=script, spec=spec, environment=environment)
    return Result(**measured, peak_memory=peak)


def run_spec(
    folder: Path, name: str, *, script: str, spec: dict[str, Any], environment: dict[str, str]
) -> tuple[dict[str, Any], float]:
    """Run a script beside this one. Return the contents of its result file, and its peak memory in MiB."""
    stem, result = Path(script).stem, folder / f"{name}.result.json".replace(" ", "_")
    given = folder / f"{stem}.json"
    given.write_text(json.dumps(spec | {"result": str(result)}))
    command = [sys.executable, str(Path(__file__).with_name(script)), str(given)]
    peak = run_quietly(command, log=folder / f"{stem}.log", environment=environment)
    return json.loads(result.read_text()), peak


def empty_cache(folder: Path) -> dict[str, str]:
    """Environment in which neither program finds what an earlier run kept: data, log-probabilities of a reference."""
    cache = folder / "cache"
    shutil.rmtree(cache, ignore_errors=True)
    return {"XDG_CACHE_HOME": str(cache), "HF_DATASETS_CACHE": str(cache / "datasets")}


def trl_environment(folder: Path, *, torchvision: bool = False) -> dict[str, str]:
    """Environment in which TRL is found, and the torchvision of `make setup` if asked for."""
    found = [folder / "trl", *([Path(sys.prefix) / "torchvision"] if torchvision else [])]
    return {"PYTHONPATH": os.pathsep.join(map(str, found)), "TRL_EXPERIMENTAL_SILENCE": "1"}


def install_trl(folder: Path) -> None:
    """TRL alone, in a folder of its own; its dependencies are installed already."""
    if not (folder / "trl" / "trl").is_dir():
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(folder / "trl"), TRL]
        subprocess.run(command, check=True)


def in_turns(
    setting: Setting, variants: Mapping[str, Variant], *, runs: int, measure: Measure = TOKENS
) -> dict[str, list[Result]]:
    """Results by variant, which take turns, so that what else the machine does meets all of them."""
    results: dict[str, list[Result]] = {name: [] for name in variants}
    width = max(map(len, variants))
    for _ in range(runs):
        for name, variant in variants.items():
            result = variant(setting, name)
            results[name].append(result)
            measured = f"{figure(measure.speed(result)):>8} {measure.unit}/s, {result.peak_memory:6.0f} MiB"
            end = f", {measure.course} {result.course[-1]:.3f}" if result.course else ""
            print(f"  {name:<{width}} {measured}{end}", flush=True)
    return results


def figure(speed: float) -> str:
    """Return a speed in digits, with decimals if they count."""
    return f"{speed:,.0f}" if speed >= 100 else f"{speed:.2f}"


def report(
    results: Mapping[str, list[Result]], *, compared: Mapping[str, str] | None = None, measure: Measure = TOKENS
) -> str:
    """The table: medians over the runs, and each run's ratio to TRL's best setting; below it how far losses are apart.

    `compared` names, for each variant whose losses are to be compared, the one that they are compared with.
    """
    speeds = {name: [measure.speed(result) for result in found] for name, found in results.items()}
    peers = [name for name in speeds if name.startswith("TRL")] or list(speeds)  # all where TRL was left out
    best = max(peers, key=lambda name: statistics.median(speeds[name]))
    lines = [
        f"| setting | ratio to {best} | range | {measure.unit}/s | peak memory, MiB | final {measure.course} |",
        "|---|---|---|---|---|---|",
    ]
    for name, found in speeds.items():
        ratios = [own / peer for own, peer in zip(found, speeds[best], strict=True)]
        memory = statistics.median(result.peak_memory for result in results[name])
        ends = [result.course[-1] for result in results[name] if result.course]
        lines.append(
            f"| {name} | {statistics.median(ratios):.2f} | {min(ratios):.2f}-{max(ratios):.2f} "
            f"| {figure(statistics.median(found))} | {memory:,.0f} "
            f"| {f'{statistics.median(ends):.3f}' if ends else ''} |"
        )
    return "\n".join([*lines, "", *loss_curves(results, compared or {})])


def loss_curves(results: Mapping[str, list[Result]], compared: Mapping[str, str]) -> Iterator[str]:
    """How far the loss curves of both variants of each comparison are apart, step by step."""
    for name, anchor in compared.items():
        if name in results and anchor in results:
            curves = zip(results[name][0].course, results[anchor][0].course, strict=True)
            apart = [abs(own - other) for own, other in curves]
            mean, most = statistics.mean(apart), max(apart)
            yield f"Loss of {name} against {anchor}: {mean:.4f} apart on average, {most:.4f} at most"


def comparison_parser(description: str | None, *, batch_size_is: str) -> argparse.ArgumentParser:
    """The options that all comparisons have."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path(gettempdir()) / "rlhf-benchmark", help="kept and reused")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--batch_size", type=int, default=32, help=f"{batch_size_is} per optimizer step")
    parser.add_argument("--trl_micro_batch", type=int, default=8, help=f"{batch_size_is} TRL takes at once")
    parser.add_argument("--runs", type=int, default=3)
    return parser


def add_model_options(parser: argparse.ArgumentParser, *, learning_rate: float) -> None:
    """The options of comparisons that also run on a published model."""
    parser.add_argument("--dataset", type=Path, help="jsonl with question and answer; made-up word problems if absent")
    parser.add_argument("--model", help="folder or GGUF file to train instead of the small model")
    parser.add_argument("--learning_rate", type=float, default=learning_rate)


def chosen_model(args: argparse.Namespace, dataset: Path) -> Path:
    """The model of the options as a folder, which TRL reads too."""
    from rlhf_cli.models.finding import resolve_model_path

    return make_small_model(args.folder, dataset) if args.model is None else Path(resolve_model_path(args.model))


def parsed(parser: argparse.ArgumentParser, *, measure: Measure = TOKENS) -> argparse.Namespace:
    """The options of the command line, of which at least one step is counted."""
    args = parser.parse_args()
    if args.steps <= measure.warm_up_steps:
        parser.error(f"--steps must be more than the {measure.warm_up_steps} that are not counted")
    return args
