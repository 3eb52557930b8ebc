"""Gradient checkpointing and micro-batches that fit GPU memory, compared with byte counts on fake CUDA tensors."""

from functools import partial

import pytest
from transformers import Qwen2Config

from rlhf_cli.config.train import DEFAULT_TOKENS
from rlhf_cli.models.memory_fit import (
    GIB,
    States,
    fit_to_memory,
    kept_bytes,
    num_parameters,
    recomputed_bytes,
)

MIB = 2**20
VOCABULARY = 151_936


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
ADAMW = States(weight_bytes=2, rest_bytes=16)
BF16 = States(weight_bytes=2, rest_bytes=6)
ADAPTER = States(weight_bytes=2, rest_bytes=0)


@pytest.mark.parametrize(("config", "measured"), [(SMALL, 1.4), (MIDDLE, 2.8), (LARGE, 6.3)])
def test_bytes_of_a_token_are_the_measured_ones(config, measured):
    assert kept_bytes(config, value_bytes=2) / MIB == pytest.approx(measured, rel=0.05)


@pytest.mark.parametrize(
    ("config", "tokens", "measured_gib"), [(MIDDLE, 16_192, 8.4), (MIDDLE, 32_768, 11.5), (LARGE, 16_384, 33.3)]
)
def test_a_recomputed_pack_takes_no_more_than_is_counted(config, tokens, measured_gib):
    weights_and_gradients = 4 * num_parameters(config)
    counted = (weights_and_gradients + tokens * recomputed_bytes(config, value_bytes=2)) / GIB + 1.3  # logits
    assert measured_gib <= counted <= 1.3 * measured_gib


@pytest.mark.parametrize(("config", "billions"), [(SMALL, 0.494), (MIDDLE, 1.544), (LARGE, 7.616)])
def test_parameters_are_those_of_the_model(config, billions):
    assert num_parameters(config) / 1e9 == pytest.approx(billions, rel=0.01)


@pytest.mark.parametrize(
    ("config", "gib", "states", "recomputes", "at_least"),
    [
        (SMALL, 23.5, ADAMW, True, DEFAULT_TOKENS),  # the README's sft command, which needed 33 GiB of 24
        (SMALL, 79, ADAMW, False, DEFAULT_TOKENS),
        (MIDDLE, 23.5, BF16, True, 8192),
        (MIDDLE, 39.5, ADAMW, True, 8192),
        (MIDDLE, 79, ADAMW, False, 15_000),
        (LARGE, 79, States(2, 16, ranks=8), True, DEFAULT_TOKENS),
        (LARGE, 139, States(2, 16, ranks=8), False, 8192),
        (LARGE, 23.5, ADAPTER, True, 4096),  # LoRA with 7B parameters on 24 GB
    ],
)
def test_defaults_fit_the_gpu(config, gib, states, recomputes, at_least):
    fit = fit_to_memory(config, gpu_bytes=gib * GIB, states=states, needed_tokens=2048)
    assert fit.recomputes == recomputes
    assert at_least <= fit.max_tokens <= DEFAULT_TOKENS
    per_token = (recomputed_bytes if fit.recomputes else kept_bytes)(config, value_bytes=2)
    assert states.num_bytes(num_parameters(config)) + fit.max_tokens * per_token < 0.95 * gib * GIB
    assert "FIT" not in fit.reason


def test_given_values_are_kept_and_a_lack_of_room_is_named():
    fit_24 = partial(fit_to_memory, gpu_bytes=23.5 * GIB, states=BF16, needed_tokens=2048)
    fit = fit_24(MIDDLE, recomputes=False)
    assert fit.recomputes is False
    assert fit.max_tokens < 8192
    fit = fit_24(LARGE, max_tokens=30_000)
    assert (fit.recomputes, fit.max_tokens) == (True, 30_000)
    assert "BUT ONLY ABOUT 0 TOKENS FIT" in fit.reason


def test_the_longest_sequence_has_room_in_any_case():
    fit = fit_to_memory(LARGE, gpu_bytes=79 * GIB, states=States(2, 8), needed_tokens=16_000)
    assert fit.recomputes
    assert fit.max_tokens >= 16_000
