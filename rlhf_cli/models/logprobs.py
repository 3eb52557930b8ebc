"""Token log-probabilities and entropies from hidden states and the head's weight, in chunks of tokens.

A `[tokens, vocabulary]` float32 tensor never exists as a whole, neither in forward nor in backward: the backward pass
computes the logits of each chunk again. Which tokens are projected is decided by the caller.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable

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
class _Settings:
    transform: LogitTransform
    temperature: float
    with_entropy: bool
    chunk_size: int
    block_size: int


def token_logprobs(
    hidden_KD: torch.Tensor,
    weight_VD: torch.Tensor,
    targets_K: torch.Tensor,
    *,
    bias_V: torch.Tensor | None = None,
    temperature: float = 1.0,
    with_entropy: bool = False,
    transform: LogitTransform | None = None,
    chunk_size: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return the log-probabilities of `targets_K` in nats, float32 [K], and the entropies [K] of the distributions if
    asked for.

    The logits are `transform(hidden_KD @ weight_VD.T + bias_V) / temperature`; the product is in the type of the
    operands, everything after it in float32 (float64 for float64 operands). Both results are differentiable with
    respect to hidden states, weight and bias. `chunk_size` is the number of rows whose products exist at once; by
    default they take 256 MiB on a CPU and 512 MiB on a GPU.
    """
    if temperature <= 0:
        raise ValueError(f"temperature {temperature} is not positive: greedy decoding has no log-probabilities")
    place = "cpu" if hidden_KD.device.type == "cpu" else "cuda"
    vocabulary = weight_VD.shape[0]
    settings = _Settings(
        transform=transform or LogitTransform(),
        temperature=temperature,
        with_entropy=with_entropy,
        chunk_size=chunk_size or max(1, CHUNK_BYTES[place] // (vocabulary * hidden_KD.element_size())),
        block_size=max(1, BLOCK_BYTES[place] // (vocabulary * 4)),
    )
    logprobs_K, entropy_K = _TokenLogprobs.apply(hidden_KD, weight_VD, bias_V, targets_K, settings)
    return logprobs_K, entropy_K if with_entropy else None


class _TokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_KD: torch.Tensor,
        weight_VD: torch.Tensor,
        bias_V: torch.Tensor | None,
        targets_K: torch.Tensor,
        settings: _Settings,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        num_tokens = hidden_KD.shape[0]
        logprobs_K = torch.empty(num_tokens, dtype=_softmax_dtype(hidden_KD), device=hidden_KD.device)
        entropy_K = torch.empty_like(logprobs_K if settings.with_entropy else logprobs_K[:0])
        for chunk in _slices(0, num_tokens, settings.chunk_size):
            product = F.linear(hidden_KD[chunk], weight_VD, bias_V)
            for rows in _slices(chunk.start, chunk.stop, settings.block_size):
                logits = _logits(product[rows.start - chunk.start : rows.stop - chunk.start], settings)
                log_p = torch.log_softmax(logits, -1)
                logprobs_K[rows] = log_p.gather(-1, targets_K[rows, None]).squeeze(-1)
                if settings.with_entropy:
                    entropy_K[rows] = (log_p.exp() * log_p).sum(-1).neg_()
        ctx.set_materialize_grads(False)  # None for an entropy without weight, whose gradient costs a third more
        ctx.settings = settings
        ctx.save_for_backward(hidden_KD, weight_VD, bias_V, targets_K, entropy_K)
        return logprobs_K, entropy_K

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, grad_logprobs_K: torch.Tensor | None, grad_entropy_K: torch.Tensor | None
    ) -> tuple[object, ...]:
        hidden_KD, weight_VD, bias_V, targets_K, entropy_K = ctx.saved_tensors
        if grad_logprobs_K is None:
            grad_logprobs_K = torch.zeros(len(targets_K), dtype=_softmax_dtype(hidden_KD), device=hidden_KD.device)
        settings: _Settings = ctx.settings
        needs_hidden, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        wide = _softmax_dtype(hidden_KD)
        grad_hidden_KD = torch.empty_like(hidden_KD) if needs_hidden else None
        grad_weight_VD, grad_bias_V = _Sum(wide), _Sum(wide)
        for chunk in _slices(0, hidden_KD.shape[0], settings.chunk_size):
            product = F.linear(hidden_KD[chunk], weight_VD, bias_V)
            for rows in _slices(chunk.start, chunk.stop, settings.block_size):
                entropies = (entropy_K[rows], grad_entropy_K[rows]) if grad_entropy_K is not None else None
                # The block's logits are not needed again: their gradient takes their place.
                block = product[rows.start - chunk.start : rows.stop - chunk.start]
                grad = _grad_product(
                    block, settings, targets=targets_K[rows], grad_logprobs=grad_logprobs_K[rows], entropies=entropies
                )
                block.copy_(grad)
            if grad_hidden_KD is not None:
                torch.mm(product, weight_VD, out=grad_hidden_KD[chunk])
            if needs_weight:
                grad_weight_VD.add(product.T @ hidden_KD[chunk])
            if needs_bias:
                grad_bias_V.add(product.sum(0, dtype=wide))
        return (
            grad_hidden_KD,
            grad_weight_VD.value(weight_VD) if needs_weight else None,
            grad_bias_V.value(bias_V) if needs_bias else None,
            None,
            None,
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


def _slices(start: int, stop: int, size: int) -> Iterator[slice]:
    for first in range(start, stop, size):
        yield slice(first, min(first + size, stop))


def _softmax_dtype(hidden: torch.Tensor) -> torch.dtype:
    return torch.float64 if hidden.dtype == torch.float64 else torch.float32


def _logits(product: torch.Tensor, settings: _Settings) -> torch.Tensor:
    """Return the head's output after transform and temperature; may be `product` itself."""
    logits = product.to(_softmax_dtype(product))
    scale, softcap = settings.transform.scale, settings.transform.softcap
    if softcap is not None:
        return (logits * (scale / softcap)).tanh_().mul_(softcap / settings.temperature)
    factor = scale / settings.temperature
    return logits if factor == 1.0 else logits * factor


def _grad_product(
    product: torch.Tensor,
    settings: _Settings,
    *,
    targets: torch.Tensor,
    grad_logprobs: torch.Tensor,
    entropies: tuple[torch.Tensor, torch.Tensor] | None,
) -> torch.Tensor:
    """Return the gradient with respect to the head's output, for logits z, p = softmax(z), H its entropy.

    d logprob / dz_j = [j = target] - p_j and dH / dz_j = -p_j (log p_j + H). `entropies` are H and its gradient.
    """
    scale, softcap, temperature = settings.transform.scale, settings.transform.softcap, settings.temperature
    logits = _logits(product, settings)
    if entropies is None:
        grad = torch.softmax(logits, -1).mul_(-grad_logprobs[:, None])
    else:
        entropy, grad_entropy = (values[:, None] for values in entropies)
        log_p = torch.log_softmax(logits, -1)
        weights = (log_p + entropy).mul_(grad_entropy).add_(grad_logprobs[:, None])
        grad = log_p.exp_().mul_(weights).neg_()
    grad.scatter_add_(-1, targets[:, None], grad_logprobs[:, None])
    if softcap is not None:
        # z = (c / T) tanh(scale x / c), so dz/dx = (scale / T) (1 - (z T / c)^2).
        grad *= (logits * (temperature / softcap)).square_().neg_().add_(1.0)
    factor = scale / temperature
    return grad if factor == 1.0 else grad.mul_(factor)
