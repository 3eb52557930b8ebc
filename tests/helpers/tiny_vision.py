"""Tiny random vision-language models in Hub format: weights, tokenizer, processor.

Heads have 32 elements, the minimum for vLLM on a CPU. Text is tokenized to bytes.
"""

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoConfig,
    AutoModelForImageTextToText,
    CLIPImageProcessorPil,
    Idefics3Config,
    Idefics3ForConditionalGeneration,
    Idefics3ImageProcessorPil,
    Idefics3Processor,
    LlavaConfig,
    LlavaForConditionalGeneration,
    LlavaProcessor,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2VLImageProcessorPil,
    Qwen3_5Config,
    Qwen3_5ForConditionalGeneration,
    Qwen3_5MoeConfig,
    Qwen3_5MoeForConditionalGeneration,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
    SmolVLMConfig,
    SmolVLMForConditionalGeneration,
    SmolVLMImageProcessorPil,
)

HIDDEN = 64
PATCH = 14
"""Patch side; two by two patches are one feature in most vision encoders."""
SIDE = 56
"""Image side for Idefics3 and LLaVA."""
QWEN_BOUNDS = {"shortest_edge": 28 * 28, "longest_edge": 16 * 28 * 28}
"""Minimum and maximum pixels of a Qwen-VL image: 1 to 16 features."""

CONTROL_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
QWEN_TOKENS = ["<|vision_start|>", "<|vision_end|>", "<|vision_pad|>", "<|image_pad|>", "<|video_pad|>"]
IDEFICS_TOKENS = ["<image>", "<fake_token_around_image>", "<global-img>", "<end_of_utterance>"]
ROW_COLUMN_TOKENS = [f"<row_{row}_col_{column}>" for row in range(1, 7) for column in range(1, 7)]

TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}PICTURE{% elif part['type'] == 'text' %}{{ part['text'] }}{% endif %}"
    "{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""ChatML with messages as text or parts; PICTURE stands for a family's image markers."""


@dataclass(frozen=True)
class TinyFamily:
    """A tiny family: image markers in the chat template, placeholder, and how to create a folder."""

    marks: str
    placeholder: str
    build: Callable[[PreTrainedTokenizerFast], PreTrainedModel]
    save_processor: Callable[[PreTrainedTokenizerFast, Path, bool], None]
    tokens: tuple[str, ...]
    named_tokens: dict[str, str]


def save_tiny_vision(kind: str, folder: Path, *, seed: int = 0, splits: bool = False) -> Path:
    """Save a model of a kind in `TINY_FAMILIES`. Returns the folder.

    With `splits`, Idefics3 splits large images into squares in addition to the full image.
    """
    family = TINY_FAMILIES[kind]
    tokenizer = tiny_tokenizer(family)
    torch.manual_seed(seed)
    family.build(tokenizer).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    family.save_processor(tokenizer, folder, splits)
    return folder


def save_larger_vision(source: Path, folder: Path, *, seed: int = 1) -> Path:
    """Save a model with a larger language model for the same tokens and images as in `source`."""
    shutil.copytree(source, folder)
    config = AutoConfig.from_pretrained(source)
    config.text_config.update({"hidden_size": 96, "num_attention_heads": 3, "num_hidden_layers": 3})
    if getattr(config.text_config, "layer_types", None):
        config.text_config.layer_types = ["full_attention"] * 3
    if hasattr(config.vision_config, "out_hidden_size"):
        config.vision_config.out_hidden_size = 96
    torch.manual_seed(seed)
    AutoModelForImageTextToText.from_config(config).save_pretrained(folder)
    return folder


def random_picture(height: int, width: int, *, seed: int = 0) -> np.ndarray:
    """Return random pixels, uint8 [height, width, 3]."""
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)


def tiny_tokenizer(family: TinyFamily) -> PreTrainedTokenizerFast:
    """Return a byte tokenizer with the family's control tokens and chat template."""
    vocabulary = {character: place for place, character in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    core = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens([*CONTROL_TOKENS, *family.tokens])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        extra_special_tokens=family.named_tokens,
    )
    tokenizer.chat_template = TEMPLATE.replace("PICTURE", family.marks)
    return tokenizer


def _text(tokenizer: PreTrainedTokenizerFast, **others: Any) -> dict[str, Any]:
    """Return the settings of a small text model with one key head."""
    return {
        "vocab_size": len(tokenizer),
        "hidden_size": HIDDEN,
        "intermediate_size": 2 * HIDDEN,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 32,
        "max_position_embeddings": 2048,
        "tie_word_embeddings": False,
        "bos_token_id": tokenizer.pad_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
        **others,
    }


def _tower(**others: Any) -> dict[str, Any]:
    """Return the settings of a small vision encoder for images of `SIDE` pixels."""
    return {
        "hidden_size": HIDDEN,
        "intermediate_size": 2 * HIDDEN,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "image_size": SIDE,
        "patch_size": PATCH,
        **others,
    }


def _qwen_ids(tokenizer: PreTrainedTokenizerFast) -> dict[str, int]:
    names = {
        "image_token_id": "<|image_pad|>",
        "video_token_id": "<|video_pad|>",
        "vision_start_token_id": "<|vision_start|>",
        "vision_end_token_id": "<|vision_end|>",
    }
    return {name: tokenizer.convert_tokens_to_ids(token) for name, token in names.items()}


def _qwen_tower(**others: Any) -> dict[str, Any]:
    return {
        "depth": 2,
        "hidden_size": HIDDEN,
        "intermediate_size": 2 * HIDDEN,
        "num_heads": 2,
        "out_hidden_size": HIDDEN,
        "patch_size": PATCH,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        **others,
    }


def _qwen2_5_vl(tokenizer: PreTrainedTokenizerFast) -> PreTrainedModel:
    axes = {"rope_type": "default", "mrope_section": [4, 6, 6], "rope_theta": 10000.0}
    config = Qwen2_5_VLConfig(
        text_config=_text(tokenizer, rope_parameters=axes),
        vision_config=_qwen_tower(window_size=112, fullatt_block_indexes=[1]),
        tie_word_embeddings=False,
        **_qwen_ids(tokenizer),
    )
    return Qwen2_5_VLForConditionalGeneration(config)


def _qwen3_vl(tokenizer: PreTrainedTokenizerFast) -> PreTrainedModel:
    axes = {"rope_type": "default", "mrope_section": [6, 5, 5], "mrope_interleaved": True, "rope_theta": 10000.0}
    config = Qwen3VLConfig(
        text_config=_text(tokenizer, num_hidden_layers=3, rope_parameters=axes, tie_word_embeddings=True),
        vision_config=_qwen_tower(num_position_embeddings=64, deepstack_visual_indexes=[0]),
        tie_word_embeddings=True,
        **_qwen_ids(tokenizer),
    )
    return Qwen3VLForConditionalGeneration(config)


def _qwen3_5(tokenizer: PreTrainedTokenizerFast) -> PreTrainedModel:
    return Qwen3_5ForConditionalGeneration(Qwen3_5Config(**_qwen3_5_settings(tokenizer)))


def _qwen3_5_moe(tokenizer: PreTrainedTokenizerFast) -> PreTrainedModel:
    experts = {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": HIDDEN,
        "shared_expert_intermediate_size": HIDDEN,
    }
    return Qwen3_5MoeForConditionalGeneration(Qwen3_5MoeConfig(**_qwen3_5_settings(tokenizer, **experts)))


def _qwen3_5_settings(tokenizer: PreTrainedTokenizerFast, **others: Any) -> dict[str, Any]:
    """Return two gated delta nets and one attention layer, which rotates a quarter of its heads."""
    axes = {
        "rope_type": "default",
        "mrope_section": [2, 1, 1],
        "mrope_interleaved": True,
        "rope_theta": 10000.0,
        "partial_rotary_factor": 0.25,
    }
    layers = {
        "num_hidden_layers": 3,
        "layer_types": ["linear_attention", "linear_attention", "full_attention"],
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
    }
    return {
        "text_config": _text(tokenizer, rope_parameters=axes, **layers, **others),
        "vision_config": _qwen_tower(num_position_embeddings=64),
        "tie_word_embeddings": False,
        **_qwen_ids(tokenizer),
    }


def _idefics3(tokenizer: PreTrainedTokenizerFast) -> PreTrainedModel:
    return Idefics3ForConditionalGeneration(Idefics3Config(**_idefics3_settings(tokenizer)))


def _smolvlm(tokenizer: PreTrainedTokenizerFast) -> PreTrainedModel:
    return SmolVLMForConditionalGeneration(SmolVLMConfig(**_idefics3_settings(tokenizer)))


def _idefics3_settings(tokenizer: PreTrainedTokenizerFast) -> dict[str, Any]:
    return {
        "text_config": _text(tokenizer, model_type="llama"),
        "vision_config": _tower(),
        "image_token_id": tokenizer.convert_tokens_to_ids("<image>"),
        "scale_factor": 2,
        "pad_token_id": tokenizer.pad_token_id,
        "tie_word_embeddings": False,
    }


def _llava(tokenizer: PreTrainedTokenizerFast) -> PreTrainedModel:
    config = LlavaConfig(
        text_config=_text(tokenizer, model_type="qwen2"),
        vision_config=_tower(model_type="clip_vision_model", projection_dim=HIDDEN),
        image_token_id=tokenizer.convert_tokens_to_ids("<image>"),
        vision_feature_layer=-2,
        vision_feature_select_strategy="default",
        image_seq_length=(SIDE // PATCH) ** 2,
        tie_word_embeddings=False,
    )
    return LlavaForConditionalGeneration(config)


def _save_qwen_processor(tokenizer: PreTrainedTokenizerFast, folder: Path, splits: bool) -> None:
    """Save only the image processor: the full processor requires torchvision for videos."""
    Qwen2VLImageProcessorPil(patch_size=PATCH, merge_size=2, size=QWEN_BOUNDS).save_pretrained(folder)


def _squares(splits: bool) -> dict[str, Any]:
    return {
        "size": {"longest_edge": 4 * SIDE if splits else SIDE},
        "max_image_size": {"longest_edge": SIDE},
        "do_image_splitting": splits,
    }


def _save_smolvlm_processor(tokenizer: PreTrainedTokenizerFast, folder: Path, splits: bool) -> None:
    """Save only the image processor: the full processor requires torchvision and num2words for videos."""
    SmolVLMImageProcessorPil(**_squares(splits)).save_pretrained(folder)


def _save_idefics3_processor(tokenizer: PreTrainedTokenizerFast, folder: Path, splits: bool) -> None:
    Idefics3Processor(
        image_processor=Idefics3ImageProcessorPil(**_squares(splits)),
        tokenizer=tokenizer,
        chat_template=tokenizer.chat_template,
        image_seq_len=(SIDE // PATCH // 2) ** 2,
    ).save_pretrained(folder)


def _save_llava_processor(tokenizer: PreTrainedTokenizerFast, folder: Path, splits: bool) -> None:
    image_processor = CLIPImageProcessorPil(size={"shortest_edge": SIDE}, crop_size={"height": SIDE, "width": SIDE})
    LlavaProcessor(
        image_processor=image_processor,
        tokenizer=tokenizer,
        chat_template=tokenizer.chat_template,
        patch_size=PATCH,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
    ).save_pretrained(folder)


_QWEN_MARKS = "<|vision_start|><|image_pad|><|vision_end|>"
_QWEN_NAMES = {"image_token": "<|image_pad|>", "video_token": "<|video_pad|>"}
TINY_FAMILIES: dict[str, TinyFamily] = {
    "qwen2_5_vl": TinyFamily(
        _QWEN_MARKS, "<|image_pad|>", _qwen2_5_vl, _save_qwen_processor, tuple(QWEN_TOKENS), _QWEN_NAMES
    ),
    "qwen3_vl": TinyFamily(
        _QWEN_MARKS, "<|image_pad|>", _qwen3_vl, _save_qwen_processor, tuple(QWEN_TOKENS), _QWEN_NAMES
    ),
    "qwen3_5": TinyFamily(
        _QWEN_MARKS, "<|image_pad|>", _qwen3_5, _save_qwen_processor, tuple(QWEN_TOKENS), _QWEN_NAMES
    ),
    "qwen3_5_moe": TinyFamily(
        _QWEN_MARKS, "<|image_pad|>", _qwen3_5_moe, _save_qwen_processor, tuple(QWEN_TOKENS), _QWEN_NAMES
    ),
    "idefics3": TinyFamily(
        "<image>",
        "<image>",
        _idefics3,
        _save_idefics3_processor,
        (*IDEFICS_TOKENS, *ROW_COLUMN_TOKENS),
        {"image_token": "<image>"},
    ),
    "smolvlm": TinyFamily(
        "<image>",
        "<image>",
        _smolvlm,
        _save_smolvlm_processor,
        (*IDEFICS_TOKENS, *ROW_COLUMN_TOKENS),
        {"image_token": "<image>"},
    ),
    "llava": TinyFamily("<image>", "<image>", _llava, _save_llava_processor, ("<image>",), {"image_token": "<image>"}),
}
"""Families by `model_type`."""
