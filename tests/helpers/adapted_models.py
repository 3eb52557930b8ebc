"""Models with an adapter, loaded like in the commands."""

import peft
import torch
from tiny_training import partition
from transformers import AutoModelForCausalLM

from rlhf_cli.config.model import LoraConfig, ModelConfig
from rlhf_cli.models.adapters import load_with_adapter, plan_adapter
from rlhf_cli.models.loading import load_causal_lm


def settings(pretrain, **changes):
    return ModelConfig(**({"pretrain": str(pretrain), "param_dtype": "fp32"} | changes))


def load(pretrain, stage=0, *, lora_rank=4, seed=1, kind=load_causal_lm, dtype="fp32", model=None, **adapter):
    """Load a model with an adapter whose second factor is non-zero."""
    config = settings(pretrain, param_dtype=dtype, **(model or {}))
    plan = plan_adapter(config, LoraConfig(lora_rank=lora_rank, **adapter), seed=seed)
    return load_with_adapter(kind, config, plan, partition=partition(stage, dtype=dtype))


def foreign_adapter(base, folder, *, auto_class=AutoModelForCausalLM, options=None, **config):
    """Save a PEFT adapter with a non-zero effect, without a tokenizer, as other tools do."""
    model = auto_class.from_pretrained(base, attn_implementation="varlen", **(options or {}))
    foreign = peft.get_peft_model(model, peft.LoraConfig(**config)).eval()
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in foreign.parameters():
            if parameter.requires_grad:
                parameter += 0.05 * torch.randn(parameter.shape, generator=generator)
    foreign.save_pretrained(folder)
    return foreign
