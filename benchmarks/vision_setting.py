"""What the comparisons on pictures train on: a small Qwen2.5-VL, and word problems with 0 to 2 pictures each.

Leaves out all measuring.
"""

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from setting import word_problem_pair

MOST_PICTURES = 2
SHORTEST_SIDE, LONGEST_SIDE = 56, 336
"""Sides of pictures in pixels, any number between them."""
SQUARE = 28
"""Side of the square in pixels that is one token: two patches by two."""
FEWEST_TOKENS, MOST_TOKENS = 4, 256
PATCH = 14
VOCABULARY = 4096
VISION_TOKENS = ("<|vision_start|>", "<|vision_end|>", "<|vision_pad|>", "<|image_pad|>", "<|video_pad|>")
TEXT = {"hidden_size": 256, "intermediate_size": 1408, "num_hidden_layers": 8, "num_attention_heads": 8}
TOWER = {"hidden_size": 160, "intermediate_size": 448, "depth": 6, "num_heads": 4, "out_hidden_size": 256}
"""A fifth of the parameters, as in Qwen2.5-VL-3B."""
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}{% for part in message['content'] %}"
    "{{ '<|vision_start|><|image_pad|><|vision_end|>' if part['type'] == 'image' else part['text'] }}"
    "{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def write_pictured_problems(folder: Path, *, num_rows: int, seed: int = 0) -> Path:
    """Write rows with the columns images, question, answer and mistaken, and their pictures beside them."""
    rng = random.Random(seed)
    (folder / "pictures").mkdir(parents=True, exist_ok=True)
    rows = [_pictured_problem(folder, number, rng) for number in range(num_rows)]
    path = folder / "pictured_problems.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def _pictured_problem(folder: Path, number: int, rng: random.Random) -> dict[str, Any]:
    problem = word_problem_pair(rng)
    names = [f"pictures/{number}_{place}.jpg" for place in range(rng.randint(0, MOST_PICTURES))]
    for name in names:
        if not (folder / name).exists():
            picture(rng.randint(0, 1 << 30)).save(folder / name, quality=90)
    return {"images": names, **problem, "question": "<image>" * len(names) + problem["question"]}


def picture(seed: int) -> Image.Image:
    """Return a picture of any size: a smooth ground with a few rectangles on it, and some noise as of a camera."""
    rng = np.random.default_rng(seed)
    height, width = rng.integers(SHORTEST_SIDE, LONGEST_SIDE + 1, 2)
    down, across = np.linspace(0, 1, height)[:, None, None], np.linspace(0, 1, width)[None, :, None]
    pixels = 255 * (rng.random(3) * down + rng.random(3) * across) / 2
    for _ in range(rng.integers(1, 6)):
        top, left = rng.integers(0, height), rng.integers(0, width)
        pixels[top : top + height // 4, left : left + width // 4] = rng.integers(0, 256, 3)
    pixels += rng.normal(0, 4, pixels.shape)
    return Image.fromarray(pixels.clip(0, 255).astype(np.uint8))


def make_vision_model(folder: Path, texts: list[str]) -> Path:
    """The small Qwen2.5-VL of 14M parameters, with tokenizer and image processor; one that is there is taken."""
    from rlhf_cli.models.folders import whole_folder

    path = folder / "small_vision_model"
    if not path.exists():
        tokenizer = _new_tokenizer(texts)
        with whole_folder(path) as written:
            _new_model(tokenizer).save_pretrained(written)
            tokenizer.save_pretrained(written)
            _image_processor().save_pretrained(written)
    return path


def _new_tokenizer(texts: list[str]) -> Any:
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


def _new_model(tokenizer: Any) -> Any:
    import torch
    from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

    def id_of(token: str) -> int:
        return int(tokenizer.convert_tokens_to_ids(token))

    torch.manual_seed(0)
    axes = {"rope_type": "default", "mrope_section": [4, 6, 6], "rope_theta": 10000.0}
    controls = {"bos_token_id": None, "eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    text = {**TEXT, **controls, "num_key_value_heads": 2, "vocab_size": VOCABULARY, "rope_parameters": axes}
    windows = {"window_size": 4 * SQUARE, "fullatt_block_indexes": [2, 5]}
    config = Qwen2_5_VLConfig(
        text_config={**text, "max_position_embeddings": 2048, "tie_word_embeddings": True},
        vision_config={**TOWER, **windows, "patch_size": PATCH, "spatial_merge_size": 2, "temporal_patch_size": 2},
        image_token_id=id_of("<|image_pad|>"),
        video_token_id=id_of("<|video_pad|>"),
        vision_start_token_id=id_of("<|vision_start|>"),
        vision_end_token_id=id_of("<|vision_end|>"),
        tie_word_embeddings=True,
    )
    return Qwen2_5_VLForConditionalGeneration(config).to(torch.bfloat16)


def _image_processor() -> Any:
    from transformers import Qwen2VLImageProcessorPil

    bounds = {"shortest_edge": FEWEST_TOKENS * SQUARE**2, "longest_edge": MOST_TOKENS * SQUARE**2}
    return Qwen2VLImageProcessorPil(patch_size=PATCH, merge_size=2, size=bounds)
