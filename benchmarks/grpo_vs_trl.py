"""`rlhf grpo` and TRL's GRPOTrainer on the same model, prompts and rewards, in turns; an iteration and its parts.

    python benchmarks/grpo_vs_trl.py [--dataset rows.jsonl] [--steps 12] [--runs 3] [--folder DIR]
        [--model FILE.gguf --learning_rate 1e-5]

Model, folder and turns are as in sft_vs_trl.py. `rlhf` generates with vLLM, TRL with transformers, as it does on a CPU.
Both take the same prompts in the same order, 8 responses of up to 128 tokens to each, and make one optimizer step of
them, without a reference, at temperature 1, with the same learning rate and reward (grpo_reward.py). TRL computes a
step in pieces or at once, and generates with transformers' plain or continuous batching; `rlhf` has one engine on all
cores or an engine for each, and compiles the trained model's blocks or not. An untrained model gives each
of its 4,096 tokens about the same probability, the one that ends a response among them, so that nearly all responses of
both have 128 tokens. Responses differ, as samplers do; rewards have to take about the same course.

Prints trained samples per second without the first step, which is start-up; ratios to TRL's best setting; the course of
the rewards; and an iteration of `rlhf` beside its parts alone (grpo_parts.py): vLLM's generation, and forward and
backward. The memory of `rlhf` is the sum over all its processes.
"""

import argparse
import json
import os
import statistics
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from comparison import (
    Measure,
    Result,
    Setting,
    Variant,
    add_model_options,
    chosen_model,
    comparison_parser,
    in_turns,
    install_trl,
    parsed,
    report,
    run_rlhf_grpo,
    run_script,
    run_trl,
)
from setting import machine, write_word_problems

SAMPLES = Measure("trained samples", "reward", warm_up_steps=1)
LEARNING_RATE = 1e-3
RESPONSES = 8  # to a prompt
MAX_NEW_TOKENS, MAX_LEN = 128, 512
AIM = 1.15  # of an iteration to the sum of its parts
DTYPES = {"fp32": "float32", "bf16": "bfloat16"}
ENGINE_PER_CORE = ["--vllm_num_engines", str(os.cpu_count() or 1)]
COMPILED = ["--compile_model", "--no_enforce_eager"]
RLHF_SETTINGS = {
    "": [],
    ", compiled": COMPILED,
    ", engine per core": ENGINE_PER_CORE,
    ", engine per core, compiled": [*ENGINE_PER_CORE, *COMPILED],
}


def run_grpo(setting: Setting, name: str, *, flags: list[str]) -> Result:
    """One run of `rlhf grpo`."""
    reward = ["--reward_func", Path(__file__).with_name("grpo_reward.py")]
    limits = ["--max_new_tokens", MAX_NEW_TOKENS, "--max_len", MAX_LEN]
    return run_rlhf_grpo(setting, name, num_samples=RESPONSES, flags=[*reward, *limits, *flags])


trl_grpo = partial(
    run_trl,
    trainer="grpo",
    num_generations=RESPONSES,
    max_completion_length=MAX_NEW_TOKENS,
    temperature=1.0,
    beta=0.0,
    shuffle_dataset=False,
)


def trl_at_once(setting: Setting, name: str, **own: Any) -> Result:
    """GRPOTrainer with all samples of a step in one forward pass."""
    whole: dict[str, Any] = {"per_device_train_batch_size": setting.batch_size, "gradient_accumulation_steps": 1}
    return trl_grpo(setting, name, **whole, **own)


continuous = partial(trl_at_once, use_transformers_continuous_batching=True)


def run_part(setting: Setting, name: str, *, part: str, dtype: str) -> Result:
    """One part of the iterations alone, in the environment in which it runs in `rlhf`."""
    from rlhf_cli.environment import SPIN_COUNT

    environment = {"OMP_NUM_THREADS": str(os.cpu_count() or 1), "GOMP_SPINCOUNT": SPIN_COUNT}
    if part == "generation":
        environment |= {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_CPU_KVCACHE_SPACE": "1"}
        environment |= {"TORCHDYNAMO_DISABLE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "WARNING"}
    spec = {
        "part": part,
        "model": str(setting.model),
        "rows": str(setting.tokenised),
        "prompts_per_step": setting.batch_size // RESPONSES,
        "dtype": dtype,
        "max_len": MAX_LEN,
        "max_new_tokens": MAX_NEW_TOKENS,
    }
    return run_script(setting, f"grpo {name}", script="grpo_parts.py", spec=spec, environment=environment)


def part_name(part: str, dtype: str) -> str:
    """The names of the parts alone in the table."""
    return f"{part} alone {dtype}"


VARIANTS: dict[str, Variant] = {
    **{
        f"rlhf {dtype}{also}": partial(run_grpo, flags=["--param_dtype", dtype, *flags])
        for dtype in DTYPES
        for also, flags in RLHF_SETTINGS.items()
    },
    **{
        part_name(part, dtype): partial(run_part, part=part, dtype=dtype)
        for dtype in DTYPES
        for part in ("generation", "training")
    },
    **{f"TRL {short}": partial(trl_grpo, dtype=dtype, bf16=False) for short, dtype in DTYPES.items()},
    **{f"TRL {short} at once": partial(trl_at_once, dtype=dtype, bf16=False) for short, dtype in DTYPES.items()},
    **{f"TRL {short} continuous": partial(continuous, dtype=dtype, bf16=False) for short, dtype in DTYPES.items()},
    "TRL bf16 autocast": partial(trl_grpo, dtype="float32", bf16=True),
    "TRL bf16 compiled": partial(trl_grpo, dtype=DTYPES["bf16"], bf16=False, torch_compile=True),
}


def write_rows(setting: Setting, tokenizer: Any) -> None:
    """The prompts of all steps as `rlhf grpo` renders and tokenises them, in the order in which it takes them."""
    from rlhf_cli.config.data import PromptConfig
    from rlhf_cli.config.train import BatchConfig
    from rlhf_cli.data.prompts import load_prompts
    from rlhf_cli.data.sampling import StepBatches

    seed, config = BatchConfig().seed, PromptConfig(prompt_data=str(setting.dataset), max_len=MAX_LEN)
    prompts = load_prompts(config, tokenizer, max_new_tokens=MAX_NEW_TOKENS, seed=seed).prompts
    order = StepBatches(len(prompts), batch_size=setting.batch_size // RESPONSES, epochs=1, seed=seed)
    if len(order) < setting.steps:
        raise SystemExit(f"{len(prompts)} prompts are too few for {setting.steps} steps")
    with setting.tokenised.open("w") as lines:
        for indices in order[: setting.steps]:
            for prompt in (prompts[int(i)] for i in indices):
                if tokenizer(prompt.text)["input_ids"] != list(prompt.prompt_ids):
                    raise SystemExit("TRL would make other tokens of a prompt's text: there is nothing to compare")
                row = {"prompt": prompt.text, "prompt_ids": list(prompt.prompt_ids), "responses": RESPONSES}
                lines.write(json.dumps(row) + "\n")


def prepare(args: argparse.Namespace) -> Setting:
    """Everything both programs need, in the folder."""
    from rlhf_cli.config.model import ModelConfig
    from rlhf_cli.models.tokenizers import load_tokenizer

    folder: Path = args.folder
    folder.mkdir(parents=True, exist_ok=True)
    install_trl(folder)
    dataset = args.dataset or write_word_problems(folder / "rows.jsonl", num_rows=4000)
    setting = Setting(
        folder=folder,
        dataset=dataset,
        tokenised=folder / "prompts.jsonl",
        model=chosen_model(args, dataset),
        steps=args.steps,
        batch_size=args.batch_size,
        trl_micro_batch=args.trl_micro_batch,
        learning_rate=args.learning_rate,
    )
    write_rows(setting, load_tokenizer(ModelConfig(pretrain=str(setting.model))))
    return setting


def courses(results: Mapping[str, Sequence[Result]]) -> str:
    """The rewards of all variants side by side, means over their runs."""
    judged = {name: found for name, found in results.items() if found[0].course}
    means = [map(statistics.mean, zip(*(run.course for run in found), strict=True)) for found in judged.values()]
    lines = [f"| step | {' | '.join(judged)} |", "|---" * (len(judged) + 1) + "|"]
    for number, row in enumerate(zip(*means, strict=True), start=1):
        lines.append(f"| {number} | {' | '.join(f'{reward:.3f}' for reward in row)} |")
    return "\n".join(lines)


def beside_parts(results: Mapping[str, Sequence[Result]], dtype: str) -> str | None:
    """Return an iteration of `rlhf` beside the sum of its parts alone; None if a part was not measured."""
    names = [f"rlhf {dtype}", part_name("generation", dtype), part_name("training", dtype)]
    if not all(name in results for name in names):
        return None
    iteration, generation, training = (
        statistics.median(second for run in results[name] for second in run.seconds[SAMPLES.warm_up_steps :])
        for name in names
    )
    return (
        f"An iteration in {dtype}: {iteration:.2f} s; its parts alone: generation {generation:.2f} s, forward and "
        f"backward {training:.2f} s; ratio to their sum {iteration / (generation + training):.2f} (aim {AIM})"
    )


def main() -> None:
    parser = comparison_parser(__doc__, batch_size_is="samples")
    parser.set_defaults(batch_size=64)
    add_model_options(parser, learning_rate=LEARNING_RATE)
    parser.add_argument("--only", nargs="+", choices=VARIANTS, default=list(VARIANTS), metavar="SETTING")
    args = parsed(parser, measure=SAMPLES)
    if args.batch_size % RESPONSES or args.batch_size % args.trl_micro_batch:
        parser.error(f"--batch_size must be a multiple of {RESPONSES} and of --trl_micro_batch")
    os.environ.pop("OMP_NUM_THREADS", None)  # the roles of `rlhf` choose their own: TRL has all cores as well
    setting = prepare(args)
    print(f"{machine()}\n{args.steps} steps of {args.batch_size} samples, {args.runs} runs in turns", flush=True)
    results = in_turns(setting, {name: VARIANTS[name] for name in args.only}, runs=args.runs, measure=SAMPLES)
    print(report(results, measure=SAMPLES))
    print(courses(results))
    for line in filter(None, (beside_parts(results, dtype) for dtype in DTYPES)):
        print(f"\n{line}")


if __name__ == "__main__":
    main()
