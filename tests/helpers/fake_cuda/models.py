"""Models on the fake device, prepared like loaded ones."""

from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from device import CUDA
from transformers import (
    AutoConfig,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    PretrainedConfig,
)

from rlhf_cli.config.model import LoraConfig, ModelConfig
from rlhf_cli.models.adapters import AdapterPlan, _new_config, _put_adapter
from rlhf_cli.models.loading import language_model_class, switch_off_dropout
from rlhf_cli.models.mixers.layers import fix_model
from rlhf_cli.models.requirements import packed_attention
from rlhf_cli.models.vision.attention import attention_of_parts, use_tower_kernel
from rlhf_cli.models.vision.families.table import find_processing
from rlhf_cli.models.vision.tower import PROCESSING

HEADS = {"score": (AutoModelForSequenceClassification, 1), "classes": (AutoModelForTokenClassification, 2)}
"""Classes of models with a score head, and their numbers of labels."""
BF16 = ModelConfig(pretrain="fake", param_dtype="bf16")


def model_on_gpu(config: PretrainedConfig, *, head: str = "tokens", checkpointing: bool = False) -> Any:
    """Return a bfloat16 model in training mode, with the attention that a run chooses on this device."""
    kernel = attention_of_parts(packed_attention(BF16, config), config)
    auto, config.num_labels = HEADS.get(head) or (language_model_class(config), config.num_labels)
    with CUDA:
        model = auto.from_config(config, dtype=torch.bfloat16, attn_implementation=kernel).train()
    fix_model(model)
    switch_off_dropout(model)
    if checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model


def vision_model_on_gpu(folder: Path) -> Any:
    """Return a tiny vision-language model; with the image processing of its folder."""
    config = AutoConfig.from_pretrained(folder)
    model = model_on_gpu(config)
    setattr(model, PROCESSING, find_processing(str(folder), config))
    use_tower_kernel(model, packed_attention(BF16, config))
    return model


def with_adapter(model: Any, rank: int = 8) -> Any:
    """Return the model with a new LoRA adapter on all linear layers."""
    plan = AdapterPlan("fake", "", _new_config(LoraConfig(lora_rank=rank)), None, False, 0)
    torch.set_default_dtype(torch.bfloat16)
    # Modules cannot move fake parameters. They are created where and as PEFT would move them.
    with CUDA, patch.object(torch.nn.Module, "to", lambda module, *_, **__: module):
        _put_adapter(model, plan)
    torch.set_default_dtype(torch.float32)
    return model
