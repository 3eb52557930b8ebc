"""`rlhf sft` and `dpo` and TRL's trainers of these names on rows with pictures, in turns.

    python benchmarks/vision_vs_trl.py [--methods sft dpo] [--steps 12] [--runs 3] [--folder DIR]

Everything is as in sft_vs_trl.py, with a Qwen2.5-VL of 14M parameters instead: a process for each run, the same tokens
in the same order from the same weights with the same batch size, optimizer and schedule. A row has 0 to 2 pictures of
any size and a word problem.

TRL gets the text of the tokens that `rlhf` trains, as prompt and completion. It makes tokens of it, reads and resizes
the pictures by the model's processor when it takes a batch, as it does for all vision-language models, and pads. (In
rows of messages it would also train the template's text behind the end of a turn.) Its processor needs torchvision,
which resizes a little differently from Pillow: a few values of pixels are off by one, and losses are not equal to the
last digit. Why SFTTrainer gets a model that counts tokens is described in trl_run.py.

Trained tokens are the responses' tokens, of both sides of a pair.
"""

import argparse
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from comparison import Setting, Variant, comparison_parser, in_turns, install_trl, parsed, report, run_rlhf, run_trl
from setting import machine
from vision_setting import make_vision_model, write_pictured_problems

NUM_ROWS = 1000
BF16, FP32 = ["--param_dtype", "bf16"], ["--param_dtype", "fp32"]
PAIR_KEYS = {"input_key": "question", "chosen_key": "answer", "rejected_key": "mistaken"}
COMPARED = dict.fromkeys(("rlhf bf16", "rlhf fp32", "TRL bf16 autocast", "TRL bf16"), "TRL fp32")


def variants(method: str) -> dict[str, Variant]:
    """Both programs with all number types that they know."""
    rlhf = partial(run_rlhf, command=method)
    trl = partial(run_trl, trainer=f"vision_{method}", torchvision=True, max_length=None)
    keys = METHODS[method].flags
    return {
        "rlhf bf16": partial(rlhf, flags=[*keys, *BF16]),
        "rlhf fp32": partial(rlhf, flags=[*keys, *FP32]),
        "TRL fp32": partial(trl, dtype="float32", bf16=False),
        "TRL bf16 autocast": partial(trl, dtype="float32", bf16=True),
        "TRL bf16": partial(trl, dtype="bfloat16", bf16=False),
    }


@dataclass(frozen=True)
class Texts:
    """Tokens as the text that a processor of transformers makes them from."""

    tokenizer: Any

    def of(self, token_ids: Sequence[int], pictures: Sequence[Any] = ()) -> str:
        """Return the text of tokens, with one placeholder for each picture. End the benchmark if it gives others."""
        from rlhf_cli.models.vision.pictures import unexpanded

        short = unexpanded([int(token) for token in token_ids], tuple(pictures))
        text: str = self.tokenizer.decode(short)
        if self.tokenizer(text, add_special_tokens=False)["input_ids"] != short:
            raise SystemExit(f"the text {text!r} has other tokens than `rlhf` trains: there is nothing to compare")
        return text


@dataclass(frozen=True)
class Source:
    """The data of a method as `rlhf` reads them."""

    setting: Setting
    texts: Texts
    reader: Any
    seed: int

    def load(self, load: Callable[..., Any], config: Callable[..., Any]) -> Any:
        """Return the data set by one of the loading functions and the settings that it reads."""
        dataset = str(self.setting.dataset)
        tokenizer = self.texts.tokenizer
        return load(
            config(dataset=dataset), tokenizer, dataset=dataset, split="train", seed=self.seed, reader=self.reader
        )


def sequence_rows(source: Source) -> Iterator[dict[str, Any]]:
    """Prompts and completions for SFTTrainer, in the order of the file."""
    from rlhf_cli.config.data import DataConfig
    from rlhf_cli.data.sft_data import load_sft_sequences

    for sequence in source.load(load_sft_sequences, DataConfig).sequences:
        trained = np.flatnonzero(sequence.loss_mask)
        start, stop = int(trained[0]), int(trained[-1]) + 1  # a line break behind the end of the turn is not trained
        if trained.size != stop - start:
            raise SystemExit("`rlhf` trains parts of a row that are apart: there is nothing to compare")
        prompt = source.texts.of(sequence.token_ids[:start], sequence.pictures)
        completion = source.texts.of(sequence.token_ids[start:stop])
        yield {"prompt": prompt, "completion": completion, "trained": stop - start}


def pair_rows(source: Source) -> Iterator[dict[str, Any]]:
    """Prompts with both sides for DPOTrainer, in the order of the file."""
    from rlhf_cli.config.data import PreferenceDataConfig
    from rlhf_cli.data.preference_data import load_pairs

    config = partial(PreferenceDataConfig, **PAIR_KEYS)
    for pair in source.load(load_pairs, config).pairs:
        sides = {"chosen": pair.chosen.token_ids, "rejected": pair.rejected.token_ids}
        texts = {name: source.texts.of(token_ids) for name, token_ids in sides.items()}
        trained = sum(len(token_ids) for token_ids in sides.values())
        yield {"prompt": source.texts.of(pair.prompt_ids, pair.pictures), **texts, "trained": trained}


@dataclass(frozen=True)
class Method:
    """A way of learning: its rows as TRL takes them, its learning rate, and the columns that `rlhf` reads, as flags."""

    rows: Callable[[Source], Iterator[dict[str, Any]]]
    learning_rate: float
    flags: list[str]


METHODS = {
    "sft": Method(sequence_rows, 1e-3, []),
    "dpo": Method(pair_rows, 1e-4, [word for name, column in PAIR_KEYS.items() for word in (f"--{name}", column)]),
}
SETTINGS = list(variants("sft"))


def prepare(args: argparse.Namespace, name: str) -> Setting:
    """Everything that both programs need for a method, in the folder."""
    folder: Path = args.folder
    folder.mkdir(parents=True, exist_ok=True)
    install_trl(folder)
    dataset = write_pictured_problems(folder, num_rows=max(NUM_ROWS, args.steps * args.batch_size))
    rows = [json.loads(line) for line in dataset.read_text(encoding="utf-8").splitlines()]
    setting = Setting(
        folder=folder,
        dataset=dataset,
        tokenised=folder / f"pictured_{name}.jsonl",
        model=make_vision_model(folder, [text for row in rows for text in row.values() if isinstance(text, str)]),
        steps=args.steps,
        batch_size=args.batch_size,
        trl_micro_batch=args.trl_micro_batch,
        learning_rate=METHODS[name].learning_rate,
    )
    write_rows(setting, METHODS[name], [row["images"] for row in rows])
    return setting


def write_rows(setting: Setting, method: Method, images: list[list[str]]) -> None:
    """The rows of all steps with the paths of their pictures, in the order in which `rlhf` takes them."""
    from rlhf_cli.config.train import BatchConfig
    from rlhf_cli.data.sampling import StepBatches

    seed = BatchConfig().seed
    rows = list(method.rows(source_of(setting, seed)))
    order = StepBatches(len(rows), batch_size=setting.batch_size, epochs=1, seed=seed)
    with setting.tokenised.open("w") as lines:
        for number in (int(number) for indices in order[: setting.steps + 1] for number in indices):
            paths = [str(setting.folder / name) for name in images[number]]
            lines.write(json.dumps({"images": paths, **rows[number]}) + "\n")


def source_of(setting: Setting, seed: int) -> Source:
    """The data with the model's tokenizer and its way with pictures."""
    from transformers import AutoConfig

    from rlhf_cli.config.model import ModelConfig
    from rlhf_cli.config.pictures import PicturesConfig
    from rlhf_cli.data.pictures.reading import PictureReader
    from rlhf_cli.models.tokenizers import load_tokenizer
    from rlhf_cli.models.vision.families.table import find_family

    path = str(setting.model)
    tokenizer = load_tokenizer(ModelConfig(pretrain=path))
    family = find_family(path, AutoConfig.from_pretrained(path), tokenizer)
    assert family is not None
    return Source(setting, Texts(tokenizer), PictureReader(family, PicturesConfig()), seed)


def main() -> None:
    parser = comparison_parser(__doc__, batch_size_is="rows")
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--only", nargs="+", choices=SETTINGS, default=SETTINGS, metavar="SETTING")
    args = parsed(parser)
    print(f"{machine()}\n{args.steps} steps of {args.batch_size} rows, {args.runs} runs in turns", flush=True)
    for name in args.methods:
        setting = prepare(args, name)
        print(f"\n{name}", flush=True)
        chosen = {variant: run for variant, run in variants(name).items() if variant in args.only}
        print(report(in_turns(setting, chosen, runs=args.runs), compared=COMPARED), flush=True)


if __name__ == "__main__":
    main()
