"""`rlhf sft` and TRL's SFTTrainer on the same model, rows and machine, in turns.

    python benchmarks/sft_vs_trl.py [--dataset rows.jsonl] [--steps 12] [--runs 3] [--folder DIR]
        [--model FILE.gguf --learning_rate 1e-5]

Makes an 11M-parameter Qwen2 with a 4k vocabulary and installs TRL into the folder, which a next run takes again. Every
run is a process of its own; both train the same tokens in the same order from the same weights, with the same batch
size, optimizer and schedule. Prints trained tokens per second without the first steps, the ratio to TRL's best
setting, peak memory, how far the loss curves are apart, and the speed that the matrix products alone would allow. TRL
packs rows its own way, so its packed losses are not compared.
"""

import argparse
import json
import statistics
import time
from functools import partial
from pathlib import Path
from typing import Any

from comparison import (
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
    run_rlhf,
    run_trl,
)
from setting import machine, write_word_problems

LEARNING_RATE = 1e-3
PACKED_LENGTH = 1024  # TRL's default max_length
PRODUCT_ROWS = 4096  # tokens of the products that are timed alone

sft = partial(run_rlhf, command="sft")
trl_sft = partial(run_trl, trainer="sft", completion_only_loss=True, max_length=None)


def packed_trl_sft(setting: Setting, name: str, *, dtype: str) -> Result:
    """SFTTrainer on rows of its packed length, as many as hold about as many tokens as a batch of sequences."""
    with setting.tokenised.open() as lines:
        lengths = [len(json.loads(line)["input_ids"]) for line in lines]
    num_rows = max(1, round(setting.batch_size * statistics.mean(lengths) / PACKED_LENGTH))
    shape: dict[str, Any] = {
        "per_device_train_batch_size": 1,
        "gradient_accumulation_steps": num_rows,
        "max_length": PACKED_LENGTH,
    }
    return trl_sft(setting, name, dtype=dtype, bf16=False, packing=True, **shape)


VARIANTS: dict[str, Variant] = {
    "rlhf bf16": partial(sft, flags=["--param_dtype", "bf16"]),
    "rlhf fp32": partial(sft, flags=["--param_dtype", "fp32"]),
    "rlhf bf16 compiled": partial(sft, flags=["--param_dtype", "bf16", "--compile_model"]),
    "rlhf fp32 compiled": partial(sft, flags=["--param_dtype", "fp32", "--compile_model"]),
    "TRL fp32": partial(trl_sft, dtype="float32", bf16=False),
    "TRL bf16 autocast": partial(trl_sft, dtype="float32", bf16=True),
    "TRL bf16": partial(trl_sft, dtype="bfloat16", bf16=False),
    "TRL bf16 packed": partial(packed_trl_sft, dtype="bfloat16"),
    "TRL fp32 packed": partial(packed_trl_sft, dtype="float32"),
}
COMPARED = dict.fromkeys(("rlhf bf16", "rlhf fp32", "TRL bf16 autocast", "TRL bf16"), "TRL fp32")


def write_tokenised(setting: Setting) -> None:
    """The rows as `rlhf sft` tokenises them, in the order in which it takes them."""
    from rlhf_cli.config.data import DataConfig
    from rlhf_cli.config.model import ModelConfig
    from rlhf_cli.config.train import BatchConfig
    from rlhf_cli.data.sampling import StepBatches
    from rlhf_cli.data.sft_data import load_sft_sequences
    from rlhf_cli.models.tokenizers import load_tokenizer

    tokenizer = load_tokenizer(ModelConfig(pretrain=str(setting.model)))
    seed, dataset = BatchConfig().seed, str(setting.dataset)
    data = load_sft_sequences(DataConfig(dataset=dataset), tokenizer, dataset=dataset, split="train", seed=seed)
    order = StepBatches(len(data.lengths), batch_size=setting.batch_size, epochs=1, seed=seed)
    with setting.tokenised.open("w") as lines:
        for indices in order[: setting.steps + 1]:
            for sequence in (data.sequences[int(i)] for i in indices):
                mask = sequence.loss_mask.astype(int).tolist()
                lines.write(json.dumps({"input_ids": sequence.token_ids.tolist(), "completion_mask": mask}) + "\n")


def prepare(args: argparse.Namespace) -> Setting:
    """Everything both programs need, in the folder."""
    folder: Path = args.folder
    folder.mkdir(parents=True, exist_ok=True)
    install_trl(folder)
    dataset = args.dataset or write_word_problems(folder / "rows.jsonl", num_rows=4000)
    setting = Setting(
        folder=folder,
        dataset=dataset,
        tokenised=folder / "tokenised.jsonl",
        model=chosen_model(args, dataset),
        steps=args.steps,
        batch_size=args.batch_size,
        trl_micro_batch=args.trl_micro_batch,
        learning_rate=args.learning_rate,
    )
    write_tokenised(setting)
    return setting


def products_alone(setting: Setting, dtype: str) -> float:
    """Trained tokens per second if nothing were done but the linear layers' products, forward and backward.

    The head's are counted for trained tokens alone. No program is faster with these layers on this processor.
    """
    import torch
    from torch import nn
    from transformers import AutoModelForCausalLM

    with setting.tokenised.open() as lines:
        masks = [json.loads(line)["completion_mask"] for line in lines]
    trained_share = sum(map(sum, masks)) / sum(map(len, masks))
    model = AutoModelForCausalLM.from_pretrained(setting.model, dtype=getattr(torch, dtype))
    seconds = 0.0
    for name, layer in model.named_modules():
        if isinstance(layer, nn.Linear):
            weight = layer.weight.detach()
            rows = round(PRODUCT_ROWS * (trained_share if name == "lm_head" else 1))
            x, grad = (torch.randn(rows, size).to(weight.dtype) for size in (weight.shape[1], weight.shape[0]))
            x @ weight.T, grad @ weight, grad.T @ x
            begin = time.perf_counter()
            x @ weight.T, grad @ weight, grad.T @ x
            seconds += time.perf_counter() - begin
    return PRODUCT_ROWS * trained_share / seconds


def main() -> None:
    parser = comparison_parser(__doc__, batch_size_is="sequences")
    add_model_options(parser, learning_rate=LEARNING_RATE)
    parser.add_argument("--only", nargs="+", choices=VARIANTS, default=list(VARIANTS), metavar="SETTING")
    args = parsed(parser)
    setting = prepare(args)
    print(f"{machine()}\n{args.steps} steps of {args.batch_size} sequences, {args.runs} runs in turns", flush=True)
    results = in_turns(setting, {name: VARIANTS[name] for name in args.only}, runs=args.runs)
    print(report(results, compared=COMPARED))
    for short, dtype in (("fp32", "float32"), ("bf16", "bfloat16")):
        if any(short in name for name in args.only):
            print(
                f"Matrix products of the layers alone, {short}: {products_alone(setting, dtype):,.0f} trained tokens/s"
            )


if __name__ == "__main__":
    main()
