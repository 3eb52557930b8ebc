"""A tiny random Gemma 3 with a vision encoder, which reads only text here, in Hub format."""

from pathlib import Path

import torch
from tiny_vision import HIDDEN, PATCH, SIDE, TinyFamily, tiny_tokenizer
from transformers import (
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    Gemma3ImageProcessorPil,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

_TOKENS = {"image_token": "<image_soft_token>", "boi_token": "<start_of_image>", "eoi_token": "<end_of_image>"}


def save_tiny_gemma3(folder: Path, *, seed: int = 0) -> Path:
    """Save the model, with tied embeddings and a local layer. Returns the folder."""
    tokenizer = tiny_tokenizer(GEMMA3)
    torch.manual_seed(seed)
    _build(tokenizer).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    _save_processor(tokenizer, folder, False)
    return folder


def _build(tokenizer: PreTrainedTokenizerFast) -> PreTrainedModel:
    text = {
        "vocab_size": len(tokenizer),
        "hidden_size": HIDDEN,
        "intermediate_size": 2 * HIDDEN,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 32,
        "query_pre_attn_scalar": 32,
        "max_position_embeddings": 2048,
        "sliding_window": 8,
        "layer_types": ["sliding_attention", "full_attention"],
        "bos_token_id": tokenizer.pad_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
        "initializer_range": 0.1,
    }
    vision = {
        "hidden_size": HIDDEN,
        "intermediate_size": 2 * HIDDEN,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "image_size": SIDE,
        "patch_size": PATCH,
    }
    ids = {name: tokenizer.convert_tokens_to_ids(token) for name, token in _TOKENS.items()}
    config = Gemma3Config(
        text_config=text,
        vision_config=vision,
        mm_tokens_per_image=4,
        image_token_index=ids["image_token"],
        boi_token_index=ids["boi_token"],
        eoi_token_index=ids["eoi_token"],
    )
    return Gemma3ForConditionalGeneration(config)


def _save_processor(tokenizer: PreTrainedTokenizerFast, folder: Path, splits: bool) -> None:
    Gemma3ImageProcessorPil(size={"height": SIDE, "width": SIDE}).save_pretrained(folder)


GEMMA3 = TinyFamily(
    "<start_of_image>", "<image_soft_token>", _build, _save_processor, tuple(_TOKENS.values()), dict(_TOKENS)
)
