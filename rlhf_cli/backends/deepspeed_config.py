"""The DeepSpeed configuration of this program's settings, and which settings DeepSpeed has only together with others.

Imports no DeepSpeed, which takes a second and more: the process that starts a run only checks the settings.
"""

from typing import Any

import torch

from rlhf_cli.config.train import DeepSpeedConfig
from rlhf_cli.errors import UsageError


def check_deepspeed(settings: DeepSpeedConfig, *, param_dtype: str) -> None:
    """UsageError for settings that DeepSpeed has only together with others."""
    if settings.adam_offload and settings.zero_stage == 0:
        raise UsageError("--adam_offload: DeepSpeed moves optimizer states to host memory from --zero_stage 1 on")
    if _is_plain_bf16(settings, param_dtype) and settings.grad_accum_dtype == "fp32":
        raise UsageError("--grad_accum_dtype fp32: DeepSpeed has it for bf16 weights from --zero_stage 1 on")


def _is_plain_bf16(settings: DeepSpeedConfig, param_dtype: str) -> bool:
    return settings.zero_stage == 0 and param_dtype == "bf16"


def deepspeed_config(settings: DeepSpeedConfig, *, param_dtype: str, max_norm: float) -> dict[str, Any]:
    """The DeepSpeed configuration of these settings. UsageError as `check_deepspeed`.

    One micro-batch is declared however many there are: the engine sets the accumulation boundary itself, because
    packing makes their number change from step to step.
    """
    check_deepspeed(settings, param_dtype=param_dtype)
    sums = settings.grad_accum_dtype or ("bf16" if _is_plain_bf16(settings, param_dtype) else "fp32")
    zero: dict[str, Any] = {"stage": settings.zero_stage, "overlap_comm": settings.overlap_comm}
    if settings.zero_stage == 3:
        zero |= {"zero_hpz_partition_size": settings.zpg}
    if settings.adam_offload:
        zero["offload_optimizer"] = {"device": "cpu", "pin_memory": torch.cuda.is_available()}
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": max_norm,
        "bf16": {"enabled": param_dtype == "bf16"},
        "data_types": {"grad_accum_dtype": sums},
        "communication_data_type": sums,  # else sums over ranks are bf16 where the weights are
        "zero_optimization": zero,
        "steps_per_print": 1 << 60,
    }
