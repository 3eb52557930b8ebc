"""The DeepSpeed configuration of this program's settings, and which settings DeepSpeed has only together with others.

Imports no DeepSpeed, which takes a second and more: the process that starts a run only checks the settings.
"""

from typing import Any

import torch

from rlhf_cli.config.train import DeepSpeedConfig
from rlhf_cli.errors import UsageError


def check_deepspeed(settings: DeepSpeedConfig, *, param_dtype: str) -> None:
    """Raise UsageError for settings that DeepSpeed has only together with others."""
    if settings.adam_offload and settings.zero_stage == 0:
        raise UsageError("--adam_offload: DeepSpeed moves optimizer states to host memory from --zero_stage 1 on")
    if _is_plain_bf16(settings, param_dtype) and settings.grad_accum_dtype == "fp32":
        raise UsageError("--grad_accum_dtype fp32: DeepSpeed has it for bf16 weights from --zero_stage 1 on")


def _is_plain_bf16(settings: DeepSpeedConfig, param_dtype: str) -> bool:
    return settings.zero_stage == 0 and param_dtype == "bf16"


OVERLAP_BUCKET = 200_000_000
"""Gradients reduced at a time where reduction overlaps: two such buckets take less memory than DeepSpeed's one."""


def overlaps(settings: DeepSpeedConfig, *, num_gpus: int) -> bool:
    """Return whether ranks communicate while they compute: as set, else if there are several GPUs.

    DeepSpeed's own default is the same at stage 3. Copies of gradients to host memory (`adam_offload`) have an order
    of their own, so nothing is overlapped beside them by default.
    """
    if settings.overlap_comm is not None:
        return settings.overlap_comm
    return num_gpus > 1 and not settings.adam_offload


def deepspeed_config(
    settings: DeepSpeedConfig, *, param_dtype: str, max_norm: float, num_gpus: int = 0
) -> dict[str, Any]:
    """Return the DeepSpeed configuration of these settings. Raise UsageError as `check_deepspeed` does.

    One micro-batch is declared however many there are: the engine sets the accumulation boundary itself, because
    packing makes their number change from step to step.
    """
    check_deepspeed(settings, param_dtype=param_dtype)
    sums = settings.grad_accum_dtype or ("bf16" if _is_plain_bf16(settings, param_dtype) else "fp32")
    overlap = overlaps(settings, num_gpus=num_gpus)
    zero: dict[str, object] = {"stage": settings.zero_stage, "overlap_comm": overlap}
    if overlap and num_gpus > 1:
        zero["reduce_bucket_size"] = OVERLAP_BUCKET
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
        "communication_data_type": sums,  # else sums over ranks are bf16 if the weights are
        "zero_optimization": zero,
        "steps_per_print": 1 << 60,
    }
