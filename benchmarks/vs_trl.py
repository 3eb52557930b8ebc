"""Compare `rlhf` and TRL on the same model, data and machine.

    python benchmarks/vs_trl.py sft [--model FILE.gguf --learning_rate 1e-5] [--dataset rows.jsonl] [--steps 12]
    python benchmarks/vs_trl.py dpo kto rm [--dataset pairs.jsonl] [--runs 3] [--only "rlhf bf16" "TRL bf16"]
    python benchmarks/vs_trl.py vision_sft vision_dpo
    python benchmarks/vs_trl.py grpo episodes

Creates a small model and data, and installs TRL, in `--folder`, which later runs reuse. Each run is a separate
process. Both tools start from the same weights and train the same tokens in the same order with the same batch size,
optimizer and schedule. Prints speed without warm-up steps, the ratio to TRL's best setting, peak memory, and the
distance between loss curves or the reward curves.

sft            11M-parameter Qwen2; TRL packs rows differently, so packed losses are not compared
dpo, kto, rm   trained tokens include both responses; kto trains two responses for each pair; memory, but not
               speed, includes a precomputed reference. TRL 1.16 ignores padding_free for dpo. The tools
               choose different mismatched responses for kto's baseline, so losses are compared without one
               (apo_zero_unpaired).
vision_*       14M-parameter Qwen2.5-VL, rows with 0 to 2 images. TRL gets text, tokenises it, resizes images with
               torchvision instead of Pillow (a few pixels differ by one), and pads.
grpo           8 responses of up to 128 tokens to each prompt, rewarded for vowels; one optimizer step, no reference.
               `rlhf` generates with vLLM, TRL with transformers, its only engine on a CPU. An untrained model
               ends about 1 of 4,096 responses at each token, so nearly all have 128. Samplers
               differ, so only reward curves must agree. Memory for `rlhf` is the sum over processes.
episodes       grpo with the environment of trl_task.py, which `rlhf sft` first teaches the model to use: 4 turns of
               about 30 tokens in both tools, with the Qwen2.5 chat template, whose tool calls TRL parses
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import vs_trl_data as data
from common import (
    FOLDER,
    machine,
    make_parser,
    read_metrics,
    rlhf,
    run_quietly,
    table,
)
from trl_task import STEPS

TRL = "trl==1.16.*"
BETAS = (0.9, 0.95)
WARM_UP_SHARE, MIN_LR = 0.1, 0.1
OPTIMIZER = {"adam_betas": BETAS, "lr_warmup_ratio": WARM_UP_SHARE, "min_lr_ratio": MIN_LR}
PACKED_LENGTH = 1024
"""TRL's default max_length."""
RESPONSES = 8
UNPAIRED = "apo_zero_unpaired"
Variants = dict[str, dict[str, Any]]
"""Settings by name."""


@dataclass(frozen=True)
class Result:
    """Seconds, trained units, and loss or reward for each step, with peak memory in MiB."""

    seconds: list[float]
    trained: list[float]
    curve: list[float]
    peak_memory: float


@dataclass(frozen=True)
class Measure:
    """The trained unit, the plotted metric, and the number of warm-up steps to ignore."""

    unit: str
    curve: str
    warm_up_steps: int

    def speed(self, result: Result) -> float:
        """Return trained units per second after warm-up."""
        return sum(result.trained[self.warm_up_steps :]) / sum(result.seconds[self.warm_up_steps :])


TOKENS = Measure("trained tokens", "loss", warm_up_steps=3)
SAMPLES = Measure("trained samples", "reward", warm_up_steps=1)
EPISODES = Measure("trained episodes", "reward", warm_up_steps=1)


@dataclass(frozen=True)
class Method:
    """A training method in both tools.

    `rlhf` and `trl` contain settings by variant, in addition to the common `flags` and `settings`. `batch_size` counts
    `unit`; `rows_of_unit` data rows train as one, with `responses` responses each. `compared` names variants with
    comparable losses.
    """

    command: str
    rows: Callable[[Path, Path], Iterable[data.Row]]
    rlhf: Variants
    trl: Variants
    flags: dict[str, Any] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=lambda: {"max_length": None})
    measure: Measure = TOKENS
    unit: str = "rows"
    steps: int = 12
    batch_size: int = 32
    rows_of_unit: int = 1
    responses: int = 1
    learning_rate: float = 1e-4
    compared: dict[str, str] = field(default_factory=dict)

    @property
    def variants(self) -> list[str]:
        """Return all variant names."""
        return [*self.rlhf, *self.trl]


@dataclass(frozen=True)
class Setting:
    """Inputs for both tools; `tokenised` has the rows from `dataset` for TRL, and batches count responses."""

    method: str
    folder: Path
    dataset: Path
    tokenised: Path
    model: Path
    steps: int
    batch_size: int
    trl_micro_batch: int
    learning_rate: float


def with_added(variants: Variants, added: Variants) -> Variants:
    """Return each variant with each of the added settings, whose keys are added to its name."""
    return {f"{name}{also}": base | own for also, own in added.items() for name, base in variants.items()}


BF16, FP32, COMPILED = {"param_dtype": "bf16"}, {"param_dtype": "fp32"}, {"compile_model": True}
PLAIN: Variants = {"rlhf bf16": BF16, "rlhf fp32": FP32}
OFFLINE = with_added(PLAIN, {"": {}, " compiled": COMPILED})
TRL_FP32, TRL_BF16 = {"dtype": "float32", "bf16": False}, {"dtype": "bfloat16", "bf16": False}
TRL_AUTOCAST = {"dtype": "float32", "bf16": True}
TRL_ONLINE: Variants = {"TRL fp32": TRL_FP32, "TRL bf16": TRL_BF16}
TRL_PLAIN = TRL_ONLINE | {"TRL bf16 autocast": TRL_AUTOCAST}
PRECOMPUTED: Variants = {" precomputed": {"precompute_ref_log_probs": True}}
COMPARED = dict.fromkeys(("rlhf bf16", "rlhf fp32", "TRL bf16 autocast", "TRL bf16"), "TRL fp32")
ENGINE_PER_CORE = {"vllm_num_engines": os.cpu_count() or 1}
GRPO_COMPILED = COMPILED | {"no_enforce_eager": True}
TASK = Path(__file__).with_name("trl_task.py")
GRPO = {"num_generations": RESPONSES, "temperature": 1.0, "beta": 0.0, "shuffle_dataset": False}
METHODS = {
    "sft": Method(
        "sft",
        data.sft_rows,
        OFFLINE,
        TRL_PLAIN | with_added(TRL_ONLINE, {" packed": {"packing": True}}),
        settings={"completion_only_loss": True, "max_length": None},
        learning_rate=1e-3,
        compared=COMPARED,
    ),
    "dpo": Method(
        "dpo",
        data.dpo_rows,
        OFFLINE | with_added(PLAIN, PRECOMPUTED),
        with_added(TRL_PLAIN, {"": {}} | PRECOMPUTED),
        unit="pairs",
        compared=COMPARED,
    ),
    "kto": Method(
        "kto",
        data.kto_rows,
        OFFLINE | with_added(PLAIN, PRECOMPUTED) | {f"rlhf fp32 {UNPAIRED}": FP32 | {"loss": UNPAIRED}},
        with_added(TRL_PLAIN, {"": {}} | PRECOMPUTED) | {f"TRL fp32 {UNPAIRED}": TRL_FP32 | {"loss_type": UNPAIRED}},
        unit="pairs",
        rows_of_unit=2,
        compared={f"rlhf fp32 {UNPAIRED}": f"TRL fp32 {UNPAIRED}"},
    ),
    "rm": Method("rm", data.rm_rows, OFFLINE, TRL_PLAIN, unit="pairs", compared=COMPARED),
    "vision_sft": Method("sft", data.vision_sft_rows, PLAIN, TRL_PLAIN, learning_rate=1e-3, compared=COMPARED),
    "vision_dpo": Method("dpo", data.vision_dpo_rows, PLAIN, TRL_PLAIN, flags=data.VISION_KEYS, compared=COMPARED),
    "grpo": Method(
        "grpo",
        partial(data.grpo_rows, responses=RESPONSES),
        with_added(
            PLAIN,
            {
                "": {},
                ", compiled": GRPO_COMPILED,
                ", engine per core": ENGINE_PER_CORE,
                ", engine per core, compiled": ENGINE_PER_CORE | GRPO_COMPILED,
            },
        ),
        with_added(
            TRL_ONLINE,
            {
                "": {},
                " at once": {"at_once": True},
                " continuous": {"at_once": True, "use_transformers_continuous_batching": True},
            },
        )
        | {"TRL bf16 autocast": TRL_AUTOCAST, "TRL bf16 compiled": TRL_BF16 | {"torch_compile": True}},
        flags={"reward_func": TASK, "max_new_tokens": data.MAX_NEW_TOKENS, "max_len": data.MAX_LEN},
        settings=GRPO | {"max_completion_length": data.MAX_NEW_TOKENS},
        measure=SAMPLES,
        unit="samples",
        batch_size=64,
        responses=RESPONSES,
        learning_rate=1e-3,
    ),
    "episodes": Method(
        "grpo",
        partial(data.episode_rows, responses=RESPONSES),
        with_added(PLAIN, {"": {}, ", engine per core": ENGINE_PER_CORE}),
        with_added(TRL_ONLINE, {"": {}, " at once": {"at_once": True}}),
        flags={"environment": TASK, "max_turns": STEPS + 1, "max_new_tokens": data.TURN_TOKENS}
        | {"max_len": data.EPISODE_MAX_LEN},
        settings=GRPO | {"max_completion_length": data.TURN_TOKENS * (STEPS + 1), "max_tool_calling_iterations": STEPS},
        measure=EPISODES,
        unit="episodes",
        steps=8,
        batch_size=64,
        responses=RESPONSES,
        learning_rate=1e-5,
    ),
}
ALL_VARIANTS = list(dict.fromkeys(name for method in METHODS.values() for name in method.variants))


def run(setting: Setting, name: str) -> Result:
    """Run a variant once."""
    method = METHODS[setting.method]
    if name in method.rlhf:
        return run_rlhf(setting, method, name)
    return run_trl(setting, method, name, **method.trl[name])


def run_rlhf(setting: Setting, method: Method, name: str) -> Result:
    """Run a command of `rlhf`."""
    is_online = method.responses > 1
    output = setting.folder / f"{setting.method}_{name}".replace(" ", "_")
    own = {"pretrain": setting.model, "output": output, "overwrite": True, "train_batch_size": setting.batch_size}
    own |= OPTIMIZER | method.flags | method.rlhf[name]
    if is_online:
        own |= {"prompt_data": setting.dataset, "actor_learning_rate": setting.learning_rate}
        own |= {"rollout_backend": "vllm", "rollout_batch_size": setting.batch_size // method.responses}
        own |= {"n_samples_per_prompt": method.responses, "init_kl_coef": 0, "max_iterations": setting.steps}
    else:
        own |= {"dataset": setting.dataset, "learning_rate": setting.learning_rate}
        own |= {"max_steps": setting.steps, "max_epochs": 1}
    environment = empty_cache(setting.folder)
    peak = run_quietly(rlhf(method.command, own), log=setting.folder / "rlhf.log", environment=environment)
    steps = read_metrics(output)
    seconds, curve = ([step[key] for step in steps] for key in ("time/step", method.measure.curve))
    if is_online:
        memory = max(step["memory/host_gib"] for step in steps) * 1024
        return Result(seconds, [setting.batch_size] * len(steps), curve, memory)
    return Result(seconds, [step["num_tokens"] for step in steps], curve, peak)


def run_trl(setting: Setting, method: Method, name: str, *, dtype: str, at_once: bool = False, **own: Any) -> Result:
    """Run a TRL trainer (trl_run.py); `at_once` processes a step in one micro-batch."""
    micro_batch = setting.batch_size if at_once else setting.trl_micro_batch
    settings = {
        "max_steps": setting.steps,
        "per_device_train_batch_size": micro_batch,
        "gradient_accumulation_steps": max(1, setting.batch_size // micro_batch),
        "learning_rate": setting.learning_rate,
        "adam_beta1": BETAS[0],
        "adam_beta2": BETAS[1],
        "max_grad_norm": 1.0,
        "lr_scheduler_type": "cosine_with_min_lr",
        "lr_scheduler_kwargs": {"min_lr_rate": MIN_LR},
        "warmup_steps": round(WARM_UP_SHARE * setting.steps),
        **method.settings,
        **(packed_shape(setting) if own.get("packing") else {}),
        **own,
    }
    result = setting.folder / f"{setting.method} {name}.result.json".replace(" ", "_")
    output = setting.folder / "trl_output"
    paths = {"model": setting.model, "rows": setting.tokenised, "output": output, "result": result}
    spec = {"trainer": setting.method, "dtype": dtype, "settings": settings, **{k: str(v) for k, v in paths.items()}}
    specification = setting.folder / "trl_run.json"
    specification.write_text(json.dumps(spec))
    path = [setting.folder / "trl", *([Path(sys.prefix) / "torchvision"] if "vision" in setting.method else [])]
    environment = {"PYTHONPATH": os.pathsep.join(map(str, path)), "TRL_EXPERIMENTAL_SILENCE": "1"}
    peak = run_quietly(
        [sys.executable, Path(__file__).with_name("trl_run.py"), specification],
        log=setting.folder / "trl_run.log",
        environment=environment | empty_cache(setting.folder),
    )
    return Result(**json.loads(result.read_text()), peak_memory=peak)


def packed_shape(setting: Setting) -> dict[str, int]:
    """Return settings for packed rows, with as many rows as fill a batch with a similar number of tokens."""
    with setting.tokenised.open() as lines:
        lengths = [len(json.loads(line)["input_ids"]) for line in lines]
    num_rows = max(1, round(setting.batch_size * statistics.mean(lengths) / PACKED_LENGTH))
    return {"per_device_train_batch_size": 1, "gradient_accumulation_steps": num_rows, "max_length": PACKED_LENGTH}


def empty_cache(folder: Path) -> dict[str, str]:
    """Return an environment without cached data or log-probs from earlier runs."""
    cache = folder / "cache"
    shutil.rmtree(cache, ignore_errors=True)
    return {"XDG_CACHE_HOME": str(cache), "HF_DATASETS_CACHE": str(cache / "datasets")}


def install_trl(folder: Path) -> None:
    """Install TRL in a separate folder without dependencies, which are installed already."""
    if not (folder / "trl" / "trl").is_dir():
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(folder / "trl"), TRL]
        subprocess.run(command, check=True)


def prepare(name: str, args: argparse.Namespace) -> Setting:
    """Create the inputs for a method in the folder."""
    method, folder = METHODS[name], args.folder
    steps, batch_size = args.steps or method.steps, args.batch_size or method.batch_size
    dataset, model = data.inputs(name, args, num_rows=steps * batch_size // method.responses, unit=method.unit)
    rows = data.in_step_order(
        folder / f"{name}_rows.jsonl",
        method.rows(model, dataset),
        rows_per_step=batch_size * method.rows_of_unit // method.responses,
        steps=steps,
    )
    of_unit, rate = method.rows_of_unit, args.learning_rate or method.learning_rate
    sizes = {"batch_size": batch_size * of_unit, "trl_micro_batch": args.trl_micro_batch * of_unit}
    return Setting(name, folder, dataset, rows, model, steps, **sizes, learning_rate=rate)


def in_turns(
    run: Callable[[str], Result], names: Sequence[str], *, runs: int, measure: Measure = TOKENS
) -> dict[str, list[Result]]:
    """Return results by variant; variants alternate, so that other load on the machine affects all equally."""
    results: dict[str, list[Result]] = {name: [] for name in names}
    width = max(map(len, names))
    for name in [*names] * runs:
        result = run(name)
        results[name].append(result)
        measured = f"{rounded(measure.speed(result)):>8} {measure.unit}/s, {result.peak_memory:6.0f} MiB"
        print(f"  {name:<{width}} {measured}, {measure.curve} {result.curve[-1]:.3f}", flush=True)
    return results


def rounded(speed: float) -> str:
    """Return a speed with decimals if it is small."""
    return f"{speed:,.0f}" if speed >= 100 else f"{speed:.2f}"


def report(
    results: Mapping[str, list[Result]], *, compared: Mapping[str, str] | None = None, measure: Measure = TOKENS
) -> str:
    """Return a table with the median over runs, each run's ratio to TRL's best setting, and the curves."""
    speeds = {name: [measure.speed(result) for result in found] for name, found in results.items()}
    peers = [name for name in speeds if name.startswith("TRL")] or list(speeds)
    best = max(peers, key=lambda name: statistics.median(speeds[name]))
    rows = []
    for name, found in speeds.items():
        ratios = [own / peer for own, peer in zip(found, speeds[best], strict=True)]
        memory = statistics.median(result.peak_memory for result in results[name])
        end = statistics.median(result.curve[-1] for result in results[name])
        spread = f"{min(ratios):.2f}-{max(ratios):.2f}"
        speed = rounded(statistics.median(found))
        rows.append((name, f"{statistics.median(ratios):.2f}", spread, speed, f"{memory:,.0f}", f"{end:.3f}"))
    head = f"setting | ratio to {best} | range | {measure.unit}/s | peak memory, MiB | final {measure.curve}"
    curves = reward_curves(results) if measure.curve == "reward" else loss_distances(results, compared or {})
    return "\n".join([table(head, rows), "", *curves])


def loss_distances(results: Mapping[str, list[Result]], compared: Mapping[str, str]) -> Iterator[str]:
    """Yield the distance between the loss curves for each compared pair of variants."""
    for name, anchor in compared.items():
        if name in results and anchor in results:
            curves = zip(results[name][0].curve, results[anchor][0].curve, strict=True)
            distances = [abs(own - other) for own, other in curves]
            mean, most = statistics.mean(distances), max(distances)
            yield f"Loss of {name} against {anchor}: {mean:.4f} apart on average, {most:.4f} at most"


def reward_curves(results: Mapping[str, list[Result]]) -> Iterator[str]:
    """Yield a table with rewards by step and variant, averaged over runs."""
    means = [map(statistics.mean, zip(*(run.curve for run in found), strict=True)) for found in results.values()]
    rows = enumerate(zip(*means, strict=True), start=1)
    yield table(f"step | {' | '.join(results)}", ([step, *(f"{reward:.3f}" for reward in row)] for step, row in rows))


def parse(words: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line; each method needs steps after warm-up and complete batches."""
    parser = make_parser(__doc__)
    parser.add_argument("methods", nargs="+", choices=METHODS, metavar="METHOD", help=", ".join(METHODS))
    parser.add_argument("--only", nargs="+", choices=ALL_VARIANTS, default=ALL_VARIANTS, metavar="SETTING")
    parser.add_argument("--folder", type=Path, default=FOLDER, help="for models, data and logs; reused")
    parser.add_argument("--dataset", type=Path, help="jsonl with question and answer, or pairs; synthetic if absent")
    parser.add_argument("--model", help="folder or GGUF file to train instead of the small model")
    parser.add_argument("--learning_rate", type=float)
    parser.add_argument("--steps", type=int)
    parser.add_argument("--batch_size", type=int, help="rows, pairs, samples or episodes per optimizer step")
    parser.add_argument("--trl_micro_batch", type=int, default=8, help="rows, pairs, samples or episodes")
    parser.add_argument("--runs", type=int, default=3)
    args = parser.parse_args(words)
    for method in map(METHODS.__getitem__, args.methods):
        batch_size, warm_up = args.batch_size or method.batch_size, method.measure.warm_up_steps
        if (args.steps or method.steps) <= warm_up:
            parser.error(f"--steps must be more than the {warm_up} warm-up steps")
        if method.responses > 1 and (batch_size % method.responses or batch_size % args.trl_micro_batch):
            parser.error(f"--batch_size must be a multiple of {method.responses} and of --trl_micro_batch")
    return args


def main() -> None:
    args = parse()
    args.folder.mkdir(parents=True, exist_ok=True)
    install_trl(args.folder)
    print(machine(), flush=True)
    for name in (name for name in METHODS if name in args.methods):
        method = METHODS[name]
        if method.responses > 1:  # `rlhf` sets the number of threads per role, so TRL may use all cores too
            os.environ.pop("OMP_NUM_THREADS", None)
        setting = prepare(name, args)
        size = args.batch_size or method.batch_size
        print(f"\n{name}: {setting.steps} steps of {size} {method.unit}, {args.runs} runs in turns", flush=True)
        names = [variant for variant in method.variants if variant in args.only]
        results = in_turns(partial(run, setting), names, runs=args.runs, measure=method.measure)
        print(report(results, compared=method.compared, measure=method.measure), flush=True)


if __name__ == "__main__":
    main()
