"""LM head product with hidden states, in chunks of tokens and blocks within a chunk.

A full `[tokens, vocabulary]` float32 tensor is never materialized. `logprobs.py` and `distillation.py` implement
functions of the logits.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F

from rlhf_cli.models.logit_sizes import BLOCK_BYTES, CHUNK_BYTES


@dataclass(frozen=True)
class LogitTransform:
    """Model-specific operations on the head output before softmax.

    `scale` multiplies (Cohere's `logit_scale`, the inverse of Granite's `logits_scaling`), then `softcap` c maps z to c
    tanh(z / c) (Gemma's `final_logit_softcapping`).
    """

    scale: float = 1.0
    softcap: float | None = None


@dataclass(frozen=True)
class HeadWeights:
    """LM head weight, optional bias and output transform."""

    weight_VD: torch.Tensor
    bias_V: torch.Tensor | None = None
    transform: LogitTransform = LogitTransform()

    def product(self, hidden_KD: torch.Tensor) -> torch.Tensor:
        """Compute the head output [K, V] in the operand dtype."""
        return F.linear(hidden_KD, self.weight_VD, self.bias_V)

    def first_rows(self, count: int) -> "HeadWeights":
        """Return the head restricted to the first vocabulary rows."""
        if count == len(self.weight_VD):
            return self
        bias_V = None if self.bias_V is None else self.bias_V[:count]
        return replace(self, weight_VD=self.weight_VD[:count], bias_V=bias_V)


@dataclass(frozen=True)
class ChunkSizes:
    """Rows per head product, and rows per float32 block."""

    chunk: int
    block: int

    def chunks(self, num_rows: int) -> Iterator[slice]:
        """Yield chunks that cover `num_rows` rows."""
        yield from _slices(0, num_rows, self.chunk)

    def blocks(self, chunk: slice) -> Iterator[tuple[slice, slice]]:
        """Yield the blocks in a chunk, as (slice of all rows, slice of the chunk)."""
        for rows in _slices(chunk.start, chunk.stop, self.block):
            yield rows, slice(rows.start - chunk.start, rows.stop - chunk.start)


def chunk_sizes(device: torch.device, *, row_bytes: int, block_row_bytes: int, chunk_size: int | None) -> ChunkSizes:
    """Choose chunk and block sizes from the memory limits; `chunk_size` overrides the rows per chunk.

    Args:
        row_bytes: product bytes per row.
        block_row_bytes: float32 logit bytes per row.
    """
    place = "cpu" if device.type == "cpu" else "cuda"
    return ChunkSizes(
        chunk=chunk_size or max(1, CHUNK_BYTES[place] // row_bytes),
        block=max(1, BLOCK_BYTES[place] // block_row_bytes),
    )


class _Sum:
    """Gradient accumulator: a single part is kept as is, more parts are added in a wide dtype."""

    def __init__(self, wide: torch.dtype) -> None:
        self._wide = wide
        self._total: torch.Tensor | None = None

    def add(self, part: torch.Tensor) -> None:
        """Add a part, which the accumulator may overwrite."""
        # With one chunk there is no rounding to avoid, and no wide copy of a large weight.
        self._total = part if self._total is None else self._total.to(self._wide).add_(part)

    def value(self, parameter: torch.Tensor) -> torch.Tensor:
        """Return the sum in the parameter's dtype; zeros if nothing was added."""
        return torch.zeros_like(parameter) if self._total is None else self._total.to(parameter.dtype)


class HeadGradients:
    """Gradients for hidden states, head weight and bias, accumulated over output gradients chunk by chunk.

    `needed` selects which of the three are computed.
    """

    def __init__(self, needed: tuple[bool, ...], hidden_KD: torch.Tensor, head: HeadWeights) -> None:
        wide = softmax_dtype(hidden_KD)
        self.head = head
        self._hidden_KD, self._wide = hidden_KD, wide
        self._needs_hidden, self._needs_weight, self._needs_bias = needed[:3]
        self._of_hidden_KD = torch.empty_like(hidden_KD) if self._needs_hidden else None
        self._of_weight, self._of_bias = _Sum(wide), _Sum(wide)

    def add(self, chunk: slice, grad_product: torch.Tensor) -> None:
        """Add the output gradient for a chunk of rows."""
        if self._of_hidden_KD is not None:
            # Write into the result: each chunk covers different rows, so no temporary is needed.
            torch.mm(grad_product, self.head.weight_VD, out=self._of_hidden_KD[chunk])
        if self._needs_weight:
            self._of_weight.add(grad_product.T @ self._hidden_KD[chunk])
        if self._needs_bias:
            # A sum over thousands of rows would lose small terms in bfloat16.
            self._of_bias.add(grad_product.sum(0, dtype=self._wide))

    def values(self) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
        """Return the three gradients, None for those not needed."""
        bias_V = self.head.bias_V
        return (
            self._of_hidden_KD,
            self._of_weight.value(self.head.weight_VD) if self._needs_weight else None,
            self._of_bias.value(bias_V) if self._needs_bias and bias_V is not None else None,
        )


def softmax_dtype(hidden: torch.Tensor) -> torch.dtype:
    """Return the logit dtype: float32, or float64 for float64 operands."""
    return torch.float64 if hidden.dtype == torch.float64 else torch.float32


def logits_of(product: torch.Tensor, transform: LogitTransform, temperature: float) -> torch.Tensor:
    """Apply transform and temperature to the head output. May return `product` unchanged."""
    logits = product.to(softmax_dtype(product))
    scale, softcap = transform.scale, transform.softcap
    if softcap is not None:
        return (logits * (scale / softcap)).tanh_().mul_(softcap / temperature)
    factor = scale / temperature
    return logits if factor == 1.0 else logits * factor


def product_gradient(
    grad: torch.Tensor, logits: torch.Tensor, transform: LogitTransform, temperature: float
) -> torch.Tensor:
    """Convert a `logits_of` gradient to a head output gradient. Overwrites `grad`."""
    scale, softcap = transform.scale, transform.softcap
    if softcap is not None:
        # z = (c / T) tanh(scale x / c), so dz/dx = (scale / T) (1 - (z T / c)^2).
        grad *= (logits * (temperature / softcap)).square_().neg_().add_(1.0)
    factor = scale / temperature
    return grad if factor == 1.0 else grad.mul_(factor)


def _slices(start: int, stop: int, size: int) -> Iterator[slice]:
    for first in range(start, stop, size):
        yield slice(first, min(first + size, stop))
