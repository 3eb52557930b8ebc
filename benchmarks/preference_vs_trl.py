"""`rlhf dpo`, `kto` and `rm` and TRL's trainers of these names on the same model, pairs and machine, in turns.

    python benchmarks/preference_vs_trl.py [--dataset FILE.jsonl] [--methods dpo kto rm] [--steps 12] [--runs 3]

Everything is as in sft_vs_trl.py: the 11M-parameter model, a process for each run, the same tokens in the same order
from the same weights with the same batch size, optimizer and schedule. `kto` takes twice as many responses in a step
as the others take pairs. Trained tokens are the tokens of the responses, of both sides of a pair.

A precomputed reference is not in the seconds of the steps, but its memory counts: no run finds another run's reference.
TRL 1.16 ignores padding_free for dpo, so there is no such setting here.

The mismatched responses by which kto measures its baseline differ, and so do the baselines: TRL shifts responses by one
within a micro-batch, `rlhf` takes a partner from far off that no batch size changes. Losses of kto are compared
in apo_zero_unpaired, which has no baseline.
"""

import argparse
import importlib.util
import json
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from comparison import Setting, Variant, comparison_parser, in_turns, install_trl, parsed, report, run_rlhf, run_trl
from setting import machine, make_small_model, word_problem_pair

LEARNING_RATE = 1e-4
BF16, FP32 = ["--param_dtype", "bf16"], ["--param_dtype", "fp32"]
UNPAIRED = "apo_zero_unpaired"


def usual_variants(method: str) -> dict[str, Variant]:
    """Both programs with all number types that they know."""
    rlhf, trl = partial(run_rlhf, command=method), partial(run_trl, trainer=method, max_length=None)
    return {
        "rlhf bf16": partial(rlhf, flags=BF16),
        "rlhf bf16 compiled": partial(rlhf, flags=[*BF16, "--compile_model"]),
        "rlhf fp32": partial(rlhf, flags=FP32),
        "rlhf fp32 compiled": partial(rlhf, flags=[*FP32, "--compile_model"]),
        "rlhf fp32 small packs": partial(rlhf, flags=[*FP32, "--train_max_tokens_per_gpu", "4096"]),
        "TRL fp32": partial(trl, dtype="float32", bf16=False),
        "TRL bf16 autocast": partial(trl, dtype="float32", bf16=True),
        "TRL bf16": partial(trl, dtype="bfloat16", bf16=False),
    }


def precomputed_variants(method: str) -> dict[str, Variant]:
    """Both programs with log-probabilities of the reference from before the first step."""
    trl = partial(run_trl, trainer=method, max_length=None, precompute_ref_log_probs=True)
    return {
        "rlhf bf16 precomputed": partial(run_rlhf, command=method, flags=[*BF16, "--precompute_ref_log_probs"]),
        "rlhf fp32 precomputed": partial(run_rlhf, command=method, flags=[*FP32, "--precompute_ref_log_probs"]),
        "TRL fp32 precomputed": partial(trl, dtype="float32", bf16=False),
        "TRL bf16 autocast precomputed": partial(trl, dtype="float32", bf16=True),
        "TRL bf16 precomputed": partial(trl, dtype="bfloat16", bf16=False),
    }


def unpaired_variants() -> dict[str, Variant]:
    """Both programs with the loss of kto that has no baseline."""
    trl = partial(run_trl, trainer="kto", max_length=None, loss_type=UNPAIRED)
    return {
        f"rlhf fp32 {UNPAIRED}": partial(run_rlhf, command="kto", flags=[*FP32, "--loss", UNPAIRED]),
        f"TRL fp32 {UNPAIRED}": partial(trl, dtype="float32", bf16=False),
    }


def pair_rows(setting: Setting, tokenizer: Any, seed: int) -> Iterator[dict[str, Any]]:
    """Tokenised pairs for DPOTrainer, in the order of the file."""
    for pair in _load("load_pairs", setting, tokenizer, seed).pairs:
        sides = {f"{name}_ids": _ids(getattr(pair, name)) for name in ("chosen", "rejected")}
        yield {"prompt_ids": pair.prompt_ids.tolist(), **sides}


def whole_pair_rows(setting: Setting, tokenizer: Any, seed: int) -> Iterator[dict[str, Any]]:
    """Tokenised pairs for RewardTrainer, each side with the prompt before it, in the order of the file."""
    for row in pair_rows(setting, tokenizer, seed):
        sides = {name: row["prompt_ids"] + row[name] for name in ("chosen_ids", "rejected_ids")}
        yield sides | {"trained": len(row["chosen_ids"]) + len(row["rejected_ids"])}


def response_rows(setting: Setting, tokenizer: Any, seed: int) -> Iterator[dict[str, Any]]:
    """Tokenised responses with their labels for KTOTrainer, in the order of the file."""
    for item in _load("load_labelled", setting, tokenizer, seed).items:
        ids = {"prompt_ids": item.prompt_ids.tolist(), "completion_ids": _ids(item.response)}
        yield ids | {"label": bool(item.desirable)}


def _load(function: str, setting: Setting, tokenizer: Any, seed: int) -> Any:
    from rlhf_cli.config.data import LabelledDataConfig, PreferenceDataConfig
    from rlhf_cli.data import preference_data

    dataset = str(setting.dataset)
    config = (LabelledDataConfig if function == "load_labelled" else PreferenceDataConfig)(dataset=dataset)
    return getattr(preference_data, function)(config, tokenizer, dataset=dataset, split="train", seed=seed)


def _ids(branch: Any) -> list[int]:
    if not branch.loss_mask.all():
        raise SystemExit("a response has tokens that `rlhf` does not train, and TRL does: there is nothing to compare")
    return branch.token_ids.tolist()


@dataclass(frozen=True)
class Method:
    """A way of learning from preferences: its variants, and its rows as TRL takes them.

    `rows_of_pair`: how many rows a pair gives. `compared` is as in `report`.
    """

    variants: dict[str, Variant]
    compared: dict[str, str]
    rows: Callable[[Setting, Any, int], Iterator[dict[str, Any]]]
    rows_of_pair: int = 1


COMPARED = dict.fromkeys(("rlhf bf16", "rlhf fp32", "TRL bf16 autocast", "TRL bf16"), "TRL fp32")
METHODS = {
    "dpo": Method(usual_variants("dpo") | precomputed_variants("dpo"), COMPARED, pair_rows),
    "kto": Method(
        usual_variants("kto") | precomputed_variants("kto") | unpaired_variants(),
        {f"rlhf fp32 {UNPAIRED}": f"TRL fp32 {UNPAIRED}"},
        response_rows,
        rows_of_pair=2,
    ),
    "rm": Method(usual_variants("rm"), COMPARED, whole_pair_rows),
}
SETTINGS = list(dict.fromkeys(name for method in METHODS.values() for name in method.variants))


def read_pairs(dataset: Path) -> list[dict[str, Any]]:
    """The pairs of a file of pairs, or of one of solutions that are marked right or wrong."""
    rows = [json.loads(line) for line in dataset.read_text(encoding="utf-8").splitlines()]
    if "chosen" in rows[0]:
        return rows
    path = Path(__file__).parents[1] / "examples" / "scripts" / "gsm8k_pairs.py"
    specification = importlib.util.spec_from_file_location(path.stem, path)
    assert specification is not None
    assert specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return [pair for row in rows for pair in module.pairs_of(row)]


def made_up_pairs(num_pairs: int) -> list[dict[str, str]]:
    """Word problems, the right answer against one with a mistake."""
    rng = random.Random(0)
    problems = [word_problem_pair(rng) for _ in range(num_pairs)]
    return [
        {"prompt": found["question"], "chosen": found["answer"], "rejected": found["mistaken"]} for found in problems
    ]


def write_pairs(path: Path, pairs: list[dict[str, Any]], num_pairs: int) -> Path:
    """A jsonl file with so many of the pairs, chosen by chance: a precomputed reference is asked about all of them."""
    if len(pairs) < num_pairs:
        raise SystemExit(f"{len(pairs)} pairs are too few: the steps take {num_pairs}")
    taken = random.Random(0).sample(pairs, num_pairs)
    path.write_text("".join(json.dumps(pair) + "\n" for pair in taken), encoding="utf-8")
    return path


def make_reward_model(model: Path) -> Path:
    """The model with a scalar head instead of its own, so that both programs begin with the same one."""
    from transformers.utils import logging

    from rlhf_cli.config.model import ModelConfig
    from rlhf_cli.models.loading import load_value_backbone
    from rlhf_cli.models.tokenizers import load_tokenizer

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    folder = model.with_name(f"{model.name}_scored")
    if not folder.exists():
        config = ModelConfig(pretrain=str(model), param_dtype="fp32")
        load_value_backbone(config).save_pretrained(folder)
        load_tokenizer(config).save_pretrained(folder)
    return folder


def prepare(args: argparse.Namespace) -> Setting:
    """Everything that does not depend on the method, in the folder."""
    folder: Path = args.folder
    folder.mkdir(parents=True, exist_ok=True)
    install_trl(folder)
    num_pairs = args.steps * args.batch_size
    pairs = read_pairs(args.dataset) if args.dataset else made_up_pairs(max(4000, num_pairs))
    texts = write_pairs(folder / "pair_texts.jsonl", pairs, len(pairs))
    return Setting(
        folder=folder,
        dataset=write_pairs(folder / "pairs.jsonl", pairs, num_pairs),
        tokenised=folder / "tokenised_pairs.jsonl",
        model=make_small_model(folder, texts, name="small_model_of_pairs"),
        steps=args.steps,
        batch_size=args.batch_size,
        trl_micro_batch=args.trl_micro_batch,
        learning_rate=LEARNING_RATE,
    )


def setting_of(method: Method, common: Setting, *, is_scored: bool) -> Setting:
    """What both programs are given for a method, and its tokenised rows."""
    from rlhf_cli.config.model import ModelConfig
    from rlhf_cli.models.tokenizers import load_tokenizer

    setting = replace(
        common,
        model=make_reward_model(common.model) if is_scored else common.model,
        batch_size=common.batch_size * method.rows_of_pair,
        trl_micro_batch=common.trl_micro_batch * method.rows_of_pair,
    )
    write_tokenised(setting, method, load_tokenizer(ModelConfig(pretrain=str(setting.model))))
    return setting


def write_tokenised(setting: Setting, method: Method, tokenizer: Any) -> None:
    """The rows of all steps as `rlhf` tokenises them, in the order in which it takes them."""
    from rlhf_cli.config.train import BatchConfig
    from rlhf_cli.data.sampling import StepBatches

    seed = BatchConfig().seed
    rows = list(method.rows(setting, tokenizer, seed))
    order = StepBatches(len(rows), batch_size=setting.batch_size, epochs=1, seed=seed)
    with setting.tokenised.open("w") as lines:
        lines.writelines(json.dumps(rows[int(number)]) + "\n" for indices in order for number in indices)


def main() -> None:
    parser = comparison_parser(__doc__, batch_size_is="pairs")
    parser.add_argument(
        "--dataset", type=Path, help="jsonl of pairs, or of GSM8K's marked solutions; made up if absent"
    )
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--only", nargs="+", choices=SETTINGS, default=SETTINGS, metavar="SETTING")
    args = parsed(parser)
    common = prepare(args)
    print(f"{machine()}\n{args.steps} steps of {args.batch_size} pairs, {args.runs} runs in turns", flush=True)
    for name in args.methods:
        print(f"\n{name}", flush=True)
        method = METHODS[name]
        variants = {chosen: variant for chosen, variant in method.variants.items() if chosen in args.only}
        results = in_turns(setting_of(method, common, is_scored=name == "rm"), variants, runs=args.runs)
        print(report(results, compared=method.compared), flush=True)


if __name__ == "__main__":
    main()
