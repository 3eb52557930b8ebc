"""Conversion of settings to a DeepSpeed config, and checks for unsupported combinations.

This module imports neither DeepSpeed nor torch, which take seconds: drivers and plans only check the settings.
"""

import re
import subprocess
from importlib.util import find_spec
from typing import Any

from rlhf_cli.config.train import DeepSpeedConfig, OptimizerName
from rlhf_cli.errors import UsageError

OPTIMIZER_BYTES: dict[OptimizerName, int] = {"adamw": 12, "adamw_8bit": 6, "adamw_bf16": 6, "muon": 12}
"""Maximum bytes per trained parameter in the optimizer: master weight and moments."""


def check_deepspeed(
    settings: DeepSpeedConfig, *, param_dtype: str, optimizer: OptimizerName = "adamw", sleeps: bool = False
) -> None:
    """Raise UsageError for combinations of settings that DeepSpeed does not support."""
    if settings.adam_offload and settings.zero_stage == 0:
        raise UsageError("--adam_offload requires --zero_stage 1 or higher")
    if settings.grad_accum_dtype == "fp32" and _accumulates_in_bf16(settings, param_dtype, optimizer):
        since = 2 if optimizer == "adamw_bf16" else 1
        raise UsageError(f"--grad_accum_dtype fp32 with bf16 weights requires --zero_stage {since} or higher")
    if sleeps and settings.param_offload and settings.zero_stage == 3:
        raise UsageError(
            "--param_offload: DeepSpeed cannot move states when weights are in host memory; remove "
            "--deepspeed_enable_sleep"
        )
    if optimizer != "adamw":
        _check_optimizer(settings, optimizer, param_dtype=param_dtype, sleeps=sleeps)


def check_secondary_parts(settings: DeepSpeedConfig, *, num_ranks: int, role: str = "") -> None:
    """Raise UsageError if `zpg` does not divide the number of ranks."""
    if settings.zero_stage == 3 and num_ranks % settings.zpg:
        ranks = f"{num_ranks} rank{'s' if num_ranks > 1 else ''}{role and f' of the {role}'}"
        raise UsageError(f"--zpg {settings.zpg} does not divide {ranks}")


def _check_optimizer(settings: DeepSpeedConfig, optimizer: OptimizerName, *, param_dtype: str, sleeps: bool) -> None:
    """Raise UsageError if an optimizer other than AdamW does not support these settings."""
    if optimizer == "adamw_8bit" and find_spec("bitsandbytes") is None:
        raise UsageError("--optim adamw_8bit: bitsandbytes is not installed: pip install 'rlhf-cli[quant]'")
    if settings.adam_offload:
        raise UsageError(f"--optim {optimizer}: --adam_offload works only with --optim adamw")
    if sleeps and settings.zero_stage == 3:
        raise UsageError(
            f"--optim {optimizer}: with --deepspeed_enable_sleep at --zero_stage 3, DeepSpeed can move only the states "
            "of its AdamW; use --zero_stage 2"
        )
    if optimizer == "muon" and settings.zero_stage == 3:
        raise UsageError(
            "--optim muon requires full matrices, but --zero_stage 3 partitions them over ranks; use --zero_stage 2"
        )
    if optimizer == "adamw_bf16" and param_dtype != "bf16":
        raise UsageError("--optim adamw_bf16 requires --param_dtype bf16")


def check_compiler(cuda_home: str | None, *, torch_cuda: str | None) -> None:
    """Raise UsageError without a CUDA toolkit that can compile DeepSpeed's Adam.

    The major version must equal torch's.

    Args:
        cuda_home: path of the toolkit, None if there is none.
        torch_cuda: CUDA version for which torch was built.
    """
    if cuda_home is None:
        raise UsageError(
            "--deepspeed_enable_sleep at --zero_stage 3 requires nvcc to compile DeepSpeed's Adam: set CUDA_HOME to a "
            "CUDA toolkit, or use --zero_stage 2"
        )
    version = _toolkit_version(cuda_home)
    if version and torch_cuda and version.split(".")[0] != torch_cuda.split(".")[0]:
        raise UsageError(
            f"--deepspeed_enable_sleep at --zero_stage 3: the CUDA toolkit at {cuda_home} has version {version}, but "
            f"torch was built for CUDA {torch_cuda}; set CUDA_HOME to a matching toolkit, or use --zero_stage 2"
        )


def _toolkit_version(cuda_home: str) -> str | None:
    """Return the CUDA toolkit version from nvcc, such as "13.0", or None if nvcc fails."""
    try:
        done = subprocess.run([f"{cuda_home}/bin/nvcc", "--version"], capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return None
    release = re.search(r"release (\d+\.\d+)", done.stdout)
    return release and release[1]


def _accumulates_in_bf16(settings: DeepSpeedConfig, param_dtype: str, optimizer: OptimizerName) -> bool:
    """Return whether DeepSpeed supports only bf16 gradient accumulation."""
    # At stage 1, fp32 accumulation selects DeepSpeed's BF16_Optimizer, which always creates fp32 master weights.
    last_stage = 1 if optimizer == "adamw_bf16" else 0
    return param_dtype == "bf16" and settings.zero_stage <= last_stage


_DEFAULT_BUCKET = 500_000_000
"""Gradients per reduction, as DeepSpeed's default."""
# Overlapping uses two buckets, which together need less memory than one with DeepSpeed's default of 500 million.
_OVERLAP_BUCKET = 200_000_000
"""Gradients per reduction if reduction overlaps with the backward pass."""

# DeepSpeed's default of 500 million would be a second copy of all gradients in a small model.
_CPU_BUCKET = 20_000_000
"""Gradients per reduction on a CPU."""


def _overlaps(settings: DeepSpeedConfig, *, num_gpus: int) -> bool:
    """Return whether communication overlaps with computation: as set, by default with multiple GPUs.

    At stage 3, DeepSpeed's default is the same. With `adam_offload`, the default is false, because gradient copies to
    host memory have a fixed order.
    """
    if settings.overlap_comm is not None:
        return settings.overlap_comm
    return num_gpus > 1 and not settings.adam_offload


def deepspeed_config(
    settings: DeepSpeedConfig,
    *,
    param_dtype: str,
    max_norm: float,
    num_gpus: int = 0,
    optimizer: OptimizerName = "adamw",
) -> dict[str, Any]:
    """Build the DeepSpeed config. Raises UsageError like `check_deepspeed`."""
    check_deepspeed(settings, param_dtype=param_dtype, optimizer=optimizer)
    in_bf16 = optimizer == "adamw_bf16"
    # At stage 0 with bf16 enabled, DeepSpeed would create fp32 master weights. With a config for fp32, it leaves
    # weights and steps to the optimizer.
    is_left_alone = in_bf16 and settings.zero_stage == 0
    default = "bf16" if in_bf16 or _accumulates_in_bf16(settings, param_dtype, optimizer) else "fp32"
    sums = "fp32" if is_left_alone else settings.grad_accum_dtype or default
    return {
        # Always one micro-batch: their number varies per step because of packing, so the engine sets the gradient
        # accumulation boundary.
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": max_norm,
        "bf16": {
            "enabled": param_dtype == "bf16" and not is_left_alone,
            "bf16_master_weights_and_grads": in_bf16 and not is_left_alone,
            "bf16_optimizer_states": in_bf16 and not is_left_alone,
        },
        "data_types": {"grad_accum_dtype": sums},
        # By default, DeepSpeed would reduce in the weights' dtype, bf16.
        "communication_data_type": "fp32" if in_bf16 else sums,
        "zero_optimization": _zero_config(settings, num_gpus=num_gpus),
        "zero_allow_untested_optimizer": optimizer != "adamw",
        # Effectively never.
        "steps_per_print": 1 << 60,
    }


def reduce_buckets(settings: DeepSpeedConfig, *, num_gpus: int) -> tuple[int, int]:
    """Return (number of buckets, gradients in each) that DeepSpeed allocates for reductions; no GPUs on a CPU."""
    overlap = _overlaps(settings, num_gpus=num_gpus)
    on_gpu = _OVERLAP_BUCKET if overlap and num_gpus > 1 else _DEFAULT_BUCKET
    return 2 if overlap else 1, on_gpu if num_gpus else _CPU_BUCKET


def _zero_config(settings: DeepSpeedConfig, *, num_gpus: int) -> dict[str, object]:
    zero: dict[str, object] = {
        "stage": settings.zero_stage,
        "overlap_comm": _overlaps(settings, num_gpus=num_gpus),
        "reduce_bucket_size": reduce_buckets(settings, num_gpus=num_gpus)[1],
    }
    if settings.zero_stage == 3:
        zero |= {"zero_hpz_partition_size": settings.zpg}
        if settings.param_offload:
            zero["offload_param"] = {"device": "cpu", "pin_memory": num_gpus > 0}
    if settings.adam_offload:
        zero["offload_optimizer"] = {"device": "cpu", "pin_memory": num_gpus > 0}
    return zero
