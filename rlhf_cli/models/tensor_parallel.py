"""Tensor parallelism: layers to split by transformers' plan, and checks for models and settings.

DeepSpeed AutoTP splits the layers (backends/training/deepspeed_engine.py). Embeddings, norms and heads are replicated,
because losses read the head weight directly.
"""

import re
from typing import Any

import torch
from transformers import AutoModel, PretrainedConfig

from rlhf_cli.config.train import DeepSpeedConfig, OptimConfig
from rlhf_cli.errors import UsageError
from rlhf_cli.models.mixers.layers import layers_in

_SPLIT = {"colwise": "column", "rowwise": "row"}
"""Split styles in transformers and in DeepSpeed: by output, by input."""
_SUMMED = "replicated_with_grad_allreduce"
"""Style of norms on split heads: each rank has the gradient for local heads only."""
_EMBEDDING = "embedding_rowwise"
"""Style of tied embeddings, which are replicated here."""


def split_layers(architecture: PretrainedConfig) -> list[dict[str, Any]]:
    """Return DeepSpeed's description of the layers to split. Raises UsageError for unsupported layers."""
    if architecture.get_text_config() is not architecture:
        raise UsageError(f"--tensor_parallel_size: {architecture.model_type} is not a text-only decoder")
    plan: dict[str, str] = getattr(architecture, "base_model_tp_plan", None) or {}
    unsupported = sorted(set(plan.values()) - {*_SPLIT, _SUMMED, _EMBEDDING})
    if unsupported:
        raise UsageError(
            f"--tensor_parallel_size: {architecture.model_type} has layers with unsupported split styles "
            f"({', '.join(unsupported)}): only dense layers split by input or output are supported"
        )
    if not set(plan.values()) & set(_SPLIT):
        raise UsageError(f"--tensor_parallel_size: transformers has no plan to split {architecture.model_type}")
    # AutoTP skips layers without a description. Norms are listed as "skip" only to set grad_allreduce.
    return [_described(name, style) for name, style in plan.items() if style != _EMBEDDING]


def _described(name: str, style: str) -> dict[str, Any]:
    # transformers writes layer numbers as *, DeepSpeed matches regular expressions.
    pattern = ".*" + name.replace(".", r"\.").replace("*", "[0-9]+") + r"\.weight$"
    return {"patterns": [pattern], "partition_type": _SPLIT.get(style, "skip"), "grad_allreduce": style == _SUMMED}


def check_tensor_parallel(
    architecture: PretrainedConfig,
    settings: DeepSpeedConfig,
    *,
    num_ranks: int,
    optim: OptimConfig,
    adapted: bool,
    compile_model: bool,
) -> None:
    """Raise UsageError if the settings do not support tensor parallelism for this model.

    Args:
        num_ranks: number of model ranks.
        adapted: whether an adapter is trained.
    """
    size, name = settings.tensor_parallel_size, f"--tensor_parallel_size {settings.tensor_parallel_size}"
    if size == 1:
        return
    if num_ranks % size:
        raise UsageError(f"{name} does not divide the {num_ranks} ranks of the model")
    if adapted:
        raise UsageError(f"{name} splits full layers, not adapters: drop --lora_rank")
    if compile_model:
        raise UsageError(f"compile_model cannot be combined with {name}: ranks reduce results in each layer")
    _check_others(settings, optim, name)
    _check_complete(architecture, split_layers(architecture))
    for what in ("num_attention_heads", "num_key_value_heads", "intermediate_size"):
        number = getattr(architecture, what, None)
        if number is not None and number % size:
            raise UsageError(f"{name} does not divide the model's {what} {number}")


def _check_others(settings: DeepSpeedConfig, optim: OptimConfig, name: str) -> None:
    """Raise UsageError for other settings that are incompatible with tensor parallelism."""
    if settings.sequence_parallel_size > 1:
        raise UsageError(f"{name} splits layers, --sequence_parallel_size splits sequences: set only one")
    if settings.zero_stage == 0:
        raise UsageError(f"{name}: at --zero_stage 0 DeepSpeed computes the gradient norm from one rank; set 1, 2 or 3")
    if optim.optim == "adamw_bf16" and settings.zero_stage < 3:
        raise UsageError(
            f"{name}: --optim adamw_bf16 rounds stochastically, so replicated weights would diverge between ranks; "
            "set --zero_stage 3"
        )
    if optim.optim == "adamw_8bit" and settings.zero_stage < 3:
        raise UsageError(
            f"{name}: --optim adamw_8bit quantizes blocks that mix split and replicated weights, which would diverge "
            "between ranks; set --zero_stage 3"
        )
    if settings.zpg > 1:
        raise UsageError(f"{name}: --zpg gathers weights from adjacent ranks, which have different shards")
    if optim.optim == "muon":
        raise UsageError(f"{name}: --optim muon needs full matrices, but each rank has a shard")


def _check_complete(architecture: PretrainedConfig, layers: list[dict[str, Any]]) -> None:
    """Raise UsageError if a module with split layers also contains parameters without a plan.

    Norms over all heads and attention sinks are examples: a rank has only some heads.
    """
    # Build the decoder on the meta device to list parameters without allocating weights.
    with torch.device("meta"):
        decoder = AutoModel.from_config(architecture)
    if layers_in(decoder).mixers:
        raise UsageError(f"--tensor_parallel_size: {architecture.model_type} has layers that cannot be split")
    patterns = [pattern for layer in layers for pattern in layer["patterns"]]
    names = [name for name, part in decoder.named_modules() if next(part.parameters(recurse=False), None) is not None]
    planned = {name for name in names if any(re.match(pattern, f"{name}.weight") for pattern in patterns)}
    split_parts = {name.rpartition(".")[0] for name in planned}
    left_out = [name for name in names if name not in planned and {name, name.rpartition(".")[0]} & split_parts]
    if left_out:
        raise UsageError(f"--tensor_parallel_size: transformers has no plan to split {left_out[0]}")


def split_dimension(parameter: torch.Tensor) -> int | None:
    """Return the dimension along which ranks split a parameter, or None if it is replicated."""
    dimension: int | None = _record(parameter).get("partition_dim")
    return dimension


def whole_shape(parameter: torch.Tensor) -> tuple[int, ...]:
    """Return the full parameter shape, before ZeRO-3 partitioning and tensor parallelism."""
    # AutoTP first: under both, ds_shape is only the shape of this rank's shard.
    if split_dimension(parameter) is not None:
        return tuple(_record(parameter)["logical_shape"])
    return tuple(getattr(parameter, "ds_shape", parameter.shape))


def _record(parameter: torch.Tensor) -> dict[str, Any]:
    """Return AutoTP's record on a split parameter (DS_AUTOTP_UC_META in DeepSpeed)."""
    record: dict[str, Any] = getattr(parameter, "ds_autotp_universal_checkpoint_meta", {})
    return record
