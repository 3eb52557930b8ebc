"""Discards the gradients of an optimizer step that stopped in a micro-batch, so that the step can start again."""

from typing import Any

import torch
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.runtime.zero.stage_1_and_2 import INITIAL_MICRO_STEP_ID, DeepSpeedZeroOptimizer


def discard_gradients(engine: Any) -> None:
    """Bring a DeepSpeed engine back to the start of a step, at ZeRO 0 to 2 and with one rank.

    A backward pass that stops leaves gradients of some parameters in sums, buckets and hooks. With more ranks, the
    rest would wait in a collective for this one, and at ZeRO-3, layers would stay gathered.
    """
    engine.zero_grad()
    optimizer = engine.optimizer
    if isinstance(optimizer, BF16_Optimizer):
        optimizer.zero_grad()
    elif isinstance(optimizer, DeepSpeedZeroOptimizer):
        _discard_partitions(optimizer)
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _discard_partitions(optimizer: Any) -> None:
    optimizer.zero_grad(set_to_none=True)
    for bucket in optimizer.ipg_buckets.values():
        bucket.clear()
    optimizer.extra_large_param_to_reduce.clear()
    for params in optimizer.previous_reduced_grads.values():
        params.clear()
    optimizer.params_already_reduced = [False] * len(optimizer.params_already_reduced)
    for sums in (optimizer.averaged_gradients, optimizer.all_grad_tensors):
        sums.update(dict.fromkeys(sums))
    if optimizer.cpu_offload:
        optimizer.reset_cpu_buffers()
    # The next backward pass makes new buckets, and overwrites sums in host memory.
    optimizer.ready_for_gradients = False
    optimizer.micro_step_id = INITIAL_MICRO_STEP_ID
    # Without this, hooks would take the next backward pass for a part of the one that stopped.
    optimizer.exit_backward()
    optimizer.clear_backward_seen_flag()
