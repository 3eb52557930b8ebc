"""Muon (kellerjordan.github.io/posts/muon, arXiv 2502.16982) for matrices of hidden layers, AdamW for all else.

DeepSpeed has a Muon too. At ZeRO 2 it clips the orthogonalized update instead of the gradient and reports the norm of
the update, so its steps depend on the stage. Here an optimizer gets clipped gradients at every stage.
"""

from dataclasses import dataclass
from itertools import accumulate

import torch
import torch.distributed as dist
from deepspeed.runtime.base_optimizer import ZeROOptimizer
from torch.optim.optimizer import ParamsT

from rlhf_cli.algorithms.optimizer_steps import ParameterGroup, adamw_step, muon_update

MOMENTUM = 0.95


@dataclass(frozen=True)
class FlatPart:
    """This rank's part of the matrices of a group, which ZeRO lays end to end and cuts into parts of one size."""

    start: int
    size: int
    matrices: tuple[tuple[int, torch.Size], ...]  # where each one begins in the whole, and its shape

    def is_cut(self, offset: int, shape: torch.Size) -> bool:
        """Return whether several ranks have a part of this matrix."""
        return offset // self.size != (offset + shape.numel() - 1) // self.size

    def range_of(self, offset: int, shape: torch.Size) -> tuple[int, int]:
        """Return the elements of a matrix that this rank has, as a range within the matrix; empty if it has none."""
        low = max(offset, self.start) - offset
        return low, max(low, min(offset + shape.numel(), self.start + self.size) - offset)


class Muon(torch.optim.Optimizer):
    """Muon for groups with `use_muon`, AdamW for the others.

    `flat_parts` has an entry for each parameter that is a part of a group's flat tensor instead of a matrix.
    """

    def __init__(self, params: ParamsT, *, lr: float, betas: tuple[float, float], eps: float) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": 0.0, "use_muon": False})
        self.flat_parts: dict[torch.Tensor, FlatPart] = {}
        self.found_inf: torch.Tensor | None = None  # set to leave a step out, as of PyTorch's fused kernels

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update all parameters that have a gradient; every rank calls it."""
        if self.found_inf is not None:
            return
        for group in self.param_groups:
            update = self._step_of_muon if group["use_muon"] else self._step_of_adamw
            for parameter in group["params"]:
                if parameter.grad is not None:
                    update(parameter, parameter.grad, group)

    def _step_of_adamw(self, weight: torch.Tensor, gradient: torch.Tensor, group: ParameterGroup) -> None:
        state = self.state[weight]
        if not state:
            state["step"] = torch.zeros(())
            state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(weight), torch.zeros_like(weight)
        state["step"] += 1
        adamw_step(weight, gradient, state["exp_avg"], state["exp_avg_sq"], step=int(state["step"]), settings=group)

    def _step_of_muon(self, weight: torch.Tensor, gradient: torch.Tensor, group: ParameterGroup) -> None:
        state = self.state[weight]
        if not state:
            state["momentum_buffer"] = torch.zeros_like(weight)
        momentum = state["momentum_buffer"].lerp_(gradient, 1 - MOMENTUM)
        direction = gradient.lerp(momentum, MOMENTUM)  # Nesterov's: the momentum of the next step's gradient
        weight.mul_(1 - group["lr"] * group["weight_decay"])
        part = self.flat_parts.get(weight)
        if part is None:
            weight.add_(muon_update(direction), alpha=-group["lr"])
            return
        for offset, shape in part.matrices:
            _update_flat(weight, direction, part, offset=offset, shape=shape, lr=group["lr"])


def _update_flat(
    weight: torch.Tensor, direction: torch.Tensor, part: FlatPart, *, offset: int, shape: torch.Size, lr: float
) -> None:
    """Update this rank's elements of one matrix; ranks put a matrix together that several of them have."""
    low, high = part.range_of(offset, shape)
    own = slice(low + offset - part.start, high + offset - part.start)
    if part.is_cut(offset, shape):
        whole = direction.new_zeros(shape.numel())
        whole[low:high] = direction[own]
        dist.all_reduce(whole)
    else:
        whole = direction[own]
    if low < high:
        weight[own].add_(muon_update(whole.view(shape)).reshape(-1)[low:high], alpha=-lr)


def flat_parts(zero: ZeROOptimizer, *, rank: int) -> dict[torch.Tensor, FlatPart]:
    """Return this rank's parts under DeepSpeed's optimizer of stage 1 or 2, by the tensors that are stepped."""
    is_plain = hasattr(zero, "round_robin_bit16_groups")
    groups = zero.round_robin_bit16_groups if is_plain else zero.bf16_groups  # the latter at stage 1 in bf16
    found = {}
    for number, (group, parameters) in enumerate(zip(zero.optimizer.param_groups, groups, strict=True)):
        if not group["use_muon"]:
            continue
        (flat,) = group["params"]
        offsets = zero.round_robin_bit16_offsets[number] if is_plain else _ends([p.numel() for p in parameters])
        matrices = tuple((int(at), p.shape) for at, p in zip(offsets, parameters, strict=False))
        found[flat] = FlatPart(rank * flat.numel(), flat.numel(), matrices)
    return found


def _ends(sizes: list[int]) -> list[int]:
    """Return where each of several tensors begins that lie end to end, and the end of the last one."""
    return list(accumulate(sizes, initial=0))
