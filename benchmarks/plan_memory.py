"""Compare planned with measured host memory on a CPU, for nine commands on models of four sizes.

    python benchmarks/plan_memory.py [--commands sft ppo] [--sizes 11M 135M] [--folder X]

Each run has three steps with short sequences and float32 weights. Measured is the highest `memory/host_gib`.
Models have random weights; 135M has the shape of SmolLM2-135M. Runs that exist in the folder are planned again, but not
repeated. Exits with 1 if a plan is more than 15 % off.
"""

import random
import sys
from collections.abc import Mapping
from multiprocessing import get_context
from pathlib import Path

import numpy as np
from common import (
    FOLDER,
    RLHF,
    machine,
    make_model,
    make_parser,
    rlhf,
    run_quietly,
    table,
    word_problem,
    write_rows,
)
from PIL import Image

SIZES = {
    "0.4M": "--hidden_size 64 --intermediate_size 256 --num_hidden_layers 4 --num_attention_heads 2",
    "11M": "--hidden_size 256 --intermediate_size 1024 --num_hidden_layers 8 --num_attention_heads 4",
    "45M": "--hidden_size 384 --intermediate_size 1024 --num_hidden_layers 12 --num_attention_heads 6",
    "135M": "--hidden_size 576 --intermediate_size 1536 --num_hidden_layers 30 --num_attention_heads 9",
}
VOCABULARY = {"0.4M": 512, "11M": 8192, "45M": 49152, "135M": 49152}
KEY_VALUE_HEADS = {"0.4M": 1, "11M": 2, "45M": 2, "135M": 3}
VISION = "--image_size 224 --patch_size 28 --scale_factor 4"
LIMIT = 0.15
ROWS = 64
OFFLINE: dict[str, object] = {"train_batch_size": 4, "max_steps": 3, "max_len": 512}
ONLINE: dict[str, object] = {
    "label_key": "answer",
    "reward_funcs": "gsm8k",
    "max_iterations": 3,
    "rollout_batch_size": 4,
    "n_samples_per_prompt": 2,
    "train_batch_size": 8,
    "max_new_tokens": 32,
    "max_len": 512,
    "rollout_backend": "transformers",
}
RUNS: dict[str, tuple[str, dict[str, object]]] = {
    "sft": ("sft", OFFLINE),
    "sft, LoRA": ("sft", {**OFFLINE, "lora_rank": 16}),
    "sft, images": ("sft", {**OFFLINE, "output_key": "response"}),
    "dpo": ("dpo", OFFLINE),
    "rm": ("rm", OFFLINE),
    "grpo": ("grpo", ONLINE),
    "grpo, images": ("grpo", {**ONLINE, "prompt_key": "prompt"}),
    "grpo, vLLM": ("grpo", {**ONLINE, "rollout_backend": "vllm", "enforce_eager": True}),
    "ppo": ("ppo", ONLINE),
}


def write_data(folder: Path) -> dict[str, Path]:
    """Write rows for each kind of command."""
    rng = random.Random(0)
    problems = [word_problem(rng) for _ in range(ROWS)]
    pairs = ({"prompt": row["question"], "chosen": row["answer"], "rejected": row["mistaken"]} for row in problems)
    pictures = np.random.default_rng(0).integers(0, 256, (ROWS, 224, 224, 3), dtype=np.uint8)
    (folder / "pictures").mkdir(parents=True, exist_ok=True)
    for number, pixels in enumerate(pictures):
        Image.fromarray(pixels).save(folder / "pictures" / f"{number}.png")
    shown = (
        {"images": [f"pictures/{number}.png"], "prompt": f"<image>{row['question']}"}
        | {"response": row["answer"], "answer": row["answer"]}
        for number, row in enumerate(problems)
    )
    rows = ({name: row[name] for name in ("question", "answer")} for row in problems)
    return {
        "rows": write_rows(folder / "rows.jsonl", rows),
        "pairs": write_rows(folder / "pairs.jsonl", pairs),
        "images": write_rows(folder / "images.jsonl", shown),
    }


def sized_model(folder: Path, data: Path, size: str, *, has_images: bool) -> Path:
    """Create a model of a size, with the vocabulary size of the table: more embeddings than tokens."""
    name = f"{size}_images" if has_images else size
    model = folder / name
    if not model.exists():
        shape = f"{SIZES[size]} --num_key_value_heads {KEY_VALUE_HEADS[size]} --vocab_size 512"
        plain = make_model(folder, data, shape=shape + (f" {VISION}" if has_images else ""), name=f"{name}_plain")
        # In a process of its own: this one would share torch's pages with the runs, which would measure less.
        with get_context("spawn").Pool(1) as pool:
            pool.apply(save_with_vocabulary, (plain, model, VOCABULARY[size], has_images))
    return model


def save_with_vocabulary(plain: Path, model: Path, vocab_size: int, has_images: bool) -> None:
    """Save an untrained model like `plain` with more embeddings."""
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, AutoProcessor, AutoTokenizer

    config = AutoConfig.from_pretrained(plain)
    config.get_text_config().vocab_size = vocab_size
    if has_images:
        config.vocab_size = vocab_size
    made = (AutoModelForImageTextToText if has_images else AutoModelForCausalLM).from_config(config)
    (AutoProcessor if has_images else AutoTokenizer).from_pretrained(plain).save_pretrained(model)
    made.save_pretrained(model)


def run(name: str, size: str, folder: Path, data: Mapping[str, Path]) -> tuple[float, float]:
    """Run a command unless its run exists; return (planned, measured) host memory in GiB."""
    command, settings = RUNS[name]
    output = folder / f"{name.replace(', ', '_')}_{size}"
    if not (output / "plan.json").exists():
        has_images = name.endswith("images")
        model = sized_model(folder, data["rows"], size, has_images=has_images)
        kind = "images" if has_images else "pairs" if command in ("dpo", "rm") else "rows"
        rows = "prompt_data" if command in ("grpo", "ppo") else "dataset"
        given = {"pretrain": model, rows: data[kind], "output": output, "param_dtype": "fp32", "overwrite": True}
        run_quietly(rlhf(command, {**given, **settings}), log=output.with_suffix(".log"))
    log = output.with_suffix(".plan")
    run_quietly([*RLHF, "plan", "--proof", output], log=log)
    (line,) = (line for line in log.read_text().splitlines() if line.startswith("host memory, GiB"))
    planned, measured = line.removeprefix("host memory, GiB").split()[:2]
    return float(planned), float(measured)


def main() -> int:
    parser = make_parser(__doc__)
    parser.add_argument("--folder", type=Path, default=FOLDER / "plan_memory", help="for models, data, runs and logs")
    parser.add_argument("--commands", nargs="+", choices=RUNS, default=list(RUNS))
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=list(SIZES))
    args = parser.parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    data = write_data(args.folder)
    print(machine(), flush=True)
    rows, worst = [], 0.0
    for name in args.commands:
        for size in args.sizes:
            planned, measured = run(name, size, args.folder, data)
            worst = max(worst, abs(planned / measured - 1))
            rows.append((name, size, f"{planned:.2f}", f"{measured:.2f}", f"{planned / measured - 1:+.0%}"))
            print(*rows[-1], sep="\t", flush=True)
    print(table("command | parameters | planned, GiB | measured, GiB | difference", rows))
    return int(worst > LIMIT)


if __name__ == "__main__":
    sys.exit(main())
