"""The DeepSpeed configuration of this program's settings, and which settings DeepSpeed has only together with others.

Imports no DeepSpeed, which takes a second and more: the process that starts a run only checks the settings.
"""

import re
import subprocess
from typing import Any

import torch
from transformers.utils import is_bitsandbytes_available

from rlhf_cli.config.train import DeepSpeedConfig, OptimizerName
from rlhf_cli.errors import UsageError

OPTIMIZER_BYTES: dict[OptimizerName, int] = {"adamw": 12, "adamw_8bit": 6, "adamw_bf16": 6, "muon": 12}
"""Bytes of each trained parameter that an optimizer holds at most: its copy of the weight, and its moments."""


def check_deepspeed(
    settings: DeepSpeedConfig, *, param_dtype: str, optimizer: OptimizerName = "adamw", sleeps: bool = False
) -> None:
    """Raise UsageError for settings that DeepSpeed has only together with others, or not at all."""
    if settings.adam_offload and settings.zero_stage == 0:
        raise UsageError("--adam_offload: DeepSpeed moves optimizer states to host memory from --zero_stage 1 on")
    if settings.grad_accum_dtype == "fp32" and _adds_up_in_bf16(settings, param_dtype, optimizer):
        since = 2 if optimizer == "adamw_bf16" else 1
        raise UsageError(f"--grad_accum_dtype fp32: DeepSpeed has it for bf16 weights from --zero_stage {since} on")
    if sleeps and settings.param_offload and settings.zero_stage == 3:
        raise UsageError(
            "--param_offload: DeepSpeed moves no states of weights that are in host memory already; drop "
            "--deepspeed_enable_sleep"
        )
    if optimizer != "adamw":
        _check_optimizer(settings, optimizer, param_dtype=param_dtype, sleeps=sleeps)


def check_secondary_parts(settings: DeepSpeedConfig, *, num_ranks: int, role: str = "") -> None:
    """Raise UsageError if the ranks of a model do not fall into groups of `zpg`."""
    if settings.zero_stage == 3 and num_ranks % settings.zpg:
        ranks = f"{num_ranks} rank{'s' if num_ranks > 1 else ''}{role and f' of the {role}'}"
        raise UsageError(f"--zpg {settings.zpg} does not divide {ranks}")


def _check_optimizer(settings: DeepSpeedConfig, optimizer: OptimizerName, *, param_dtype: str, sleeps: bool) -> None:
    """Raise UsageError if another optimizer than AdamW cannot run with these settings."""
    if optimizer == "adamw_8bit" and not is_bitsandbytes_available():
        raise UsageError("--optim adamw_8bit: bitsandbytes is not installed: pip install 'rlhf-cli[quant]'")
    if settings.adam_offload:
        raise UsageError(f"--optim {optimizer}: --adam_offload works only with --optim adamw")
    if sleeps and settings.zero_stage == 3:
        raise UsageError(
            f"--optim {optimizer}: for --deepspeed_enable_sleep at --zero_stage 3 DeepSpeed moves the states of its "
            "AdamW alone; give --zero_stage 2"
        )
    if optimizer == "muon" and settings.zero_stage == 3:
        raise UsageError(
            "--optim muon: at --zero_stage 3 every rank has a part of each matrix, and the whole is needed; give "
            "--zero_stage 2"
        )
    if optimizer == "adamw_bf16" and param_dtype != "bf16":
        raise UsageError("--optim adamw_bf16 trains weights in bf16: give --param_dtype bf16")


def check_compiler(cuda_home: str | None, *, torch_cuda: str | None) -> None:
    """Raise UsageError without a CUDA toolkit of the major version of torch's, with which DeepSpeed compiles its Adam.

    Args:
        torch_cuda: the version of CUDA that torch is built for.
    """
    if cuda_home is None:
        raise UsageError(
            "--deepspeed_enable_sleep at --zero_stage 3 needs nvcc, to compile DeepSpeed's Adam: set CUDA_HOME to a "
            "CUDA toolkit, or give --zero_stage 2"
        )
    found = _toolkit_version(cuda_home)
    if found and torch_cuda and found.split(".")[0] != torch_cuda.split(".")[0]:
        raise UsageError(
            f"--deepspeed_enable_sleep at --zero_stage 3: the CUDA toolkit at {cuda_home} is {found}, and torch is "
            f"built for CUDA {torch_cuda}; set CUDA_HOME to a toolkit of that version, or give --zero_stage 2"
        )


def _toolkit_version(cuda_home: str) -> str | None:
    """Return the version of a CUDA toolkit by its compiler, "13.0"; None if the compiler does not answer."""
    try:
        done = subprocess.run([f"{cuda_home}/bin/nvcc", "--version"], capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return None
    release = re.search(r"release (\d+\.\d+)", done.stdout)
    return release and release[1]


def _adds_up_in_bf16(settings: DeepSpeedConfig, param_dtype: str, optimizer: OptimizerName) -> bool:
    """Return whether DeepSpeed has no other type than bf16 for sums of gradients.

    At stage 1 sums in float32 take DeepSpeed's BF16_Optimizer, which always copies the weights in float32.
    """
    last_stage = 1 if optimizer == "adamw_bf16" else 0
    return param_dtype == "bf16" and settings.zero_stage <= last_stage


OVERLAP_BUCKET = 200_000_000
"""Gradients reduced at a time where reduction overlaps: two such buckets take less memory than DeepSpeed's one."""

CPU_BUCKET = 20_000_000
"""Gradients reduced at a time in host memory. DeepSpeed's 500 million are a second copy of all gradients of a small
model."""


def overlaps(settings: DeepSpeedConfig, *, num_gpus: int) -> bool:
    """Return whether ranks communicate while they compute: as set, else if there are several GPUs.

    DeepSpeed's own default is the same at stage 3. Copies of gradients to host memory (`adam_offload`) have an order
    of their own, so nothing is overlapped beside them by default.
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
    """Return the DeepSpeed configuration of these settings. Raise UsageError as `check_deepspeed` does.

    One micro-batch is declared however many there are: the engine sets the accumulation boundary itself, because
    packing makes their number change from step to step.
    """
    check_deepspeed(settings, param_dtype=param_dtype, optimizer=optimizer)
    in_bf16 = optimizer == "adamw_bf16"
    # At stage 0 DeepSpeed leaves weights and step to the optimizer only if it takes the run for float32.
    is_left_alone = in_bf16 and settings.zero_stage == 0
    default = "bf16" if in_bf16 or _adds_up_in_bf16(settings, param_dtype, optimizer) else "fp32"
    sums = "fp32" if is_left_alone else settings.grad_accum_dtype or default
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": max_norm,
        "bf16": {
            "enabled": param_dtype == "bf16" and not is_left_alone,
            "bf16_master_weights_and_grads": in_bf16 and not is_left_alone,
            "bf16_optimizer_states": in_bf16 and not is_left_alone,
        },
        "data_types": {"grad_accum_dtype": sums},
        "communication_data_type": "fp32" if in_bf16 else sums,  # else sums over ranks are bf16 if the weights are
        "zero_optimization": _zero_config(settings, num_gpus=num_gpus),
        "zero_allow_untested_optimizer": optimizer != "adamw",
        "steps_per_print": 1 << 60,
    }


def _zero_config(settings: DeepSpeedConfig, *, num_gpus: int) -> dict[str, object]:
    overlap = overlaps(settings, num_gpus=num_gpus)
    zero: dict[str, object] = {"stage": settings.zero_stage, "overlap_comm": overlap}
    if num_gpus == 0:
        zero["reduce_bucket_size"] = CPU_BUCKET
    elif overlap and num_gpus > 1:
        zero["reduce_bucket_size"] = OVERLAP_BUCKET
    if settings.zero_stage == 3:
        zero |= {"zero_hpz_partition_size": settings.zpg}
        if settings.param_offload:
            zero["offload_param"] = {"device": "cpu", "pin_memory": torch.cuda.is_available()}
    if settings.adam_offload:
        zero["offload_optimizer"] = {"device": "cpu", "pin_memory": torch.cuda.is_available()}
    return zero
