"""The optimizer and the learning rate schedule of a model in training, from their settings."""

import torch
import torch.distributed as dist
from torch import nn
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.cpp_extension import CUDA_HOME
from transformers import get_scheduler

from rlhf_cli.backends.training.adamw_bf16 import AdamWBf16
from rlhf_cli.config.train import DeepSpeedConfig, OptimConfig
from rlhf_cli.errors import UsageError
from rlhf_cli.models.policy import parameter_groups


def make_optimizer(
    module: nn.Module, settings: DeepSpeedConfig, *, learning_rate: float, optim: OptimConfig, sleeps: bool = False
) -> torch.optim.Optimizer:
    """Return the optimizer of the trainable parameters, without weight decay on vectors (biases, norms)."""
    groups = parameter_groups(module, optim.l2)
    lr, betas, eps = learning_rate, optim.adam_betas, optim.adam_eps
    if optim.optim == "adamw_bf16":
        rank = dist.get_rank() if settings.zero_stage > 0 else 0
        return AdamWBf16(groups, lr=lr, betas=betas, eps=eps, rank=rank)
    if settings.adam_offload:
        from deepspeed.ops.adam import DeepSpeedCPUAdam

        return DeepSpeedCPUAdam(groups, lr=lr, betas=betas, eps=eps, adamw_mode=True)
    if sleeps and settings.zero_stage == 3 and torch.cuda.is_available():
        from deepspeed.ops.adam import FusedAdam  # the only one whose states stage 3 can move to host memory

        check_compiler(CUDA_HOME)
        return FusedAdam(groups, lr=lr, betas=betas, eps=eps, adam_w_mode=True)
    return torch.optim.AdamW(groups, lr=lr, betas=betas, eps=eps, fused=True)


def check_compiler(cuda_home: str | None) -> None:
    """Raise UsageError if there is no CUDA toolkit, with which DeepSpeed compiles its Adam on first use."""
    if cuda_home is None:
        raise UsageError(
            "--deepspeed_enable_sleep at --zero_stage 3 needs nvcc, to compile DeepSpeed's Adam: set CUDA_HOME to a "
            "CUDA toolkit, or give --zero_stage 2"
        )


def make_schedule(optimizer: torch.optim.Optimizer, optim: OptimConfig, *, total_steps: int) -> LambdaLR:
    """Return the course of the learning rate, from transformers, begun one step later: there the first step has
    rate 0.
    """
    special = {"min_lr_rate": optim.min_lr_ratio} if optim.lr_scheduler == "cosine_with_min_lr" else None
    course = get_scheduler(
        optim.lr_scheduler,
        optimizer,
        num_warmup_steps=optim.num_warmup_steps(total_steps),
        num_training_steps=total_steps,
        scheduler_specific_kwargs=special,
    )
    factor_at = course.lr_lambdas[0]
    return LambdaLR(optimizer, lambda step: factor_at(step + 1))
