"""Models and settings that support tensor parallelism; test_shared_sequences.py in e2e/ has the computation."""

import re
from typing import Any

import pytest
import torch
from transformers import (
    CohereConfig,
    Gemma3Config,
    Gemma3TextConfig,
    GPT2Config,
    GraniteSWAConfig,
    LlamaConfig,
    Olmo2Config,
    Phi3Config,
    PretrainedConfig,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

from rlhf_cli.config.train import DeepSpeedConfig, OptimConfig
from rlhf_cli.errors import UsageError
from rlhf_cli.models.tensor_parallel import check_tensor_parallel, split_dimension, split_layers, whole_shape

SHAPE = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 64}
QWEN = Qwen2Config(**SHAPE, num_key_value_heads=2)


def check(architecture: PretrainedConfig = QWEN, *, num_ranks: int = 4, optim: str = "adamw", **given: Any) -> None:
    adapted, compiled = (given.pop(name, False) for name in ("adapted", "compile_model"))
    check_tensor_parallel(
        architecture,
        DeepSpeedConfig.model_validate({"tensor_parallel_size": 2} | given),
        num_ranks=num_ranks,
        optim=OptimConfig.model_validate({"optim": optim}),
        adapted=adapted,
        compile_model=compiled,
    )


@pytest.mark.parametrize("kind", [Qwen2Config, Qwen3Config, LlamaConfig, Gemma3TextConfig])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_dense_models_are_split_at_stages_1_to_3(kind, stage) -> None:
    check(kind(**SHAPE, num_key_value_heads=2), zero_stage=stage)


@pytest.mark.parametrize(
    ("given", "fault"),
    [
        ({"num_ranks": 3}, "--tensor_parallel_size 2 does not divide the 3 ranks of the model"),
        ({"tensor_parallel_size": 4}, "does not divide the model's num_key_value_heads 2"),
        ({"tensor_parallel_size": 3, "num_ranks": 3}, "does not divide the model's num_attention_heads 4"),
        ({"zero_stage": 0}, "at --zero_stage 0 DeepSpeed computes the gradient norm from one rank; set 1, 2 or 3"),
        ({"sequence_parallel_size": 2}, "splits layers, --sequence_parallel_size splits sequences: set only one"),
        ({"optim": "muon"}, "--optim muon needs full matrices"),
        ({"optim": "adamw_bf16"}, "--optim adamw_bf16 rounds stochastically, .*; set --zero_stage 3"),
        ({"optim": "adamw_8bit"}, "--optim adamw_8bit quantizes blocks .*; set --zero_stage 3"),
        ({"zpg": 2, "zero_stage": 3}, "--zpg gathers weights from adjacent ranks"),
        ({"adapted": True}, "splits full layers, not adapters: drop --lora_rank"),
        ({"compile_model": True}, "compile_model cannot be combined with --tensor_parallel_size 2"),
    ],
    ids=str,
)
def test_settings_that_split_layers_do_not_go_with_are_refused(given, fault) -> None:
    with pytest.raises(UsageError, match=fault):
        check(**given)


@pytest.mark.parametrize("optim", ["adamw_bf16", "adamw_8bit"])
def test_optimizers_in_few_bits_go_with_stage_3_where_no_rank_has_a_copy_of_another_ones_weights(optim) -> None:
    check(optim=optim, zero_stage=3)


@pytest.mark.parametrize(
    ("architecture", "fault"),
    [
        (GPT2Config(), "transformers has no plan to split gpt2"),
        (Gemma3Config(), "gemma3 is not a text-only decoder"),
        (Phi3Config(**SHAPE, pad_token_id=0), "phi3 has layers with unsupported split styles .*rowwise_split_input"),
        (Olmo2Config(**SHAPE), "olmo2 has layers with unsupported split styles"),
        (Qwen3MoeConfig(**SHAPE, num_experts=4), "qwen3_moe has layers .*moe_tp_experts.*: only dense layers"),
        (CohereConfig(**SHAPE, use_qk_norm=True), r"has no plan to split layers\.0\.self_attn\.q_norm"),
        (GraniteSWAConfig(**SHAPE, num_key_value_heads=2), r"has no plan to split layers\.0\.self_attn$"),
    ],
    ids=["no plan", "pictures", "fused", "norm over all heads", "experts", "norms without a plan", "sinks"],
)
def test_models_with_other_layers_are_refused(architecture, fault) -> None:
    with pytest.raises(UsageError, match=fault):
        check(architecture)


def test_one_rank_a_layer_checks_nothing() -> None:
    check(GPT2Config(), tensor_parallel_size=1, num_ranks=3, adapted=True)


def test_layers_are_split_by_the_plan_and_norms_of_heads_add_their_gradients() -> None:
    described = split_layers(Qwen3Config(**SHAPE))

    def found(name: str) -> list[tuple[str, bool]]:
        matching = [layer for layer in described if any(re.match(pattern, name) for pattern in layer["patterns"])]
        return [(layer["partition_type"], layer["grad_allreduce"]) for layer in matching]

    assert found("model.model.layers.11.self_attn.q_proj.weight") == [("column", False)]
    assert found("model.model.layers.0.mlp.down_proj.weight") == [("row", False)]
    assert found("model.model.layers.0.self_attn.k_norm.weight") == [("skip", True)]
    assert found("model.lm_head.weight") == found("model.model.embed_tokens.weight") == []


def test_a_split_parameter_has_the_shape_of_the_whole() -> None:
    half, whole = torch.zeros(3, 4), torch.zeros(6, 4)
    half.ds_autotp_universal_checkpoint_meta = {"partition_dim": 0, "logical_shape": (6, 4)}  # type: ignore[attr-defined]
    assert (split_dimension(half), whole_shape(half)) == (0, (6, 4))
    assert (split_dimension(whole), whole_shape(whole)) == (None, (6, 4))
