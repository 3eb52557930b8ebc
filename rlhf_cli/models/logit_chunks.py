"""The head's product with hidden states, cut into chunks of tokens and blocks of a chunk.

A `[tokens, vocabulary]` float32 tensor never exists as a whole. The functions of the logits are elsewhere:
`logprobs.py`, `distillation.py`.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F

CHUNK_BYTES = {"cpu": 256 * 2**20, "cuda": 512 * 2**20}
"""Product of one chunk with the head, in the operands' type. The weight's gradient is as large as the weight and is
added to once per chunk: fewer rows than a few hundred, and that costs more than the products."""
BLOCK_BYTES = {"cpu": 2**20, "cuda": 256 * 2**20}
"""Float32 logits of the rows of a chunk that are worked on at once: on a CPU the size of a core's cache."""


@dataclass(frozen=True)
class LogitTransform:
    """A model's operations on the head's output before the softmax.

    `scale` multiplies (Cohere's `logit_scale`, one over Granite's `logits_scaling`), then `softcap` c maps z to
    c tanh(z / c) (Gemma's `final_logit_softcapping`).
    """

    scale: float = 1.0
    softcap: float | None = None


@dataclass(frozen=True)
class HeadWeights:
    """The weight of a head, its bias if it has one, and what the model does with its output."""

    weight_VD: torch.Tensor
    bias_V: torch.Tensor | None = None
    transform: LogitTransform = LogitTransform()

    def product(self, hidden_KD: torch.Tensor) -> torch.Tensor:
        """Return the head's output [K, V] in the type of the operands."""
        return F.linear(hidden_KD, self.weight_VD, self.bias_V)

    def first_rows(self, count: int) -> "HeadWeights":
        """Return the head of the first tokens of the vocabulary."""
        if count == len(self.weight_VD):
            return self
        bias_V = None if self.bias_V is None else self.bias_V[:count]
        return replace(self, weight_VD=self.weight_VD[:count], bias_V=bias_V)


@dataclass(frozen=True)
class ChunkSizes:
    """The rows whose products exist at once, and of these the rows whose float32 logits do."""

    chunk: int
    block: int

    def chunks(self, num_rows: int) -> Iterator[slice]:
        """Yield the chunks of so many rows."""
        yield from _slices(0, num_rows, self.chunk)

    def blocks(self, chunk: slice) -> Iterator[tuple[slice, slice]]:
        """Yield the blocks of a chunk, as rows of the whole and as rows of the chunk."""
        for rows in _slices(chunk.start, chunk.stop, self.block):
            yield rows, slice(rows.start - chunk.start, rows.stop - chunk.start)


def chunk_sizes(device: torch.device, *, row_bytes: int, block_row_bytes: int, chunk_size: int | None) -> ChunkSizes:
    """Return the sizes that memory allows; `chunk_size` stands for the rows of a chunk if it is given.

    Args:
        row_bytes: bytes of the products of one row.
        block_row_bytes: bytes of its logits in float32.
    """
    place = "cpu" if device.type == "cpu" else "cuda"
    return ChunkSizes(
        chunk=chunk_size or max(1, CHUNK_BYTES[place] // row_bytes),
        block=max(1, BLOCK_BYTES[place] // block_row_bytes),
    )


class _Sum:
    """Parts of a gradient added up: one part as it is, several in a wide type."""

    def __init__(self, wide: torch.dtype) -> None:
        self._wide = wide
        self._total: torch.Tensor | None = None

    def add(self, part: torch.Tensor) -> None:
        """Take the part over."""
        self._total = part if self._total is None else self._total.to(self._wide).add_(part)

    def value(self, parameter: torch.Tensor) -> torch.Tensor:
        """Return the sum in the parameter's type; zeros without a part."""
        return torch.zeros_like(parameter) if self._total is None else self._total.to(parameter.dtype)


class HeadGradients:
    """The gradients of hidden states, weight and bias of a head, from the gradient of its output chunk by chunk.

    `needed` says which of the three are asked for.
    """

    def __init__(self, needed: tuple[bool, ...], hidden_KD: torch.Tensor, head: HeadWeights) -> None:
        wide = softmax_dtype(hidden_KD)
        self.head = head
        self._hidden_KD, self._wide = hidden_KD, wide
        self._needs_hidden, self._needs_weight, self._needs_bias = needed[:3]
        self._of_hidden_KD = torch.empty_like(hidden_KD) if self._needs_hidden else None
        self._of_weight, self._of_bias = _Sum(wide), _Sum(wide)

    def add(self, chunk: slice, grad_product: torch.Tensor) -> None:
        """Add the gradient of the head's output for a chunk of rows."""
        if self._of_hidden_KD is not None:
            torch.mm(grad_product, self.head.weight_VD, out=self._of_hidden_KD[chunk])
        if self._needs_weight:
            self._of_weight.add(grad_product.T @ self._hidden_KD[chunk])
        if self._needs_bias:
            self._of_bias.add(grad_product.sum(0, dtype=self._wide))

    def values(self) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
        """Return the three gradients, None for those that nobody needs."""
        bias_V = self.head.bias_V
        return (
            self._of_hidden_KD,
            self._of_weight.value(self.head.weight_VD) if self._needs_weight else None,
            self._of_bias.value(bias_V) if self._needs_bias and bias_V is not None else None,
        )


def softmax_dtype(hidden: torch.Tensor) -> torch.dtype:
    """Return the type of the logits: float32, or float64 for operands in it."""
    return torch.float64 if hidden.dtype == torch.float64 else torch.float32


def logits_of(product: torch.Tensor, transform: LogitTransform, temperature: float) -> torch.Tensor:
    """Return the head's output after transform and temperature; may be `product` itself."""
    logits = product.to(softmax_dtype(product))
    scale, softcap = transform.scale, transform.softcap
    if softcap is not None:
        return (logits * (scale / softcap)).tanh_().mul_(softcap / temperature)
    factor = scale / temperature
    return logits if factor == 1.0 else logits * factor


def product_gradient(
    grad: torch.Tensor, logits: torch.Tensor, transform: LogitTransform, temperature: float
) -> torch.Tensor:
    """Return the gradient of the head's output from the gradient of `logits_of`, which it overwrites."""
    scale, softcap = transform.scale, transform.softcap
    if softcap is not None:
        # z = (c / T) tanh(scale x / c), so dz/dx = (scale / T) (1 - (z T / c)^2).
        grad *= (logits * (temperature / softcap)).square_().neg_().add_(1.0)
    factor = scale / temperature
    return grad if factor == 1.0 else grad.mul_(factor)


def _slices(start: int, stop: int, size: int) -> Iterator[slice]:
    for first in range(start, stop, size):
        yield slice(first, min(first + size, stop))
