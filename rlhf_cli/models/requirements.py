"""Check from the configuration whether a model can be trained or served here, before loading weights."""

import torch
from transformers import (
    PretrainedConfig,
)
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES
from transformers.utils import is_bitsandbytes_available

from rlhf_cli.config.model import ModelConfig
from rlhf_cli.errors import UsageError
from rlhf_cli.models.attention.table import attention_needs, packed_length, resolve_attention
from rlhf_cli.models.dtypes import DTYPES
from rlhf_cli.models.fused import is_installed, uses_fused_kernels
from rlhf_cli.models.mixers.layers import Layers, layers_of
from rlhf_cli.models.positions import known_positions
from rlhf_cli.models.vision.families.table import is_multimodal

# fmt: off
PACKED_TYPES = frozenset({
    "afmoe", "apertus", "arcee", "aria_text", "axk1", "bamba", "biogpt", "bitnet", "cohere", "cohere2", "cohere2_moe",
    "ctrl", "cwm", "deepseek_v2", "deepseek_v3", "diffllama", "dots1", "ernie4_5", "ernie4_5_moe", "exaone4",
    "exaone_moe", "falcon_h1", "flex_olmo", "gemma", "gemma2", "gemma3_text", "gemma3n_text", "gemma4_text",
    "gemma4_unified_text", "glm", "glm4", "glm4_moe", "glm4_moe_lite", "gpt-sw3", "gpt2", "gpt_bigcode", "gpt_neox",
    "gpt_oss", "granite", "granite_swa", "granitemoe", "granitemoe_swa", "granitemoehybrid", "granitemoeshared",
    "helium", "hrm_text", "hunyuan_v1_dense", "hunyuan_v1_moe", "hy_v3", "hyperclovax", "jais2", "jamba", "jetmoe",
    "kimi_linear", "laguna", "lfm2", "lfm2_moe", "llama", "llama4_text", "longcat_flash", "mellum", "mimo_v2_flash",
    "minicpm3", "minimax", "minimax_m2", "ministral", "ministral3", "mistral", "mixtral", "nanochat", "nemotron_h",
    "olmo", "olmo2", "olmo3", "olmo_hybrid", "olmoe", "opt", "phi", "phi3", "qwen2", "qwen2_moe", "qwen3",
    "qwen3_5_moe_text", "qwen3_5_text", "qwen3_moe", "qwen3_next", "recurrent_gemma", "seed_oss", "smollm3",
    "solar_open", "starcoder2", "vaultgemma", "youtu"
})
# fmt: on
"""transformers types with equal log-probs for packed and separate sequences.

tests/unit/models/test_packed_types.py compares them; add new types in both places.
"""
_SPARSE = "attention to tokens that an indexer selects"
_PICTURES = "its images are not supported, only text models of type llama4_text"
_ONLY_STATES = "no attention layers"
_SHARED = "attention layers with shared weights, and recurrent layers within"
NOT_PACKED = {
    **dict.fromkeys(("axk2", "deepseek_v32", "deepseek_v4", "glm_moe_dsa", "hy_v4"), _SPARSE),
    **dict.fromkeys(("minimax_m3_vl_text", "qwen4_exp", "qwen4_exp_text"), _SPARSE),
    "llama4": _PICTURES,
    **dict.fromkeys(("falcon_mamba", "mamba", "mamba2", "rwkv", "xlstm"), _ONLY_STATES),
    **dict.fromkeys(("zamba", "zamba2"), _SHARED),
}
"""Reasons why types are not in `PACKED_TYPES`, besides that they are not tested."""
_PACKED_MASKS = {"full_attention", "sliding_attention", "linear_attention"}
"""Attention in `layer_types` that kernels for packs compute without a mask from transformers."""


def check_trainable(architecture: PretrainedConfig, *, trust_remote_code: bool) -> Layers:
    """Return the model's layers. Raises UsageError, before loading weights, if it cannot be trained on packs."""
    kind = architecture.model_type
    # PACKED_TYPES covers only text models in transformers: neither custom model code nor vision-language types.
    is_of_transformers = kind in CONFIG_MAPPING_NAMES and not is_multimodal(architecture)
    if is_of_transformers and kind not in PACKED_TYPES:
        reason = NOT_PACKED.get(kind, "not tested to keep sequences separate")
        raise UsageError(
            f"models of type {kind} cannot be trained on packs: {reason}; docs/models.md lists the supported types"
        )
    named = getattr(architecture.get_text_config(), "layer_types", None) or ()
    # Chunked or sparse attention goes through the interface too, with masks that the kernels ignore.
    packed = _PACKED_MASKS | ({"chunked_attention"} if packed_length(architecture) else set())
    if masked := sorted({name for name in named if name.endswith("_attention")} - packed):
        raise UsageError(f"models of type {kind} cannot be trained on packs: layers {', '.join(masked)}")
    layers = layers_of(architecture, trust_remote_code=trust_remote_code)
    if layers.unsupported or not (layers.num_attention or layers.mixers):
        problem = f"no support for {', '.join(layers.unsupported)}" if layers.unsupported else "no attention layer"
        raise UsageError(f"models of type {kind} cannot be trained on packs: {problem}")
    return layers


def check_positions(architecture: PretrainedConfig, max_len: int) -> None:
    """Raise UsageError if sequences may exceed the model's positions, because vLLM would not start."""
    known = known_positions(architecture)
    if known is not None and max_len > known[0]:
        raise UsageError(
            f"--max_len {max_len}: the model has {known[0]} positions ({known[1]} in config.json), which is the limit "
            "in vLLM"
        )


def check_packed_length(architecture: PretrainedConfig, max_len: int) -> None:
    """Raise UsageError if sequences of `max_len` tokens are too long to be exact in packs and padded batches."""
    longest = packed_length(architecture)
    if longest is not None and max_len > longest:
        raise UsageError(
            f"--max_len {max_len}: {architecture.model_type} supports sequences of up to {longest} tokens, within "
            f"which its chunked attention equals full attention: set --max_len {longest}"
        )


def check_row_positions(architecture: PretrainedConfig, longest: int, *, dataset: str) -> None:
    """Raise UsageError if the longest dataset row, in tokens, exceeds the model's positions."""
    check_packed_length(architecture, longest)
    known = known_positions(architecture)
    if known is not None and longest > known[0]:
        raise UsageError(
            f"{dataset}: rows have up to {longest} tokens, but the model has {known[0]} positions ({known[1]} in "
            f"config.json): set --max_len {known[0]}"
        )


def check_loadable(config: ModelConfig, architecture: PretrainedConfig, *, in_4bit: bool, partitioned: bool) -> None:
    """Raise UsageError, before loading weights, if this process cannot load the model for training."""
    layers = check_trainable(architecture, trust_remote_code=config.trust_remote_code)
    no_gpu = not torch.cuda.is_available()
    problems = (
        (
            config.compile_model and bool(layers.mixers),
            f"compile_model is not supported for {architecture.model_type}: its layers of type "
            f"{', '.join(layers.mixers)} depend on the runs of each pack",
        ),
        (
            partitioned and config.compile_model,
            "compile_model cannot be combined with --zero_stage 3, which gathers weights between layers",
        ),
        (
            partitioned and in_4bit,
            "load_in_4bit cannot be combined with --zero_stage 3, which cannot partition 4-bit weights",
        ),
        (
            in_4bit and no_gpu,
            "load_in_4bit needs an NVIDIA GPU; without it, the adapter is trained on unquantized weights",
        ),
        (in_4bit and not is_bitsandbytes_available(), "load_in_4bit: bitsandbytes is not installed (extra `quant`)"),
    )
    for applies, problem in problems:
        if applies:
            raise UsageError(problem)
    needs_fused_kernels(config, architecture)
    packed_attention(config, architecture)


def needs_fused_kernels(config: ModelConfig, architecture: PretrainedConfig) -> bool:
    return uses_fused_kernels(
        config.use_liger_kernel,
        architecture,
        on_gpu=torch.cuda.is_available(),
        compiled=config.compile_model,
        installed=is_installed(),
    )


def packed_attention(config: ModelConfig, architecture: PretrainedConfig) -> str:
    """Return the attention kernel for this architecture on packs."""
    return resolve_attention(
        config.attn_implementation,
        device="cuda" if torch.cuda.is_available() else "cpu",
        dtype=DTYPES[config.param_dtype],
        needs=attention_needs(architecture, with_dropout=config.keep_dropout),
    )
