"""Data and models for vs_trl.py: rows as tokenised by `rlhf`, and small models to train."""

import argparse
import importlib.util
import json
import random
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from common import make_model, rlhf, run_quietly, word_problem, write_rows, write_word_problems
from PIL import Image
from trl_task import PLACES, STEPS, Trail

from rlhf_cli.config.data import DataConfig, LabelledDataConfig, PreferenceDataConfig, PromptConfig
from rlhf_cli.config.model import ModelConfig
from rlhf_cli.config.pictures import PicturesConfig
from rlhf_cli.config.train import BatchConfig
from rlhf_cli.models.tokenizers import load_tokenizer

Row = dict[str, Any]
SEED = BatchConfig().seed
MAX_LEN, MAX_NEW_TOKENS = 512, 128
"""Limits of grpo."""
TURN_TOKENS, EPISODE_MAX_LEN = 64, 1024
"""Limits of episodes."""
NUM_DEMONSTRATIONS = 1500
VISION_KEYS = {"input_key": "question", "chosen_key": "answer", "rejected_key": "mistaken"}
MAX_IMAGES = 2
NUM_PICTURED = 1000
"""Minimum number of rows with images."""
SHORTEST_SIDE, LONGEST_SIDE = 56, 336
"""Minimum and maximum image side in pixels."""
PATCH, TOKEN_SIDE = 14, 28
"""Side in pixels of a patch, and of the 2 x 2 patches per token."""
VOCABULARY = 4096
VISION_TOKENS = ("<|vision_start|>", "<|vision_end|>", "<|vision_pad|>", "<|image_pad|>", "<|video_pad|>")
TEXT = {"hidden_size": 256, "intermediate_size": 1408, "num_hidden_layers": 8, "num_attention_heads": 8}
VISION = {"hidden_size": 160, "intermediate_size": 448, "depth": 6, "num_heads": 4, "out_hidden_size": 256}
"""A fifth of the parameters, as in Qwen2.5-VL-3B."""
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}{% for part in message['content'] %}"
    "{{ '<|vision_start|><|image_pad|><|vision_end|>' if part['type'] == 'image' else part['text'] }}"
    "{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def refuse(reason: str) -> SystemExit:
    """Return the exception for a comparison with different tokens."""
    return SystemExit(f"{reason}: the programs would not train the same tokens")


# TRL rows, in the order of the data file.


def sft_rows(model: Path, dataset: Path) -> Iterator[Row]:
    """Rows for SFTTrainer."""
    from rlhf_cli.data.sft_data import SEQUENCES

    for sequence in _load(SEQUENCES.load, DataConfig, model, dataset).items:
        yield {"input_ids": sequence.token_ids.tolist(), "completion_mask": sequence.loss_mask.astype(int).tolist()}


def dpo_rows(model: Path, dataset: Path) -> Iterator[Row]:
    """Rows for DPOTrainer."""
    from rlhf_cli.data.preference_data import PAIRS

    for pair in _load(PAIRS.load, PreferenceDataConfig, model, dataset).items:
        sides = {"chosen_ids": response_ids(pair.chosen), "rejected_ids": response_ids(pair.rejected)}
        yield {"prompt_ids": pair.prompt_ids.tolist(), **sides, "trained": sum(map(len, sides.values()))}


def rm_rows(model: Path, dataset: Path) -> Iterator[Row]:
    """Rows for RewardTrainer: both sides with their prompt."""
    for row in dpo_rows(model, dataset):
        sides = {name: row["prompt_ids"] + row[name] for name in ("chosen_ids", "rejected_ids")}
        yield {**sides, "trained": row["trained"]}


def kto_rows(model: Path, dataset: Path) -> Iterator[Row]:
    """Rows for KTOTrainer: two labelled responses per pair."""
    from rlhf_cli.data.preference_data import RESPONSES

    for item in _load(RESPONSES.load, LabelledDataConfig, model, dataset).items:
        ids = response_ids(item.response)
        prompt_ids, label = item.prompt_ids.tolist(), bool(item.desirable)
        yield {"prompt_ids": prompt_ids, "completion_ids": ids, "label": label, "trained": len(ids)}


def vision_sft_rows(model: Path, dataset: Path) -> Iterator[Row]:
    """Prompts and completions as text, and images, for SFTTrainer."""
    from rlhf_cli.data.sft_data import SEQUENCES

    data, tokenizer = _load(SEQUENCES.load, DataConfig, model, dataset, images=True), _tokenizer(model)
    for sequence, paths in zip(data.items, image_paths(dataset), strict=True):
        trained = np.flatnonzero(sequence.loss_mask)
        start, stop = int(trained[0]), int(trained[-1]) + 1  # the template's newline at the end is not trained
        if trained.size != stop - start:
            raise refuse("`rlhf` trains separate parts of a row")
        prompt = exact_text(tokenizer, sequence.token_ids[:start], sequence.pictures)
        completion = exact_text(tokenizer, sequence.token_ids[start:stop])
        yield {"images": paths, "prompt": prompt, "completion": completion, "trained": stop - start}


def vision_dpo_rows(model: Path, dataset: Path) -> Iterator[Row]:
    """Prompts and both sides as text, and images, for DPOTrainer."""
    from rlhf_cli.data.preference_data import PAIRS

    config, tokenizer = partial(PreferenceDataConfig, **VISION_KEYS), _tokenizer(model)
    data = _load(PAIRS.load, config, model, dataset, images=True)
    for pair, paths in zip(data.items, image_paths(dataset), strict=True):
        sides = {"chosen": pair.chosen.token_ids, "rejected": pair.rejected.token_ids}
        text = {name: exact_text(tokenizer, token_ids) for name, token_ids in sides.items()}
        prompt = exact_text(tokenizer, pair.prompt_ids, pair.pictures)
        yield {"images": paths, "prompt": prompt, **text, "trained": sum(map(len, sides.values()))}


def grpo_rows(model: Path, dataset: Path, *, responses: int) -> Iterator[Row]:
    """Rendered prompts for GRPOTrainer."""
    from rlhf_cli.data.prompts import load_prompts

    tokenizer = _tokenizer(model)
    config = PromptConfig(prompt_data=str(dataset), max_len=MAX_LEN)
    for prompt in load_prompts(config, tokenizer, max_new_tokens=MAX_NEW_TOKENS, seed=SEED).prompts:
        if tokenizer(prompt.text)["input_ids"] != list(prompt.prompt_ids):
            raise refuse(f"TRL tokenises the prompt {prompt.text!r} otherwise")
        yield {"prompt": prompt.text, "trained": responses}


def episode_rows(model: Path, dataset: Path, *, responses: int) -> Iterator[Row]:
    """Messages with the starting place, for GRPOTrainer."""
    yield from (row | {"trained": responses} for row in map(json.loads, dataset.read_text().splitlines()))


def in_step_order(path: Path, rows: Iterable[Row], *, rows_per_step: int, steps: int) -> Path:
    """Write the rows for all steps and one more, in the order in which `rlhf` trains them."""
    from rlhf_cli.data.sampling import StepBatches

    found = list(rows)
    order = StepBatches(len(found), batch_size=rows_per_step, epochs=1, seed=SEED)
    if len(order) < steps:
        raise SystemExit(f"{len(found)} rows are too few for {steps} steps")
    return write_rows(path, (found[int(number)] for indices in order[: steps + 1] for number in indices))


def _tokenizer(model: Path) -> Any:
    return load_tokenizer(ModelConfig(pretrain=str(model)))


def _load(
    load: Callable[..., Any], config: Callable[..., Any], model: Path, dataset: Path, images: bool = False
) -> Any:
    """Load a data set as the training commands do."""
    tokenizer, path = _tokenizer(model), str(dataset)
    options = {"reader": _image_reader(model, tokenizer)} if images else {}
    return load(config(dataset=path), tokenizer, dataset=path, split="train", seed=SEED, **options)


def _image_reader(model: Path, tokenizer: Any) -> Any:
    from transformers import AutoConfig

    from rlhf_cli.data.pictures.reading import PictureReader
    from rlhf_cli.models.vision.families.table import find_family

    family = find_family(str(model), AutoConfig.from_pretrained(model), tokenizer)
    assert family is not None
    return PictureReader(family, PicturesConfig())


def response_ids(branch: Any) -> list[int]:
    """Return response tokens, all of which must be trained."""
    if not branch.loss_mask.all():
        raise refuse("`rlhf` masks tokens of a response")
    ids: list[int] = branch.token_ids.tolist()
    return ids


def exact_text(tokenizer: Any, token_ids: Sequence[int], images: Sequence[Any] = ()) -> str:
    """Return text that encodes to exactly these tokens, with one placeholder per image."""
    from rlhf_cli.models.vision.pictures import unexpanded

    short = unexpanded([int(token) for token in token_ids], tuple(images))
    text: str = tokenizer.decode(short)
    if tokenizer(text, add_special_tokens=False)["input_ids"] != short:
        raise refuse(f"the text {text!r} has other tokens")
    return text


def image_paths(dataset: Path) -> list[list[str]]:
    """Return image paths by row."""
    rows = map(json.loads, dataset.read_text(encoding="utf-8").splitlines())
    return [[str(dataset.parent / name) for name in row["images"]] for row in rows]


# Data sets and models.


def inputs(name: str, args: argparse.Namespace, *, num_rows: int, unit: str) -> tuple[Path, Path]:
    """Return the data set, with at least `num_rows` rows, and the model for a method."""
    from rlhf_cli.models.finding import resolve_model_path

    folder: Path = args.folder
    if name == "episodes":
        rng = random.Random(2)
        prompts = write_rows(folder / "trails.jsonl", [trail_prompt(rng) for _ in range(num_rows)])
        return prompts, make_trail_model(folder)
    if "vision" in name:
        problems = write_vision_problems(folder, num_rows=max(NUM_PICTURED, num_rows))
        return problems, make_vision_model(folder, problems)
    given = None if args.model is None else Path(resolve_model_path(args.model))
    if unit != "pairs":
        dataset = args.dataset or write_word_problems(folder / "rows.jsonl")
        return dataset, given or make_model(folder, dataset)
    pairs = read_pairs(args.dataset) if args.dataset else synthetic_pairs(max(4000, num_rows))
    text = write_rows(folder / "pair_text.jsonl", pairs)
    model = given or make_model(folder, text, name="small_model_of_pairs")
    dataset = write_rows(folder / "pairs.jsonl", sample_pairs(pairs, num_rows))
    return dataset, make_reward_model(folder, model) if name == "rm" else model


def read_pairs(dataset: Path) -> list[Row]:
    """Return pairs from a preference file, or from solutions marked right or wrong."""
    rows = [json.loads(line) for line in dataset.read_text(encoding="utf-8").splitlines()]
    if "chosen" in rows[0]:
        return rows
    path = Path(__file__).parents[1] / "examples" / "gsm8k" / "pairs.py"
    specification = importlib.util.spec_from_file_location(path.stem, path)
    assert specification is not None
    assert specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return [pair for row in rows for pair in module.pairs_of(row)]


def synthetic_pairs(num_pairs: int) -> list[Row]:
    """Return word problems with a right and a wrong solution."""
    rng = random.Random(0)
    columns = {"prompt": "question", "chosen": "answer", "rejected": "mistaken"}
    problems = [word_problem(rng) for _ in range(num_pairs)]
    return [{name: problem[column] for name, column in columns.items()} for problem in problems]


def sample_pairs(pairs: list[Row], num_pairs: int) -> list[Row]:
    """Return random pairs: a precomputed reference is evaluated on the full file."""
    if len(pairs) < num_pairs:
        raise SystemExit(f"{len(pairs)} pairs are too few: the steps take {num_pairs}")
    return random.Random(0).sample(pairs, num_pairs)


def make_reward_model(folder: Path, model: Path) -> Path:
    """Add a scalar head to the model, so that both tools start with the same weights."""
    from transformers.utils import logging

    from rlhf_cli.models.loading import load_value_backbone

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    scored = folder / f"{model.name}_scored"
    if not scored.exists():
        config = ModelConfig(pretrain=str(model), param_dtype="fp32")
        load_value_backbone(config).save_pretrained(scored)
        load_tokenizer(config).save_pretrained(scored)
    return scored


def trail_prompt(rng: random.Random) -> Row:
    """Return a question about the trail, and the starting place."""
    start = rng.choice(PLACES)
    text = f"Start at the {start} and follow the trail for {STEPS} steps. Number {rng.randint(0, 99999)}."
    return {"prompt": [{"role": "user", "content": text}], "start": start}


def demonstration(rng: random.Random, tools: Sequence[Row]) -> Row:
    """Return an episode that follows the trail, as a training conversation."""
    prompt, trail = trail_prompt(rng), Trail()
    place, messages = prompt["start"], prompt["prompt"]
    trail.reset(place)
    for _ in range(STEPS):
        call = {"type": "function", "function": {"name": "look", "arguments": {"place": place}}}
        result = trail.look(place)
        messages.append({"role": "assistant", "content": "", "tool_calls": [call]})
        messages.append({"role": "tool", "name": "look", "content": result})
        place = result.removesuffix(".").split()[-1]
    return {"messages": [*messages, {"role": "assistant", "content": f"The {place}."}], "tools": list(tools)}


def make_trail_model(folder: Path) -> Path:
    """Train the small model to follow the trail, unless it exists."""
    from transformers import AutoTokenizer
    from transformers.utils import get_json_schema

    model = folder / "trail_model"
    if model.exists():
        return model
    rng = random.Random(1)
    tools = [get_json_schema(Trail().look)]
    demonstrations = [demonstration(rng, tools) for _ in range(NUM_DEMONSTRATIONS)]
    text = ({"question": row["messages"][0]["content"], "answer": json.dumps(row)} for row in demonstrations)
    base = make_model(folder, write_rows(folder / "trail_text.jsonl", text), name="trail_base")
    tokenizer = AutoTokenizer.from_pretrained(base)
    template = folder / "trl" / "trl" / "chat_templates" / "qwen2_5.jinja"
    tokenizer.chat_template = template.read_text(encoding="utf-8")
    tokenizer.save_pretrained(base)
    dataset, output = write_rows(folder / "demonstrations.jsonl", demonstrations), folder / "trail_sft"
    settings = {"pretrain": base, "dataset": dataset, "output": output, "overwrite": True, "train_batch_size": 32}
    settings |= {"max_epochs": 2, "max_len": EPISODE_MAX_LEN, "learning_rate": 2e-3}
    run_quietly(rlhf("sft", settings), log=folder / "sft.log")
    shutil.move(output / "model", model)
    return model


def write_vision_problems(folder: Path, *, num_rows: int) -> Path:
    """Write word problems with 0 to 2 images each, and the images."""
    rng = random.Random(0)
    (folder / "images").mkdir(parents=True, exist_ok=True)
    return write_rows(folder / "vision_problems.jsonl", [_vision_problem(folder, n, rng) for n in range(num_rows)])


def _vision_problem(folder: Path, number: int, rng: random.Random) -> Row:
    problem = word_problem(rng)
    names = [f"images/{number}_{place}.jpg" for place in range(rng.randint(0, MAX_IMAGES))]
    for name in names:
        synthetic_image(rng.randint(0, 1 << 30)).save(folder / name, quality=90)
    return {"images": names, **problem, "question": "<image>" * len(names) + problem["question"]}


def synthetic_image(seed: int) -> Image.Image:
    """Return a random-size image: a gradient with a few rectangles and camera noise."""
    rng = np.random.default_rng(seed)
    height, width = rng.integers(SHORTEST_SIDE, LONGEST_SIDE + 1, 2)
    down, across = np.linspace(0, 1, height)[:, None, None], np.linspace(0, 1, width)[None, :, None]
    pixels = 255 * (rng.random(3) * down + rng.random(3) * across) / 2
    for _ in range(rng.integers(1, 6)):
        top, left = rng.integers(0, height), rng.integers(0, width)
        pixels[top : top + height // 4, left : left + width // 4] = rng.integers(0, 256, 3)
    pixels += rng.normal(0, 4, pixels.shape)
    return Image.fromarray(pixels.clip(0, 255).astype(np.uint8))


def make_vision_model(folder: Path, dataset: Path) -> Path:
    """Create a 14M-parameter Qwen2.5-VL with tokenizer and image processor, unless it exists."""
    from rlhf_cli.models.folders import whole_folder

    path = folder / "small_vision_model"
    if not path.exists():
        rows = map(json.loads, dataset.read_text(encoding="utf-8").splitlines())
        tokenizer = _vision_tokenizer([text for row in rows for text in row.values() if isinstance(text, str)])
        with whole_folder(path) as written:
            _vision_model(tokenizer).save_pretrained(written)
            tokenizer.save_pretrained(written)
            _image_processor().save_pretrained(written)
    return path


def _vision_tokenizer(texts: list[str]) -> Any:
    from transformers import PreTrainedTokenizerFast

    from rlhf_cli.models.scratch import END_OF_TEXT, END_OF_TURN, train_tokenizer

    core = train_tokenizer(texts, vocab_size=VOCABULARY - len(VISION_TOKENS)).backend_tokenizer
    core.add_special_tokens(list(VISION_TOKENS))
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        eos_token=END_OF_TURN,
        pad_token=END_OF_TEXT,
        extra_special_tokens={"image_token": "<|image_pad|>", "video_token": "<|video_pad|>"},
        chat_template=TEMPLATE,
    )


def _vision_model(tokenizer: Any) -> Any:
    import torch
    from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

    def id_of(token: str) -> int:
        return int(tokenizer.convert_tokens_to_ids(token))

    torch.manual_seed(0)
    axes = {"rope_type": "default", "mrope_section": [4, 6, 6], "rope_theta": 10000.0}
    controls = {"bos_token_id": None, "eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    text = {**TEXT, **controls, "num_key_value_heads": 2, "vocab_size": VOCABULARY, "rope_parameters": axes}
    windows = {"window_size": 4 * TOKEN_SIDE, "fullatt_block_indexes": [2, 5]}
    config = Qwen2_5_VLConfig(
        text_config={**text, "max_position_embeddings": 2048, "tie_word_embeddings": True},
        vision_config={**VISION, **windows, "patch_size": PATCH, "spatial_merge_size": 2, "temporal_patch_size": 2},
        image_token_id=id_of("<|image_pad|>"),
        video_token_id=id_of("<|video_pad|>"),
        vision_start_token_id=id_of("<|vision_start|>"),
        vision_end_token_id=id_of("<|vision_end|>"),
        tie_word_embeddings=True,
    )
    return Qwen2_5_VLForConditionalGeneration(config).to(torch.bfloat16)


def _image_processor() -> Any:
    from transformers import Qwen2VLImageProcessorPil

    bounds = {"shortest_edge": 4 * TOKEN_SIDE**2, "longest_edge": 256 * TOKEN_SIDE**2}
    return Qwen2VLImageProcessorPil(patch_size=PATCH, merge_size=2, size=bounds)
