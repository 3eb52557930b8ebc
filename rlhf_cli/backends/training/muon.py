"""Muon (kellerjordan.github.io/posts/muon, arXiv 2502.16982) for hidden matrices, AdamW for all other parameters.

DeepSpeed's Muon is not used: at ZeRO 2, it clips the orthogonalized update instead of the gradient, so results depend
on the stage. This optimizer receives clipped gradients at every stage.
"""

from dataclasses import dataclass
from itertools import accumulate

import torch
import torch.distributed as dist
from deepspeed.runtime.base_optimizer import ZeROOptimizer
from torch.optim.optimizer import ParamsT

from rlhf_cli.algorithms.optimizer_steps import ParameterGroup, adamw_step, muon_update

_MOMENTUM = 0.95


@dataclass(frozen=True)
class FlatPart:
    """This rank's partition of a parameter group. ZeRO concatenates the matrices and splits them into equal parts."""

    start: int
    size: int
    # Offset in the concatenation, and shape.
    matrices: tuple[tuple[int, torch.Size], ...]

    def is_cut(self, offset: int, shape: torch.Size) -> bool:
        """Return whether this matrix is split over ranks."""
        return offset // self.size != (offset + shape.numel() - 1) // self.size

    def range_of(self, offset: int, shape: torch.Size) -> tuple[int, int]:
        """Return the range of a matrix's elements on this rank; empty if there are none."""
        low = max(offset, self.start) - offset
        return low, max(low, min(offset + shape.numel(), self.start + self.size) - offset)


class Muon(torch.optim.Optimizer):
    """Muon for groups with `use_muon`, AdamW for all other groups.

    Under ZeRO, parameters are partitions of flat tensors instead of matrices. `flat_parts` describes them.
    """

    def __init__(self, params: ParamsT, *, lr: float, betas: tuple[float, float], eps: float) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": 0.0, "use_muon": False})
        self.flat_parts: dict[torch.Tensor, FlatPart] = {}
        # If set, the next step is skipped, as in PyTorch's fused optimizers.
        self.found_inf: torch.Tensor | None = None

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update all parameters with a gradient. Call it on all ranks."""
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
        momentum = state["momentum_buffer"].lerp_(gradient, 1 - _MOMENTUM)
        # Nesterov momentum.
        direction = gradient.lerp(momentum, _MOMENTUM)
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
    """Update this rank's elements of a matrix. If the matrix is split, ranks first gather the full direction."""
    low, high = part.range_of(offset, shape)
    own = slice(low + offset - part.start, high + offset - part.start)
    # Orthogonalization needs the full matrix. The sum of disjoint parts is exact. All ranks join, even those without a
    # part, because the reduction is a collective.
    if part.is_cut(offset, shape):
        full = direction.new_zeros(shape.numel())
        full[low:high] = direction[own]
        dist.all_reduce(full)
    else:
        full = direction[own]
    if low < high:
        weight[own].add_(muon_update(full.view(shape)).reshape(-1)[low:high], alpha=-lr)


def flat_parts(zero: ZeROOptimizer, *, rank: int) -> dict[torch.Tensor, FlatPart]:
    """Return this rank's partitions in DeepSpeed's optimizer for stage 1 or 2, by optimizer parameter."""
    # Stage 1 in bf16 with fp32 gradients uses BF16_Optimizer, which has other attributes than stages 1 and 2 otherwise.
    is_plain = hasattr(zero, "round_robin_bit16_groups")
    groups = zero.round_robin_bit16_groups if is_plain else zero.bf16_groups
    parts = {}
    for number, (group, parameters) in enumerate(zip(zero.optimizer.param_groups, groups, strict=True)):
        if not group["use_muon"]:
            continue
        (flat,) = group["params"]
        offsets = zero.round_robin_bit16_offsets[number] if is_plain else _ends([p.numel() for p in parameters])
        matrices = tuple((int(at), p.shape) for at, p in zip(offsets, parameters, strict=False))
        parts[flat] = FlatPart(rank * flat.numel(), flat.numel(), matrices)
    return parts


def _ends(sizes: list[int]) -> list[int]:
    """Return the offset of each tensor in their concatenation, and the total size."""
    return list(accumulate(sizes, initial=0))
