"""Models that support sequence parallelism, and its communication; test_shared_sequences.py in e2e/ has the
computation.
"""

from functools import partial

import pytest
import torch
from tiny_causal_models import tiny_config
from tiny_training import make_sequences
from transformers import Qwen2Config, Qwen3VLConfig

from rlhf_cli.config.train import DeepSpeedConfig
from rlhf_cli.data.packing.packs import pack
from rlhf_cli.errors import UsageError
from rlhf_cli.models.mixers.layers import Layers
from rlhf_cli.models.sequence_parallel.attention import key_repeats
from rlhf_cli.models.sequence_parallel.checks import (
    can_share_prompts,
    check_sequence_parallel,
    check_whole_packs,
    chosen_mode,
)
from rlhf_cli.models.sequence_parallel.parts import part_of


def model(heads: int = 8, key_heads: int = 2, **rope: object) -> Qwen2Config:
    more = {"rope_parameters": {"rope_theta": 1e4, **rope}} if rope else {}
    return Qwen2Config(num_attention_heads=heads, num_key_value_heads=key_heads, hidden_size=64, **more)


def settings(size: int, **given: object) -> DeepSpeedConfig:
    return DeepSpeedConfig.model_validate({"sequence_parallel_size": size, **given})


@pytest.mark.parametrize(
    ("heads", "key_heads", "size", "repeats"), [(8, 4, 2, 1), (8, 2, 4, 2), (8, 1, 8, 8), (6, 2, 3, 3)]
)
def test_every_rank_gets_the_keys_of_its_query_heads(heads, key_heads, size, repeats) -> None:
    """Rank r has the query heads from r * heads / size, and after repetition the matching key heads."""
    assert key_repeats(heads, key_heads, size) == repeats
    sent = torch.arange(key_heads).repeat_interleave(repeats).view(size, -1)
    wanted = torch.arange(heads).div(heads // key_heads, rounding_mode="floor").view(size, -1)
    per_key = wanted.shape[1] // sent.shape[1]
    assert torch.equal(sent.repeat_interleave(per_key, dim=1), wanted)


@pytest.mark.parametrize(
    ("heads", "given", "mode"),
    [
        (8, {}, "ulysses"),
        (7, {}, "gather"),
        (8, {"sequence_parallel_mode": "gather"}, "gather"),
        (7, {"ring_flash_attn": True}, "ring"),
    ],
)
def test_ranks_exchange_tokens_for_heads_where_heads_divide(heads, given, mode) -> None:
    assert chosen_mode(model(heads, 1), settings(2, **given)) == mode


@pytest.mark.parametrize(
    ("config", "size", "num_ranks", "attention", "fault"),
    [
        (model(), 3, 4, "varlen", "--sequence_parallel_size 3 does not divide the 4 ranks of the model"),
        (model(), 2, 2, "sdpa", "attn_implementation varlen, but this run uses sdpa"),
        (model(rope_type="dynamic", factor=2.0), 2, 2, "varlen", "rotary positions of type dynamic depend on the full"),
    ],
)
def test_ranks_that_cannot_share_a_sequence_are_refused(config, size, num_ranks, attention, fault) -> None:
    with pytest.raises(UsageError, match=fault):
        check_sequence_parallel(
            config, settings(size), num_ranks=num_ranks, attention=attention, trust_remote_code=False
        )


def test_a_ring_has_no_attention_sinks() -> None:
    check = partial(
        check_sequence_parallel, tiny_config("gpt_oss"), num_ranks=2, attention="varlen", trust_remote_code=False
    )
    check(settings=settings(2))
    with pytest.raises(UsageError, match="--ring_flash_attn has no attention sinks, which gpt_oss needs: drop it"):
        check(settings=settings(2, ring_flash_attn=True))


def test_ranks_do_not_share_sequences_of_vision_language_models() -> None:
    with pytest.raises(
        UsageError, match=r"--sequence_parallel_size is not supported for vision-language models \(qwen3_vl\)"
    ):
        check_sequence_parallel(Qwen3VLConfig(), settings(2), num_ranks=2, attention="varlen", trust_remote_code=False)


def test_ranks_do_not_share_sequences_of_layers_with_a_state() -> None:
    with pytest.raises(UsageError, match="lfm2 has layers whose state would cross the ranks"):
        check_sequence_parallel(
            tiny_config("lfm2"), settings(2), num_ranks=2, attention="varlen", trust_remote_code=False
        )


def test_heads_that_cannot_be_dealt_are_refused_with_the_mode_that_takes_them() -> None:
    given = settings(4, sequence_parallel_mode="ulysses")
    with pytest.raises(
        UsageError, match=r"--ref_sequence_parallel_size 4 .* 6 attention heads: .* gather supports any"
    ):
        check_sequence_parallel(
            model(6), given, num_ranks=4, attention="varlen", trust_remote_code=False, name="ref_sequence_parallel_size"
        )
    check_sequence_parallel(model(6), settings(4), num_ranks=4, attention="varlen", trust_remote_code=False)


def test_the_ring_kernel_is_refused_where_flash_attn_is_not_installed() -> None:
    with pytest.raises(UsageError, match="--ring_flash_attn needs the package flash-attn: pip install"):
        check_sequence_parallel(
            model(), settings(2, ring_flash_attn=True), num_ranks=2, attention="varlen", trust_remote_code=False
        )


def test_prompts_are_shared_if_the_kernel_takes_keys_in_any_order() -> None:
    layers = Layers(num_attention=2, mixers=(), unsupported=())
    assert can_share_prompts("varlen", settings(2), layers)
    assert not can_share_prompts("sdpa", settings(1), layers)
    by_ring = settings(2, ring_flash_attn=True)
    assert not can_share_prompts("varlen", by_ring, layers)
    assert can_share_prompts("varlen", by_ring.model_copy(update={"sequence_parallel_size": 1}), layers)


def test_prompts_are_repeated_for_layers_that_cannot_continue_a_state() -> None:
    assert can_share_prompts("varlen", settings(1), Layers(1, ("Mamba 2",), ()))
    assert not can_share_prompts("varlen", settings(1), Layers(1, ("Mamba 1",), ()))


@pytest.mark.parametrize(
    ("given", "fault"),
    [
        (
            {"sequence_parallel_size": 2, "sequence_parallel_mode": "ulysses", "ring_flash_attn": True},
            "ring_flash_attn gathers keys: remove",
        ),
    ],
)
def test_modes_that_mean_nothing_are_refused(given, fault) -> None:
    with pytest.raises(ValueError, match=fault):
        DeepSpeedConfig.model_validate(given)


def test_settings_that_need_whole_packs_are_refused() -> None:
    with pytest.raises(UsageError, match="--aux_loss_coef needs full packs"):
        check_whole_packs(2, aux_loss_coef=0.1, compile_model=False)
    with pytest.raises(UsageError, match="compile_model cannot be combined with"):
        check_whole_packs(2, aux_loss_coef=0, compile_model=True)
    check_whole_packs(1, aux_loss_coef=0.1, compile_model=True)


def test_one_rank_a_sequence_asks_for_nothing() -> None:
    check_sequence_parallel(model(7, 7), settings(1), num_ranks=3, attention="eager", trust_remote_code=False)
    one = pack(make_sequences(3))
    part = part_of(one, None)
    assert part.pack is one
    assert torch.equal(part.rows_k, one.rows_K)
    assert part.whole(one.targets_K) is one.targets_K
