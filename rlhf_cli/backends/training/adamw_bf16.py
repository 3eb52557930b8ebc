"""AdamW whose weights and moments are all bfloat16: six bytes a parameter, without a float32 copy.

bfloat16 has 8 bits: an update below a 256th of a weight is lost if it is rounded to the nearest value. Each result is
therefore rounded at random, up with the probability of its distance from the value below, so that it is right in the
mean (arXiv 2010.06192, section 4.1). The paper's other way, Kahan sums, takes two more bytes a parameter and mends
the weights alone. The moments need the same: with a decay rate of 0.999 a second moment in bfloat16 would never fall.
"""

from collections.abc import Iterator
from hashlib import blake2b

import torch
from torch.optim.optimizer import ParamsT

from rlhf_cli.algorithms.optimizer_steps import ParameterGroup, adamw_step

CHUNK = 1 << 24
"""Elements that are updated at a time: their float32 copies take a few hundred MB beside states of any size."""
DROPPED_BITS = 16
"""Bits of a float32 that a bfloat16 lacks."""


def rounded_stochastically(values: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Return float32 values as bfloat16, each one of its two neighbours, with the value as their mean."""
    noise = torch.randint(1 << DROPPED_BITS, values.shape, dtype=torch.int32, device=values.device, generator=generator)
    bits = (values.view(torch.int32) + noise) & -(1 << DROPPED_BITS)
    return bits.view(torch.float32).bfloat16()


class AdamWBf16(torch.optim.Optimizer):
    """AdamW on bfloat16 weights with bfloat16 moments.

    The noise is a function of step, tensor and rank. It needs no state of its own, so that a continued run goes on bit
    for bit.

    Args:
        rank: a number for each rank that holds a part of the parameters; 0 on ranks that hold all of them, because
            they have to stay equal.
    """

    def __init__(
        self,
        params: ParamsT,
        *,
        lr: float,
        betas: tuple[float, float],
        eps: float,
        weight_decay: float = 0.0,
        rank: int = 0,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})
        self.found_inf: torch.Tensor | None = None  # set to leave a step out, as of PyTorch's fused kernels
        self._rank = rank
        self._ordinals: dict[torch.Tensor, int] = {}

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update all parameters that have a gradient."""
        if self.found_inf is not None:
            return
        for group in self.param_groups:
            for parameter in group["params"]:
                ordinal = self._ordinals.setdefault(parameter, len(self._ordinals))
                if parameter.grad is not None:
                    self._update(parameter, group, ordinal)

    def _update(self, parameter: torch.Tensor, group: ParameterGroup, ordinal: int) -> None:
        state = self.state[parameter]
        if not state:
            state["step"] = torch.zeros(())
            state["exp_avg"] = torch.zeros_like(parameter)
            state["exp_avg_sq"] = torch.zeros_like(parameter)
        state["step"] += 1
        step = int(state["step"])
        generator = torch.Generator(parameter.device).manual_seed(seed_of(self._rank, step, ordinal))
        assert parameter.grad is not None, "only parameters with a gradient are updated"
        for tensors in chunks(parameter, parameter.grad, state["exp_avg"], state["exp_avg_sq"]):
            update_chunk(*tensors, step=step, group=group, generator=generator)


def seed_of(*numbers: int) -> int:
    """Return 32 bits that depend on all of the numbers: a generator of the CPU reads no more of its seed."""
    return int.from_bytes(blake2b(repr(numbers).encode(), digest_size=4).digest())


def chunks(*tensors: torch.Tensor, size: int = CHUNK) -> Iterator[tuple[torch.Tensor, ...]]:
    """Yield the same rows of tensors of one shape, of about `size` elements."""
    rows = [torch.atleast_1d(tensor) for tensor in tensors]
    per_row = max(1, rows[0][:1].numel())
    yield from zip(*(tensor.split(max(1, size // per_row)) for tensor in rows), strict=True)


def update_chunk(
    weight: torch.Tensor,
    gradient: torch.Tensor,
    exp_avg: torch.Tensor,
    exp_avg_sq: torch.Tensor,
    *,
    step: int,
    group: ParameterGroup,
    generator: torch.Generator,
) -> None:
    """Take AdamW's step in float32 and round its results in place."""
    exact = [weight.float(), gradient.float(), exp_avg.float(), exp_avg_sq.float()]
    adamw_step(*exact, step=step, settings=group)
    for target, value in ((weight, exact[0]), (exp_avg, exact[2]), (exp_avg_sq, exact[3])):
        target.copy_(rounded_stochastically(value, generator))
