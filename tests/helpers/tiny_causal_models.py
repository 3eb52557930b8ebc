"""Tiny random models of any transformers causal LM type, and a comparison of packs with single sequences."""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoConfig, PretrainedConfig

from rlhf_cli.config.model import ModelConfig
from rlhf_cli.data.packing.packs import TokenSequence, pack
from rlhf_cli.models.loading import language_model_class, load_causal_lm
from rlhf_cli.models.mixers.layers import fix_model
from rlhf_cli.models.policy import PolicyModel

VOCABULARY = 97
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "vocab_size_per_layer_input": VOCABULARY,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "initializer_range": 0.15,
    "hidden_size": 32,
    "n_embd": 32,
    "d_model": 32,
    "embed_dim": 32,
    "dim": 32,
    "word_embed_proj_dim": 32,
    "embedding_size": 32,
    "n_inner": 48,
    "intermediate_size": 48,
    "ffn_hidden_size": 48,
    "ffn_dim": 48,
    "d_ff": 48,
    "shared_intermediate_size": 48,
    "moe_intermediate_size": 24,
    "moe_ffn_hidden_size": 24,
    "shared_expert_intermediate_size": 24,
    "expert_ffn_hidden_size": 24,
    "hidden_size_per_layer_input": 8,
    "laurel_rank": 4,
    "num_hidden_layers": 3,
    "num_layers": 3,
    "n_layer": 3,
    "n_layers": 3,
    "num_attention_heads": 4,
    "attention_heads": 4,
    "n_head": 4,
    "n_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "rotary_dim": 8,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
    "kv_lora_rank": 16,
    "q_lora_rank": 16,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "moe_num_experts": 4,
    "num_experts_per_tok": 2,
    "num_experts_per_token": 2,
    "moe_topk": 2,
    "moe_k": 2,
    "top_k_experts": 2,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "num_dense_layers": 1,
    "max_position_embeddings": 128,
    "n_positions": 128,
    "max_seq_len": 128,
    "n_ctx": 128,
    "sliding_window": 16,
    "attention_dropout": 0.1,
    "attn_pdrop": 0.1,
    "resid_pdrop": 0.1,
    "embd_pdrop": 0.1,
    "hidden_dropout": 0.1,
    "dropout": 0.1,
    "tie_word_embeddings": False,
    "is_decoder": True,
}
"""Sizes by configuration name. Dropout is included to test that it is disabled."""
OWN: dict[str, dict[str, Any]] = {
    "gpt_neo": {"attention_types": [[["global", "local"], 1], [["global"], 1]], "window_size": 8},
    **{kind: {"num_key_value_heads": 4} for kind in ("deepseek_v2", "deepseek_v3", "axk1", "glm4_moe_lite", "youtu")},
    **{kind: {"num_key_value_heads": 4, "index_topk": 4} for kind in ("axk2", "deepseek_v32", "glm_moe_dsa")},
    "minicpm3": {"num_key_value_heads": 4},
    "longcat_flash": {"num_key_value_heads": 4, "zero_expert_num": 2},
    "dots1": {"n_shared_experts": 1, "n_routed_experts": 4, "head_dim": 8},
    "diffllama": {"attention_dropout": 0.0},
    "gemma3n_text": {
        "num_hidden_layers": 5,
        "num_kv_shared_layers": 2,
        "layer_types": ["sliding_attention", "full_attention"] * 2 + ["full_attention"],
    },
    **{
        kind: {
            "num_hidden_layers": 4,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "per_layer_config": {layer: {"head_dim": 16, "num_key_value_heads": 1} for layer in (1, 3)},
            "num_kv_shared_layers": 2,
            "attention_k_eq_v": True,
            "enable_moe_block": True,
        }
        for kind in ("gemma4_text", "gemma4_unified_text")
    },
    # Default configurations for so few layers have no convolution.
    **{kind: {"layer_types": ["conv", "full_attention", "conv"]} for kind in ("lfm2", "lfm2_moe")},
    # Float32 scans of delta rules round by more than 1e-5 with large weights, also in transformers itself.
    **{
        kind: {
            "layer_types": ["linear_attention", "linear_attention", "full_attention"],
            "initializer_range": 0.05,
            "linear_key_head_dim": 8,
            "linear_value_head_dim": 8,
            "linear_num_key_heads": 4 if kind == "olmo_hybrid" else 2,
            "linear_num_value_heads": 4,
            "linear_num_heads": 4,
            "linear_head_dim": 8,
            "head_dim": 16,
            "num_key_value_heads": 4 if kind == "kimi_linear" else 2,
            "q_lora_rank": None,
        }
        for kind in ("qwen3_5_text", "qwen3_5_moe_text", "qwen3_next", "olmo_hybrid", "kimi_linear")
    },
    **{
        kind: {
            "mamba_n_heads": 8,
            "mamba_d_head": 8,
            "mamba_d_ssm": 64,
            "mamba_d_state": 16,
            "mamba_n_groups": 2,
            "mamba_chunk_size": 16,
            "attn_layer_indices": [1],
            "layer_types": ["linear_attention", "full_attention", "linear_attention"],
        }
        for kind in ("bamba", "falcon_h1", "granitemoehybrid")
    },
    "jamba": {
        "attn_layer_period": 3,
        "attn_layer_offset": 1,
        "mamba_d_state": 8,
        "mamba_dt_rank": 4,
        "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    },
    "minimax": {"layer_types": ["linear_attention", "full_attention", "linear_attention"], "block_size": 16},
    "recurrent_gemma": {"lru_width": 32, "attention_window_size": 64},
    "nemotron_h": {
        "layers_block_type": ["mamba", "mlp", "attention", "moe", "mamba"],
        "mamba_num_heads": 8,
        "mamba_head_dim": 8,
        "ssm_state_size": 16,
        "n_groups": 2,
        "chunk_size": 16,
    },
    "llama4_text": {
        "no_rope_layers": [1, 0, 1],
        "intermediate_size_mlp": 48,
        "moe_layers": [0, 2],
        "max_position_embeddings": 256,
        "attention_chunk_size": 140,
        "floor_scale": 141,
        "attn_scale": 5.0,
    },
    "mamba2": {"num_heads": 8, "head_dim": 8, "n_groups": 2, "state_size": 16, "chunk_size": 16},
    # The layers ignore this setting, which only the cache reads.
    "qwen3_vl_moe_text": {"sliding_window": None},
    # Half of each head rotates in the mixture of experts.
    **{
        kind: {
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1]},
            "num_attention_heads": num_heads,
        }
        for kind, num_heads in (("glm4v_text", 4), ("glm4v_moe_text", 2))
    },
    "cohere_compass_text": {"layer_types": ["sliding_attention", "full_attention", "full_attention"]},
}
"""Settings of individual types."""
ENCODER: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "depth": 1,
    "num_attention_heads": 4,
    "num_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "out_hidden_size": 32,
    "deepstack_visual_indexes": [0],
    "fullatt_block_indexes": [0],
    "num_position_embeddings": 64,
}
"""Sizes of a vision encoder by configuration name."""


def tiny_config(kind: str) -> PretrainedConfig:
    """Return a small configuration of the type. If it lists layer kinds, it has the default mix for so few layers."""
    usual = AutoConfig.for_model(kind)
    text = usual.get_text_config()
    if text is usual:
        return AutoConfig.for_model(kind, **_sizes(text))
    part = next(name for name in ("text_config", "llm_config", "decoder") if getattr(usual, name, None) is text)
    return AutoConfig.for_model(kind, **{part: _sizes(text)})


def tiny_text_only_config(kind: str, text_kind: str) -> PretrainedConfig:
    """Return a small configuration of a vision-language type with a language model of the other type."""
    usual = AutoConfig.for_model(kind)
    text = _sizes(AutoConfig.for_model(text_kind)) | {"model_type": text_kind}
    # Gemma 4 has no encoder by default.
    encoder = usual.vision_config or type(usual).sub_configs["vision_config"]()
    vision = {name: size for name, size in ENCODER.items() if name in encoder.to_dict()}
    vision["model_type"] = encoder.model_type
    return AutoConfig.for_model(kind, text_config=text, vision_config=vision, tie_word_embeddings=False)


def _sizes(text: PretrainedConfig) -> dict[str, Any]:
    known = text.to_dict()
    return {name: value for name, value in (SIZES | OWN.get(text.model_type, {})).items() if name in known}


def sequences(lengths: tuple[int, ...] = (30, 9, 40)) -> list[TokenSequence]:
    generator = np.random.default_rng(0)
    made = []
    for length in lengths:
        mask = np.ones(length, dtype=bool)
        mask[0] = False
        made.append(TokenSequence(generator.integers(3, VOCABULARY, length).astype(np.int32), mask))
    return made


def distance_in_packs(config: PretrainedConfig, folder: Path, attention: str = "auto") -> float:
    """Save a random model, load it for training, and return the maximum log-prob difference between packs in training
    mode and transformers on single sequences.
    """
    torch.manual_seed(0)
    model = language_model_class(config).from_config(config, attn_implementation="eager", dtype=torch.float32).eval()
    fix_model(model)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 1 and "norm" not in name:
                parameter.normal_(std=0.1)
    model.save_pretrained(folder)
    source = ModelConfig(pretrain=str(folder), param_dtype="fp32", attn_implementation=attention)  # type: ignore[arg-type]
    policy = PolicyModel(load_causal_lm(source)).train()
    alone = []
    with torch.no_grad():
        for sequence in sequences():
            ids = torch.from_numpy(sequence.token_ids).long()
            logprobs = model(input_ids=ids[None], use_cache=False).logits[0, :-1].log_softmax(-1)
            alone.append(logprobs.gather(1, ids[1:, None])[:, 0])
        return float((policy(pack(sequences()))[0] - torch.cat(alone)).abs().max())
