"""Gradient checkpointing and micro-batches that fit GPU memory, compared with byte counts on fake CUDA tensors."""

from dataclasses import replace
from functools import partial

import pytest
from tiny_causal_models import tiny_config
from transformers import AutoConfig, AutoModelForCausalLM, Qwen2Config

from rlhf_cli.config.train import DEFAULT_TOKENS
from rlhf_cli.models.cost import num_recurrent_layers
from rlhf_cli.planning.memory import GIB, RoleMemory, fit_to_memory, total
from rlhf_cli.planning.shapes import (
    KEPT_OF_HIDDEN,
    fused_savings,
    kept_values,
    recomputed_values,
    recurrent_values,
    shape_of,
)

VOCABULARY = 151_936
BF16 = {"optimizer": "adamw_bf16"}


def qwen(hidden, width, layers, heads, key_heads, tied):
    return Qwen2Config(
        hidden_size=hidden,
        intermediate_size=width,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=key_heads,
        vocab_size=VOCABULARY,
        tie_word_embeddings=tied,
    )


SMALL = qwen(896, 4864, 24, 14, 2, True)
MIDDLE = qwen(1536, 8960, 28, 12, 2, True)
LARGE = qwen(3584, 18_944, 28, 28, 4, False)


def role(config, *, optimizer="adamw", num_ranks=1, adapter_rank=0):
    shape = shape_of(config)
    trained = shape.adapter_parameters(adapter_rank, ["all-linear"]) if adapter_rank else shape.parameters
    return RoleMemory(shape=shape, num_trained=trained, optimizer=optimizer, num_ranks=num_ranks)


def one_layer(kind, hidden, width, heads, key_heads, **sizes):
    return AutoConfig.for_model(
        kind,
        hidden_size=hidden,
        intermediate_size=width,
        num_attention_heads=heads,
        num_key_value_heads=key_heads,
        num_hidden_layers=1,
        **sizes,
    )


EXPERTS = {"head_dim": 128, "num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768}


@pytest.mark.parametrize(
    ("config", "measured", "with_liger"),
    [
        (one_layer("qwen2", 1536, 8960, 12, 2), 51_740, 36_636),
        (one_layer("qwen2", 5120, 27_648, 40, 8), 163_924, 115_796),
        (one_layer("llama", 4096, 14_336, 32, 8), 100_420, 69_700),
        (one_layer("qwen3", 4096, 12_288, 32, 8, head_dim=128), 107_668, 68_756),
        (one_layer("phi3", 3072, 8192, 32, 32, pad_token_id=0), 75_844, 55_364),
        (one_layer("olmo2", 4096, 11_008, 32, 32), 134_216, 98_632),
        (one_layer("qwen3_moe", 2048, 6144, 32, 4, **EXPERTS), 97_300, 79_892),
    ],
)
def test_layers_keep_what_was_counted(config, measured, with_liger):
    kept = kept_values(config)
    assert kept == pytest.approx(measured, rel=0.1)
    assert kept - fused_savings(config) == pytest.approx(with_liger, rel=0.1)


@pytest.mark.parametrize(
    ("config", "tokens", "is_fused", "kept", "recomputed"),
    [
        (MIDDLE, 4096, False, 13.36, 2.63),
        (MIDDLE, 15_360, False, 43.96, 4.27),
        (MIDDLE, 15_360, True, 31.77, 3.61),
        (LARGE, 8192, True, 38.71, 6.26),
    ],
)
def test_activations_and_logits_are_the_counted_peak(config, tokens, is_fused, kept, recomputed):
    trained = replace(role(config), is_fused=is_fused)
    for recomputes, gib in ((False, kept), (True, recomputed)):
        peak = total(trained.training(tokens, recomputes=recomputes)) - total(trained.resident())
        assert peak / GIB == pytest.approx(gib, rel=0.05)


@pytest.mark.parametrize(("config", "billions"), [(SMALL, 0.494), (MIDDLE, 1.544), (LARGE, 7.616)])
def test_parameters_are_those_of_the_model(config, billions):
    assert shape_of(config).parameters / 1e9 == pytest.approx(billions, rel=0.01)


@pytest.mark.parametrize(
    ("config", "gib", "settings", "recomputes", "at_least"),
    [
        (SMALL, 23.5, {}, False, 8192),  # the README's sft command, which needed 33 GiB of 24
        (SMALL, 79, {}, False, DEFAULT_TOKENS),
        (MIDDLE, 23.5, BF16, True, 8192),
        (MIDDLE, 39.5, {}, True, 8192),
        (MIDDLE, 79, {}, False, 15_000),
        (LARGE, 79, {"num_ranks": 8}, True, DEFAULT_TOKENS),
        (LARGE, 139, {"num_ranks": 8}, False, 8192),
        (LARGE, 23.5, {"adapter_rank": 16}, True, 4096),  # LoRA with 7B parameters on 24 GB
    ],
)
def test_defaults_fit_the_gpu(config, gib, settings, recomputes, at_least):
    trained = role(config, **settings)
    fit = fit_to_memory(trained, room=gib * GIB, needed_tokens=2048)
    assert fit.recomputes == recomputes
    assert at_least <= fit.max_tokens <= DEFAULT_TOKENS
    assert total(trained.training(fit.max_tokens, recomputes=fit.recomputes)) < 0.95 * gib * GIB
    assert "FIT" not in fit.reason


def test_given_values_are_kept_and_a_lack_of_room_is_named():
    fit_24 = partial(fit_to_memory, room=23.5 * GIB, needed_tokens=2048)
    fit = fit_24(role(MIDDLE, **BF16), recomputes=False)
    assert fit.recomputes is False
    assert fit.max_tokens < 8192
    fit = fit_24(role(LARGE, **BF16), max_tokens=30_000)
    assert (fit.recomputes, fit.max_tokens) == (True, 30_000)
    assert "BUT ONLY ABOUT 0 TOKENS FIT" in fit.reason


def test_the_longest_sequence_has_room_in_any_case():
    fit = fit_to_memory(role(LARGE, num_ranks=4), room=79 * GIB, needed_tokens=16_000)
    assert fit.recomputes
    assert fit.max_tokens >= 16_000


@pytest.mark.parametrize(
    ("kind", "sizes", "measured"),
    [
        ("qwen3_5_text", {"linear_num_value_heads": 8, "linear_key_head_dim": 64, "linear_value_head_dim": 64}, 54.3),
        ("qwen3_5_text", {"linear_num_value_heads": 16, "linear_key_head_dim": 64, "linear_value_head_dim": 64}, 101.6),
        ("kimi_linear", {"linear_num_heads": 8, "linear_head_dim": 64}, 493.3),
        (
            "granitemoehybrid",
            {"mamba_n_heads": 16, "mamba_d_head": 64, "mamba_d_state": 128, "mamba_chunk_size": 256},
            148.3,
        ),
        (
            "granitemoehybrid",
            {"mamba_n_heads": 16, "mamba_d_head": 64, "mamba_d_state": 32, "mamba_chunk_size": 64},
            81.6,
        ),
        ("jamba", {"mamba_d_state": 16, "mamba_expand": 2}, 259.6),
        ("jamba", {"mamba_d_state": 8, "mamba_expand": 2}, 147.4),
    ],
)
def test_recurrent_layers_keep_what_was_measured(kind, sizes, measured):
    """Measured are values in hidden sizes without the MLP: storages of tensors that PyTorch code saves, in bf16."""
    text = AutoConfig.for_model(kind, hidden_size=512, **sizes)
    assert KEPT_OF_HIDDEN + recurrent_values(text) / 512 == pytest.approx(measured, rel=0.12)


def test_layers_without_recurrence_keep_nothing_more():
    falcon = AutoConfig.for_model("falcon_h1", num_hidden_layers=4)
    assert num_recurrent_layers(falcon) == 4
    nemotron = AutoConfig.for_model("nemotron_h", layers_block_type=["mamba", "mlp", "attention", "moe", "mamba"])
    assert num_recurrent_layers(nemotron) == 2
    assert recomputed_values(nemotron) < kept_values(nemotron)
    lfm2 = AutoConfig.for_model("lfm2", layer_types=["conv", "full_attention"], num_hidden_layers=2)
    assert num_recurrent_layers(lfm2) == num_recurrent_layers(SMALL) == 0


@pytest.mark.parametrize("kind", ["lfm2", "qwen3_5_text", "granitemoehybrid", "deepseek_v3"])
def test_parameters_of_other_layers_are_counted_too(kind):
    config = tiny_config(kind)
    assert shape_of(config).parameters == AutoModelForCausalLM.from_config(config).num_parameters()
