"""`rlhf grpo --environment` and TRL's GRPOTrainer with `environment_factory` on the same class, in turns.

    python benchmarks/episodes_vs_trl.py [--steps 8] [--runs 3] [--folder DIR]

Both take the same environment (trail.py), the same prompts in the same order with 8 episodes each, and make one
optimizer step of them, as in grpo_vs_trl.py. The model is the small one with the chat template of Qwen2.5, which TRL
reads calls of. `rlhf sft` has taught it to play: three turns with a call and one without, about 30 tokens each, after a
prompt of about 500 tokens that lists the tool. So both programs sample and train the same number of turns and tokens.

Prints trained episodes per second without the first step, which is start-up, and ratios to TRL's best setting.
"""

import argparse
import json
import os
import random
import shutil
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from comparison import (
    Measure,
    Result,
    Setting,
    Variant,
    comparison_parser,
    in_turns,
    install_trl,
    parsed,
    report,
    run_rlhf_grpo,
    run_trl,
)
from setting import RLHF, machine, make_small_model, run_quietly
from trail import PLACES, STEPS, Trail

EPISODES = Measure("trained episodes", "reward", warm_up_steps=1)
EPISODES_OF_PROMPT = 8
MAX_NEW_TOKENS, MAX_LEN = 64, 1024
NUM_DEMONSTRATIONS = 1500
ENVIRONMENT = Path(__file__).with_name("trail.py")
ENGINE_PER_CORE = ["--vllm_num_engines", str(os.cpu_count() or 1)]
DTYPES = {"fp32": "float32", "bf16": "bfloat16"}


def question(rng: random.Random) -> tuple[str, str]:
    """Return a start, and a question about the trail from there."""
    start = rng.choice(PLACES)
    return start, f"Start at the {start} and follow the trail for {STEPS} steps. Number {rng.randint(0, 99999)}."


def demonstration(rng: random.Random, tools: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return an episode that follows the trail, as a conversation to train on."""
    place, asked = question(rng)
    messages: list[dict[str, Any]] = [{"role": "user", "content": asked}]
    trail = Trail()
    trail.reset(place)
    for _ in range(STEPS):
        call = {"type": "function", "function": {"name": "look", "arguments": {"place": place}}}
        found = trail.look(place)
        messages += [{"role": "assistant", "content": "", "tool_calls": [call]}]
        messages += [{"role": "tool", "name": "look", "content": found}]
        place = found.removesuffix(".").split()[-1]
    return {"messages": [*messages, {"role": "assistant", "content": f"The {place}."}], "tools": list(tools)}


def write_lines(path: Path, rows: Sequence[dict[str, Any]]) -> Path:
    """Write rows as a jsonl file."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def make_player(folder: Path) -> Path:
    """Return the small model that plays the trail; one that is there is taken."""
    from transformers import AutoTokenizer
    from transformers.utils import get_json_schema

    player = folder / "trail_player"
    if player.exists():
        return player
    rng = random.Random(1)
    tools = [get_json_schema(Trail().look)]
    played = [demonstration(rng, tools) for _ in range(NUM_DEMONSTRATIONS)]
    texts = [{"question": row["messages"][0]["content"], "answer": json.dumps(row)} for row in played]
    rows = write_lines(folder / "demonstrations.jsonl", played)
    base = make_small_model(folder, write_lines(folder / "trail_texts.jsonl", texts), name="trail_base")
    tokenizer = AutoTokenizer.from_pretrained(base)
    template = folder / "trl" / "trl" / "chat_templates" / "qwen2_5.jinja"
    tokenizer.chat_template = template.read_text(encoding="utf-8")
    tokenizer.save_pretrained(base)
    output = folder / "trail_sft"
    shape = ["--train_batch_size", 32, "--max_epochs", 2, "--max_len", MAX_LEN, "--learning_rate", 2e-3]
    where = ["--pretrain", base, "--dataset", rows, "--output", output, "--overwrite"]
    run_quietly([*RLHF, "sft", *map(str, where + shape)], log=folder / "sft.log")
    shutil.move(output / "model", player)
    return player


def run_grpo(setting: Setting, name: str, *, flags: list[str]) -> Result:
    """One run of `rlhf grpo`."""
    episodes = ["--environment", ENVIRONMENT, "--max_turns", STEPS + 1]
    limits = ["--max_new_tokens", MAX_NEW_TOKENS, "--max_len", MAX_LEN]
    return run_rlhf_grpo(setting, name, num_samples=EPISODES_OF_PROMPT, flags=[*episodes, *limits, *flags])


trl_episodes = partial(
    run_trl,
    trainer="episodes",
    num_generations=EPISODES_OF_PROMPT,
    max_completion_length=MAX_NEW_TOKENS * (STEPS + 1),
    max_tool_calling_iterations=STEPS,
    temperature=1.0,
    beta=0.0,
    shuffle_dataset=False,
)


def trl_at_once(setting: Setting, name: str, **own: Any) -> Result:
    """GRPOTrainer with all episodes of a step in one forward pass."""
    whole: dict[str, Any] = {"per_device_train_batch_size": setting.batch_size, "gradient_accumulation_steps": 1}
    return trl_episodes(setting, name, **whole, **own)


VARIANTS: dict[str, Variant] = {
    **{
        f"rlhf {short}{also}": partial(run_grpo, flags=["--param_dtype", short, *flags])
        for short in DTYPES
        for also, flags in {"": [], ", engine per core": ENGINE_PER_CORE}.items()
    },
    **{f"TRL {short}": partial(trl_episodes, dtype=dtype, bf16=False) for short, dtype in DTYPES.items()},
    **{f"TRL {short} at once": partial(trl_at_once, dtype=dtype, bf16=False) for short, dtype in DTYPES.items()},
}


def prepare(args: argparse.Namespace) -> Setting:
    """Make everything that both programs need, in the folder."""
    folder: Path = args.folder
    folder.mkdir(parents=True, exist_ok=True)
    install_trl(folder)
    rng = random.Random(2)
    prompts = args.batch_size // EPISODES_OF_PROMPT * args.steps
    rows = [dict(zip(("start", "question"), question(rng), strict=True)) for _ in range(prompts)]
    messages = [{"prompt": [{"role": "user", "content": row["question"]}], "start": row["start"]} for row in rows]
    return Setting(
        folder=folder,
        dataset=write_lines(folder / "trails.jsonl", messages),
        tokenised=write_lines(
            folder / "trail_prompts.jsonl", [row | {"responses": EPISODES_OF_PROMPT} for row in messages]
        ),
        model=make_player(folder),
        steps=args.steps,
        batch_size=args.batch_size,
        trl_micro_batch=args.trl_micro_batch,
        learning_rate=1e-5,
    )


def main() -> None:
    parser = comparison_parser(__doc__, batch_size_is="episodes")
    parser.set_defaults(batch_size=64, steps=8)
    parser.add_argument("--only", nargs="+", choices=VARIANTS, default=list(VARIANTS), metavar="SETTING")
    args = parsed(parser, measure=EPISODES)
    if args.batch_size % EPISODES_OF_PROMPT or args.batch_size % args.trl_micro_batch:
        parser.error(f"--batch_size must be a multiple of {EPISODES_OF_PROMPT} and of --trl_micro_batch")
    os.environ.pop("OMP_NUM_THREADS", None)  # the roles of `rlhf` choose their own: TRL has all cores as well
    setting = prepare(args)
    print(f"{machine()}\n{args.steps} steps of {args.batch_size} episodes, {args.runs} runs in turns", flush=True)
    results = in_turns(setting, {name: VARIANTS[name] for name in args.only}, runs=args.runs, measure=EPISODES)
    print(report(results, measure=EPISODES))


if __name__ == "__main__":
    main()
