"""AdamW with bfloat16 weights and moments: six bytes per parameter, without fp32 master weights.

bfloat16 has 8 bits of precision: with rounding to nearest, updates below 1/256 of a weight are lost. This optimizer
uses stochastic rounding, which is exact on average (arXiv 2010.06192, section 4.1). The paper's alternative, Kahan
summation, needs two more bytes per parameter and helps only the weights. The moments need it too: with beta2 = 0.999, a
second moment in bfloat16 would never decrease.
"""

from collections.abc import Iterator
from hashlib import blake2b

import torch
from torch.optim.optimizer import ParamsT

from rlhf_cli.algorithms.optimizer_steps import ParameterGroup, adamw_step

# The fp32 copies of a chunk need a few hundred MB, independent of the model size.
_CHUNK = 1 << 24
"""Elements updated at a time."""
_DROPPED_BITS = 16
"""Mantissa bits that bfloat16 drops from float32."""


def rounded_stochastically(values: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Round float32 to bfloat16 stochastically: up or down, with the exact value as the mean."""
    # Adding uniform noise to the dropped bits and truncating rounds up with a probability proportional to the distance.
    noise = torch.randint(
        1 << _DROPPED_BITS, values.shape, dtype=torch.int32, device=values.device, generator=generator
    )
    bits = (values.view(torch.int32) + noise) & -(1 << _DROPPED_BITS)
    return bits.view(torch.float32).bfloat16()


class AdamWBf16(torch.optim.Optimizer):
    """AdamW with bfloat16 weights and moments.

    The rounding noise is a function of step, tensor and rank. It has no state, so resumed runs are bit-identical.

    Args:
        params: parameters or groups, as in `torch.optim.AdamW`.
        lr, betas, eps, weight_decay: as in `torch.optim.AdamW`.
        rank: the rank if each rank has a part of the parameters; 0 if every rank has all of them, because they must
            stay equal.
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
        # If set, the next step is skipped, as in PyTorch's fused optimizers.
        self.found_inf: torch.Tensor | None = None
        self._rank = rank
        self._ordinals: dict[torch.Tensor, int] = {}

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update all parameters with a gradient."""
        if self.found_inf is not None:
            return
        for group in self.param_groups:
            for parameter in group["params"]:
                # Numbered before checking the gradient, so that numbers do not depend on which gradients exist.
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
        generator = torch.Generator(parameter.device).manual_seed(_seed_of(self._rank, step, ordinal))
        assert parameter.grad is not None, "the parameter has no gradient"
        for tensors in chunks(parameter, parameter.grad, state["exp_avg"], state["exp_avg_sq"]):
            _update_chunk(*tensors, step=step, group=group, generator=generator)


def _seed_of(*numbers: int) -> int:
    """Hash numbers to a 32-bit seed."""
    # A CPU generator uses only 32 bits of its seed.
    return int.from_bytes(blake2b(repr(numbers).encode(), digest_size=4).digest())


def chunks(*tensors: torch.Tensor, size: int = _CHUNK) -> Iterator[tuple[torch.Tensor, ...]]:
    """Split tensors with equal shapes along the first dimension into chunks with about `size` elements."""
    rows = [torch.atleast_1d(tensor) for tensor in tensors]
    per_row = max(1, rows[0][:1].numel())
    yield from zip(*(tensor.split(max(1, size // per_row)) for tensor in rows), strict=True)


def _update_chunk(
    weight: torch.Tensor,
    gradient: torch.Tensor,
    exp_avg: torch.Tensor,
    exp_avg_sq: torch.Tensor,
    *,
    step: int,
    group: ParameterGroup,
    generator: torch.Generator,
) -> None:
    """Compute AdamW in float32 and round the results in place."""
    exact = [weight.float(), gradient.float(), exp_avg.float(), exp_avg_sq.float()]
    adamw_step(*exact, step=step, settings=group)
    for target, value in ((weight, exact[0]), (exp_avg, exact[2]), (exp_avg_sq, exact[3])):
        target.copy_(rounded_stochastically(value, generator))
