"""Gradient checkpointing and micro-batches that fit GPU memory, compared with byte counts on fake CUDA tensors."""

from functools import partial

import pytest
from tiny_causal_models import tiny_config
from transformers import AutoConfig, AutoModelForCausalLM, Qwen2Config

from rlhf_cli.config.train import DEFAULT_TOKENS
from rlhf_cli.models.cost import num_recurrent_layers
from rlhf_cli.planning.memory import GIB, RoleMemory, fit_to_memory, total
from rlhf_cli.planning.shapes import KEPT_OF_HIDDEN, kept_values, recomputed_values, recurrent_values, shape_of

MIB = 2**20
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


@pytest.mark.parametrize(("config", "measured"), [(SMALL, 1.4), (MIDDLE, 2.8), (LARGE, 6.3)])
def test_bytes_of_a_token_are_the_measured_ones(config, measured):
    assert 2 * kept_values(config) / MIB == pytest.approx(measured, rel=0.05)


@pytest.mark.parametrize(
    ("config", "tokens", "measured_gib"), [(MIDDLE, 16_192, 8.4), (MIDDLE, 32_768, 11.5), (LARGE, 16_384, 33.3)]
)
def test_a_recomputed_pack_takes_no_more_than_is_counted(config, tokens, measured_gib):
    weights_and_gradients = 4 * shape_of(config).parameters
    counted = (weights_and_gradients + tokens * 2 * recomputed_values(config)) / GIB + 1.3  # logits
    assert measured_gib <= counted <= 1.3 * measured_gib


@pytest.mark.parametrize(("config", "billions"), [(SMALL, 0.494), (MIDDLE, 1.544), (LARGE, 7.616)])
def test_parameters_are_those_of_the_model(config, billions):
    assert shape_of(config).parameters / 1e9 == pytest.approx(billions, rel=0.01)


@pytest.mark.parametrize(
    ("config", "gib", "settings", "recomputes", "at_least"),
    [
        (SMALL, 23.5, {}, True, DEFAULT_TOKENS),  # the README's sft command, which needed 33 GiB of 24
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
