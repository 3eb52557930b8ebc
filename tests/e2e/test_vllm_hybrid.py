"""Mamba 2 models, Gemma 4, and a vision-language model that reads only text, in the real vLLM engine on a CPU.

Log-probs, pushes of weights and adapters, sleep.
"""

import importlib.util
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import make_tiny_tokenizer
from engine_under_test import REQUESTS, SAMPLING, Engine, change_weights, largest_difference
from peft import LoraConfig, get_peft_model
from tiny_text_only import save_tiny_gemma3
from transformers import AutoConfig, AutoModelForCausalLM

from rlhf_cli.backends.rollout.engine import EngineSettings
from rlhf_cli.backends.weight_sync.adapter_push import adapter_manifest, vllm_config
from rlhf_cli.backends.weight_sync.shm import ShmTransport
from rlhf_cli.backends.weight_sync.transfer import WeightSender
from rlhf_cli.models.checkpoint_names import as_in_checkpoint, persistent_buffers
from rlhf_cli.models.mixers.layers import fix_model

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed"),
]

ATTENTION: dict[str, Any] = {
    "vocab_size": 256,
    "hidden_size": 128,
    "intermediate_size": 96,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": 1,
}
MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 32, "mamba_d_state": 16, "mamba_n_groups": 1, "mamba_chunk_size": 64}
SIZES: dict[str, dict[str, Any]] = {
    "granitemoehybrid": {
        "num_hidden_layers": 3,
        "layer_types": ["linear_attention", "full_attention", "linear_attention"],
        "num_local_experts": 0,
        "num_experts_per_tok": 0,
        "shared_intermediate_size": 96,
        **MAMBA,
    },
    "falcon_h1": {"num_hidden_layers": 2, "head_dim": 64, "mamba_d_ssm": 256, **MAMBA},
    "gemma4_text": {
        "num_hidden_layers": 4,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "sliding_window": 32,
        "vocab_size_per_layer_input": 256,
        "hidden_size_per_layer_input": 32,
        "head_dim": 64,
        "per_layer_config": {layer: {"head_dim": 128} for layer in (1, 3)},
    },
    "nemotron_h": {
        "head_dim": 64,
        "layers_block_type": ["mamba", "mlp", "attention", "mamba"],
        "mamba_num_heads": 8,
        "mamba_head_dim": 32,
        "ssm_state_size": 16,
        "n_groups": 1,
        "chunk_size": 64,
    },
}
SETTINGS = EngineSettings(max_model_len=160, dtype="fp32", enforce_eager=True, num_threads=1, max_num_seqs=64)
CLOSE = 1e-4
SLOW = [pytest.param(kind, marks=pytest.mark.slow) for kind in ("falcon_h1", "gemma4_text", "nemotron_h")]


def saved_model(kind: str, folder: Path) -> Any:
    if kind == "gemma3":
        return loaded(save_tiny_gemma3(folder))
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, **ATTENTION, **SIZES[kind])
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    model.save_pretrained(folder)
    make_tiny_tokenizer().save_pretrained(folder)
    return loaded(folder)


def loaded(folder: Path) -> Any:
    model = AutoModelForCausalLM.from_pretrained(folder)
    fix_model(model)
    return model.requires_grad_(False)


@pytest.mark.parametrize("kind", ["granitemoehybrid", "gemma3", *SLOW])
def test_logprobs_are_the_trainers_before_and_after_a_push_and_sleep(kind: str, tmp_path: Path) -> None:
    model = saved_model(kind, tmp_path)
    engine = Engine(str(tmp_path), SETTINGS)
    assert largest_difference(model, engine.generate(REQUESTS, SAMPLING)) < CLOSE
    change_weights(model)
    sender = WeightSender(ShmTransport())
    report = sender.send(as_in_checkpoint(model, [*model.named_parameters(), *persistent_buffers(model)]), 1)
    engine.push(report.manifest, 1)
    sender.close()
    generations = engine.generate(REQUESTS, SAMPLING)
    assert largest_difference(model, generations) < CLOSE
    assert largest_difference(loaded(tmp_path), generations) > 0.1
    engine.sleep()
    engine.wake()
    assert largest_difference(model, engine.generate(REQUESTS, SAMPLING)) < CLOSE
    engine.shutdown()


def test_an_adapter_on_mixers_and_attention_has_the_logprobs_of_the_merged_model(tmp_path: Path) -> None:
    model = saved_model("granitemoehybrid", tmp_path)
    engine = Engine(str(tmp_path), replace(SETTINGS, max_lora_rank=8))
    config = LoraConfig(r=8, target_modules=["q_proj", "in_proj", "out_proj"])
    adapted, tensors = get_peft_model(model, config), {}
    for name, factor in adapted.named_parameters():
        if "lora_" in name:
            factor.data = torch.randn_like(factor) * 0.2
            tensors[name.replace(".default", "")] = factor.detach()
    merged = adapted.merge_and_unload()
    engine.push(adapter_manifest(tensors.items(), vllm_config(config), version=1), 1)
    generations = engine.generate(REQUESTS, SAMPLING)
    assert largest_difference(merged, generations) < CLOSE
    assert largest_difference(loaded(tmp_path), generations) > 0.1
    engine.shutdown()
