"""Layers that ranks split, by the plan of transformers: which they are, and which models and settings have none.

DeepSpeed's AutoTP splits them (backends/training/tensor_ranks.py). Embeddings, norms and heads stay whole on each rank,
for losses read the head's weight beside the decoder.
"""

import re
from typing import Any

import torch
from transformers import AutoModel, PretrainedConfig

from rlhf_cli.config.train import DeepSpeedConfig, OptimConfig
from rlhf_cli.errors import UsageError

SPLIT = {"colwise": "column", "rowwise": "row"}
"""Styles of layers that are split, and DeepSpeed's words for them: by outputs, by inputs."""
SUMMED = "replicated_with_grad_allreduce"
"""Style of norms of split heads: each rank has the gradient of its own heads alone."""
EMBEDDING = "embedding_rowwise"
"""Style of tied embeddings, which stay whole here."""


def split_layers(architecture: PretrainedConfig) -> list[dict[str, Any]]:
    """Return DeepSpeed's descriptions of the layers that are split. Raise UsageError if the model has others."""
    if architecture.get_text_config() is not architecture:
        raise UsageError(f"--tensor_parallel_size: {architecture.model_type} has more than a decoder of text")
    plan: dict[str, str] = getattr(architecture, "base_model_tp_plan", None) or {}
    others = sorted(set(plan.values()) - {*SPLIT, SUMMED, EMBEDDING})
    if others:
        raise UsageError(
            f"--tensor_parallel_size: {architecture.model_type} has layers that are split in other ways "
            f"({', '.join(others)}): only dense layers by inputs or outputs are"
        )
    if not set(plan.values()) & set(SPLIT):
        raise UsageError(f"--tensor_parallel_size: transformers does not plan how to split {architecture.model_type}")
    return [_described(name, style) for name, style in plan.items() if style != EMBEDDING]


def _described(name: str, style: str) -> dict[str, Any]:
    pattern = ".*" + name.replace(".", r"\.").replace("*", "[0-9]+") + r"\.weight$"
    return {"patterns": [pattern], "partition_type": SPLIT.get(style, "skip"), "grad_allreduce": style == SUMMED}


def check_tensor_parallel(
    architecture: PretrainedConfig,
    settings: DeepSpeedConfig,
    *,
    num_ranks: int,
    optim: OptimConfig,
    adapted: bool,
    compile_model: bool,
) -> None:
    """Raise UsageError if ranks cannot split the layers of this model as the settings request.

    Args:
        num_ranks: ranks of the model.
        adapted: whether an adapter is trained instead of the model.
    """
    size, name = settings.tensor_parallel_size, f"--tensor_parallel_size {settings.tensor_parallel_size}"
    if size == 1:
        return
    if num_ranks % size:
        raise UsageError(f"{name} does not divide the {num_ranks} ranks of the model")
    if adapted:
        raise UsageError(f"{name} splits whole layers, not adapters: drop --lora_rank")
    if compile_model:
        raise UsageError(f"compile_model does not go with {name}: ranks add up results in each layer")
    _check_others(settings, optim, name)
    _check_complete(architecture, split_layers(architecture))
    for what in ("num_attention_heads", "num_key_value_heads", "intermediate_size"):
        number = getattr(architecture, what, None)
        if number is not None and number % size:
            raise UsageError(f"{name} does not divide the model's {what} {number}")


def _check_others(settings: DeepSpeedConfig, optim: OptimConfig, name: str) -> None:
    """Raise UsageError for other settings that split layers do not go with."""
    if settings.sequence_parallel_size > 1:
        raise UsageError(f"{name} splits layers, --sequence_parallel_size splits sequences: give one of them")
    if settings.zero_stage == 0:
        raise UsageError(
            f"{name}: at --zero_stage 0 DeepSpeed takes the gradient's norm of one rank alone; give 1, 2 or 3"
        )
    if optim.optim == "adamw_bf16" and settings.zero_stage < 3:
        raise UsageError(
            f"{name}: --optim adamw_bf16 rounds at random, so that weights which each rank has whole would come apart; "
            "give --zero_stage 3"
        )
    if optim.optim == "adamw_8bit" and settings.zero_stage < 3:
        raise UsageError(
            f"{name}: --optim adamw_8bit scales blocks that hold parts of split layers beside weights that each rank "
            "has whole, which would come apart; give --zero_stage 3"
        )
    if settings.zpg > 1:
        raise UsageError(f"{name}: --zpg gathers weights from the ranks beside each other, which have different parts")
    if optim.optim == "muon":
        raise UsageError(f"{name}: --optim muon needs whole matrices, of which each rank has a part")


def _check_complete(architecture: PretrainedConfig, layers: list[dict[str, Any]]) -> None:
    """Raise UsageError if a part of the decoder's layers of which others are split has parameters without a plan.

    Norms over all heads are such: a rank has some of the heads alone.
    """
    with torch.device("meta"):
        decoder = AutoModel.from_config(architecture)
    patterns = [pattern for layer in layers for pattern in layer["patterns"]]
    names = [name for name, part in decoder.named_modules() if next(part.parameters(recurse=False), None) is not None]
    planned = {name for name in names if any(re.match(pattern, f"{name}.weight") for pattern in patterns)}
    split_parts = {name.rpartition(".")[0] for name in planned}
    left_out = [name for name in names if name not in planned and name.rpartition(".")[0] in split_parts]
    if left_out:
        raise UsageError(f"--tensor_parallel_size: transformers does not plan how to split {left_out[0]}")


def split_dimension(parameter: torch.Tensor) -> int | None:
    """Return the dimension in which ranks have split a parameter; None if each rank has the whole."""
    dimension: int | None = _record(parameter).get("partition_dim")
    return dimension


def whole_shape(parameter: torch.Tensor) -> tuple[int, ...]:
    """Return the shape of the whole parameter, however ZeRO-3 has partitioned it and ranks have split it."""
    if split_dimension(parameter) is not None:
        return tuple(_record(parameter)["logical_shape"])
    return tuple(getattr(parameter, "ds_shape", parameter.shape))


def _record(parameter: torch.Tensor) -> dict[str, Any]:
    """Return what AutoTP keeps with a parameter of a split layer (DS_AUTOTP_UC_META of DeepSpeed)."""
    record: dict[str, Any] = getattr(parameter, "ds_autotp_universal_checkpoint_meta", {})
    return record
