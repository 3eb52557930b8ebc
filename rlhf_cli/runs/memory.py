"""Defaults that depend on GPU memory: gradient checkpointing and tokens per micro-batch."""

from typing import TypeVar

from transformers import PretrainedConfig

from rlhf_cli.backends.doctor.gpus import gpus
from rlhf_cli.backends.training.deepspeed_config import OPTIMIZER_BYTES
from rlhf_cli.config.model import ModelConfig
from rlhf_cli.config.train import BatchConfig, DeepSpeedConfig, OptimConfig
from rlhf_cli.models.memory_fit import Fit, States, fit_to_memory, num_parameters

_VALUE_BYTES = {"bf16": 2, "fp32": 4}
_SUM_BYTES = 4
"""Bytes per parameter for accumulated gradients; 2 with adamw_bf16."""

_Batch = TypeVar("_Batch", bound=BatchConfig)


def gpu_bytes() -> int | None:
    """Return the memory of the smallest GPU on this machine, or None without GPUs."""
    # From the driver: initializing CUDA here would allocate memory in the driver process.
    return min((gpu.memory << 20 for gpu in gpus()), default=None)


def states_of(
    model: ModelConfig, deepspeed: DeepSpeedConfig, optim: OptimConfig, *, adapted: bool, in_4bit: bool, num_ranks: int
) -> States:
    """Compute the bytes per parameter that these settings keep on GPUs."""
    # bitsandbytes stores two 4-bit weights per byte; 1 leaves room for scales and layers that stay in 16 bits.
    weight = 1 if in_4bit else _VALUE_BYTES[model.param_dtype]
    sums = 2 if optim.optim == "adamw_bf16" else _SUM_BYTES
    # With an adapter, gradients and states are negligible.
    rest = 0 if adapted else sums if deepspeed.adam_offload else OPTIMIZER_BYTES[optim.optim] + sums
    partitioned = deepspeed.zero_stage == 3 or deepspeed.tensor_parallel_size > 1
    # Offloaded weights are on the GPU only for one layer at a time.
    if deepspeed.param_offload:
        weight = 0
    return States(weight, rest, num_ranks if deepspeed.zero_stage else 1, partitioned)


def weights_of(architecture: PretrainedConfig | None, model: ModelConfig) -> int:
    """Compute the size of a frozen model's weights in the dtype of `model`; 0 without a model."""
    if architecture is None:
        return 0
    return num_parameters(architecture, trust_remote_code=model.trust_remote_code) * _VALUE_BYTES[model.param_dtype]


def fitted(
    model: ModelConfig,
    batch: _Batch,
    architecture: PretrainedConfig,
    *,
    states: States,
    room: float,
    needed_tokens: int,
) -> tuple[ModelConfig, _Batch, Fit]:
    """Choose gradient checkpointing and micro-batch tokens where unset. Returns the settings and the reason.

    Args:
        model, batch: settings, possibly incomplete.
        architecture: the model's configuration.
        states: bytes per parameter on a GPU.
        room: bytes on a GPU available for training.
        needed_tokens: tokens in a rank's part of the longest sequence.
    """
    fit = fit_to_memory(
        architecture,
        gpu_bytes=room,
        states=states,
        needed_tokens=needed_tokens,
        recomputes=model.gradient_checkpointing,
        max_tokens=batch.train_max_tokens_per_gpu,
        value_bytes=_VALUE_BYTES[model.param_dtype],
        trust_remote_code=model.trust_remote_code,
    )
    return (
        model.model_copy(update={"gradient_checkpointing": fit.recomputes}),
        batch.model_copy(update={"train_max_tokens_per_gpu": fit.max_tokens}),
        fit,
    )
