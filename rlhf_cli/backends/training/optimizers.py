"""Optimizers and learning rate schedules."""

from typing import Any

import torch
import torch.distributed as dist
from deepspeed.runtime.base_optimizer import ZeROOptimizer
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
from torch import nn
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.cpp_extension import CUDA_HOME
from transformers import get_scheduler

from rlhf_cli.backends.training.adamw_bf16 import AdamWBf16
from rlhf_cli.backends.training.deepspeed_config import check_compiler
from rlhf_cli.backends.training.muon import Muon, flat_parts
from rlhf_cli.config.train import DeepSpeedConfig, OptimConfig
from rlhf_cli.models.host_memory import keep_freed_memory
from rlhf_cli.models.policy import hidden_matrices, parameter_groups

_Groups = list[dict[str, Any]]


def make_optimizer(
    module: nn.Module, settings: DeepSpeedConfig, *, learning_rate: float, optim: OptimConfig, sleeps: bool = False
) -> torch.optim.Optimizer:
    """Create the optimizer for all trainable parameters, without weight decay on vectors (biases, norms)."""
    optimizer = _new_optimizer(module, settings, learning_rate=learning_rate, optim=optim, sleeps=sleeps)
    # Not earlier: until then, states above 32 MiB are mapped, and stay out of the gaps between freed activations.
    optimizer.register_step_post_hook(lambda *_: keep_freed_memory())
    return optimizer


def _new_optimizer(
    module: nn.Module, settings: DeepSpeedConfig, *, learning_rate: float, optim: OptimConfig, sleeps: bool
) -> torch.optim.Optimizer:
    groups = parameter_groups(module, optim.l2)
    lr, betas, eps = learning_rate, optim.adam_betas, optim.adam_eps
    # At stage 0 all ranks hold the same weights, so the rounding noise must not depend on the rank.
    if optim.optim == "adamw_bf16":
        rank = dist.get_rank() if settings.zero_stage > 0 else 0
        return AdamWBf16(groups, lr=lr, betas=betas, eps=eps, rank=rank)
    if optim.optim == "adamw_8bit":
        return _adamw_8bit(groups, lr=lr, betas=betas, eps=eps)
    if optim.optim == "muon":
        return Muon(_muon_groups(groups, hidden_matrices(module)), lr=lr, betas=betas, eps=eps)
    if settings.adam_offload:
        from deepspeed.ops.adam import DeepSpeedCPUAdam

        return DeepSpeedCPUAdam(groups, lr=lr, betas=betas, eps=eps, adamw_mode=True)
    if sleeps and settings.zero_stage == 3 and torch.cuda.is_available():
        # The only optimizer with states that DeepSpeed can move to host memory at stage 3. The constructor compiles it.
        from deepspeed.ops.adam import FusedAdam

        check_compiler(CUDA_HOME, torch_cuda=torch.version.cuda)
        return FusedAdam(groups, lr=lr, betas=betas, eps=eps, adam_w_mode=True)
    return torch.optim.AdamW(groups, lr=lr, betas=betas, eps=eps, fused=True)


def _adamw_8bit(groups: _Groups, *, lr: float, betas: tuple[float, float], eps: float) -> torch.optim.Optimizer:
    """Create AdamW with 8-bit blockwise-quantized moments, 256 values per block (arXiv 2110.02861)."""
    from bitsandbytes.optim import AdamW8bit

    optimizer: torch.optim.Optimizer = AdamW8bit(groups, lr=lr, betas=betas, eps=eps)
    optimizer.register_step_pre_hook(leave_out_if_not_finite)
    return optimizer


def leave_out_if_not_finite(optimizer: torch.optim.Optimizer, _: object, __: object) -> None:
    """Skip a step if `found_inf` is set, as PyTorch's fused optimizers do."""
    # bitsandbytes ignores `found_inf` but skips parameters without a gradient.
    if getattr(optimizer, "found_inf", None) is not None:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad = None


def _muon_groups(groups: _Groups, matrices: list[nn.Parameter]) -> _Groups:
    """Move matrices from each group into a new group for Muon with the same settings."""
    chosen = set(matrices)
    for_adamw = [group | {"params": [p for p in group["params"] if p not in chosen]} for group in groups]
    for_muon = [group | {"params": [p for p in group["params"] if p in chosen], "use_muon": True} for group in groups]
    return [group for group in for_adamw + for_muon if group["params"]]


def fit_to_partitions(optimizer: torch.optim.Optimizer, zero: ZeROOptimizer) -> None:
    """Adapt an optimizer to the parameter partitions in DeepSpeed's optimizer `zero` for stage 1 or 2."""
    is_plain = _is_float32_on_cpu(zero)
    if isinstance(optimizer, AdamWBf16) or is_plain:
        _share_weights(zero)
    if isinstance(optimizer, Muon):
        optimizer.flat_parts = flat_parts(zero, rank=dist.get_rank())
    elif is_plain and zero.gradient_accumulation_dtype == torch.float32:
        # DeepSpeed sums gradients in the tensor that the optimizer reads only if their dtype is not that of the
        # weights; otherwise, each step copies all gradients into it.
        zero._use_compact_grad_partition_buffer = lambda _: True


def _is_float32_on_cpu(zero: ZeROOptimizer) -> bool:
    """Return whether weights are float32 on a CPU, where master weights equal them and no state moves."""
    if not isinstance(zero, DeepSpeedZeroOptimizer) or zero.cpu_offload:
        return False
    weights: torch.Tensor = zero.bit16_groups_flat[0]
    return weights.dtype == torch.float32 and weights.device.type == "cpu"


def _share_weights(zero: ZeROOptimizer) -> None:
    """Make the optimizer update the weights directly, instead of DeepSpeed's copy in the same dtype."""
    for number, copy in enumerate(zero.single_partition_of_fp32_groups):
        copy.data = zero.parallel_partitioned_bit16_groups[number][dist.get_rank(zero.dp_process_group)].data
    # Each weight has a view of its master weights, which would keep the copy.
    zero._link_all_hp_params()


def make_schedule(optimizer: torch.optim.Optimizer, optim: OptimConfig, *, total_steps: int) -> LambdaLR:
    """Create the learning rate schedule with transformers' formulas, without the first step at rate 0.

    During a warm-up of w steps, step k has k/w of the peak rate. transformers would assign this rate to step k + 1, and
    train the first step with rate 0. After the warm-up, step k has the rate at position k - 1, so the last step is
    still above the final rate.
    """
    special = {"min_lr_rate": optim.min_lr_ratio} if optim.lr_scheduler == "cosine_with_min_lr" else None
    num_warmup_steps = optim.num_warmup_steps(total_steps)
    schedule = get_scheduler(
        optim.lr_scheduler,
        optimizer,
        num_warmup_steps=num_warmup_steps,
        num_training_steps=total_steps,
        scheduler_specific_kwargs=special,
    )
    factor_at = schedule.lr_lambdas[0]
    return LambdaLR(optimizer, lambda position: factor_at(position + (position < num_warmup_steps)))


def set_rates(optimizer: torch.optim.Optimizer, schedule: LambdaLR) -> None:
    """Set the optimizer's learning rates to the schedule's rates for the next step."""
    # The rates in a checkpoint may come from a release with another schedule.
    for group, peak, factor_at in zip(optimizer.param_groups, schedule.base_lrs, schedule.lr_lambdas, strict=True):
        group["lr"] = peak * factor_at(schedule.last_epoch)
