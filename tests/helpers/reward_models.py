"""Random reward models in folders."""

from pathlib import Path
from typing import Any

import torch
from conftest import make_tiny_tokenizer
from transformers import Qwen2Config, Qwen2ForSequenceClassification


def save_reward_model(folder: Path, *, tokenizer: Any = None, **config: Any) -> Path:
    """Save a random 2-layer reward model with a tokenizer."""
    tokenizer = tokenizer or make_tiny_tokenizer()
    torch.manual_seed(3)
    shape = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    settings = {"vocab_size": 300, "num_key_value_heads": 2, "num_labels": 1, "initializer_range": 0.2}
    Qwen2ForSequenceClassification(Qwen2Config(**(shape | settings | config))).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
