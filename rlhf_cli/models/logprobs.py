"""Token log-probabilities and entropies from hidden states and the head's weight, in chunks of tokens.

A `[tokens, vocabulary]` float32 tensor never exists as a whole, neither in forward nor in backward: the backward pass
computes the logits of each chunk again. Which tokens are projected is decided by the caller.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable

DEFAULT_CHUNK_BYTES = {"cpu": 16 * 2**20, "cuda": 256 * 2**20}
"""Float32 logits of one chunk: on a CPU about a cache's worth, on a GPU enough rows to fill the device."""


@dataclass(frozen=True)
class LogitTransform:
    """What a model does to the head's output before the softmax.

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
    """Log-probabilities of `targets_K` in nats, float32 [K], and the entropies [K] of the distributions if asked for.

    The logits are `transform(hidden_KD @ weight_VD.T + bias_V) / temperature`; the product is in the type of the
    operands, everything after it in float32 (float64 for float64 operands). Both results are differentiable with
    respect to hidden states, weight and bias. `chunk_size` is the number of rows whose logits exist at once; by
    default it is chosen so that they take 16 MiB on a CPU and 256 MiB elsewhere.
    """
    if temperature <= 0:
        raise ValueError(f"temperature {temperature} is not positive: greedy decoding has no log-probabilities")
    settings = _Settings(
        transform=transform or LogitTransform(),
        temperature=temperature,
        with_entropy=with_entropy,
        chunk_size=chunk_size or _default_chunk_size(weight_VD.shape[0], hidden_KD.device.type),
    )
    logprobs_K, entropy_K = _TokenLogprobs.apply(hidden_KD, weight_VD, bias_V, targets_K, settings)
    return logprobs_K, entropy_K if with_entropy else None


def _default_chunk_size(vocabulary: int, device_type: str) -> int:
    budget = DEFAULT_CHUNK_BYTES.get(device_type, DEFAULT_CHUNK_BYTES["cuda"])
    return max(1, budget // (4 * vocabulary))


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
        dtype = _softmax_dtype(hidden_KD)
        logprobs_K = torch.empty(num_tokens, dtype=dtype, device=hidden_KD.device)
        logsumexp_K = torch.empty_like(logprobs_K)
        entropy_K = torch.empty_like(logprobs_K if settings.with_entropy else logprobs_K[:0])
        for start in range(0, num_tokens, settings.chunk_size):
            rows = slice(start, start + settings.chunk_size)
            logits = _logits(hidden_KD[rows], weight_VD, bias_V, settings=settings)
            logsumexp = torch.logsumexp(logits, -1)
            logsumexp_K[rows] = logsumexp
            logprobs_K[rows] = logits.gather(-1, targets_K[rows, None]).squeeze(-1) - logsumexp
            if settings.with_entropy:
                logits -= logsumexp[:, None]
                entropy_K[rows] = -(logits.exp() * logits).sum(-1)
        ctx.settings = settings
        ctx.save_for_backward(hidden_KD, weight_VD, bias_V, targets_K, logsumexp_K, entropy_K)
        return logprobs_K, entropy_K

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_logprobs_K: torch.Tensor, grad_entropy_K: torch.Tensor) -> tuple[Any, ...]:
        hidden_KD, weight_VD, bias_V, targets_K, logsumexp_K, entropy_K = ctx.saved_tensors
        settings: _Settings = ctx.settings
        needs_hidden, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        dtype = logsumexp_K.dtype
        grad_hidden_KD = torch.empty_like(hidden_KD) if needs_hidden else None
        grad_weight_VD = torch.zeros_like(weight_VD, dtype=dtype) if needs_weight else None
        grad_bias_V = torch.zeros_like(bias_V, dtype=dtype) if bias_V is not None and needs_bias else None
        for start in range(0, hidden_KD.shape[0], settings.chunk_size):
            rows = slice(start, start + settings.chunk_size)
            grad_logits = _grad_logits(
                _logits(hidden_KD[rows], weight_VD, bias_V, settings=settings),
                targets_K[rows],
                logsumexp=logsumexp_K[rows],
                grad_logprobs=grad_logprobs_K[rows],
                entropy_and_grad=(entropy_K[rows], grad_entropy_K[rows]) if settings.with_entropy else None,
                settings=settings,
            )
            if grad_bias_V is not None:
                grad_bias_V += grad_logits.sum(0)
            grad_logits = grad_logits.to(hidden_KD.dtype)
            if grad_hidden_KD is not None:
                torch.mm(grad_logits, weight_VD, out=grad_hidden_KD[rows])
            if grad_weight_VD is not None:
                grad_weight_VD += grad_logits.T @ hidden_KD[rows]
        return (
            grad_hidden_KD,
            grad_weight_VD.to(weight_VD.dtype) if grad_weight_VD is not None else None,
            grad_bias_V.to(bias_V.dtype) if grad_bias_V is not None else None,
            None,
            None,
        )


def _softmax_dtype(hidden: torch.Tensor) -> torch.dtype:
    return torch.float64 if hidden.dtype == torch.float64 else torch.float32


def _logits(
    hidden_CD: torch.Tensor, weight_VD: torch.Tensor, bias_V: torch.Tensor | None, *, settings: _Settings
) -> torch.Tensor:
    """Logits of one chunk, after transform and temperature, owned by the caller."""
    logits = F.linear(hidden_CD, weight_VD, bias_V).to(_softmax_dtype(hidden_CD))
    scale, softcap = settings.transform.scale, settings.transform.softcap
    if softcap is not None:
        return logits.mul_(scale / softcap).tanh_().mul_(softcap / settings.temperature)
    factor = scale / settings.temperature
    return logits if factor == 1.0 else logits.mul_(factor)


def _grad_logits(
    logits: torch.Tensor,
    targets: torch.Tensor,
    *,
    logsumexp: torch.Tensor,
    grad_logprobs: torch.Tensor,
    entropy_and_grad: tuple[torch.Tensor, torch.Tensor] | None,
    settings: _Settings,
) -> torch.Tensor:
    """Gradient with respect to the head's output, for z = logits, p = softmax(z), H its entropy.

    d logprob / dz_j = [j = target] - p_j and dH / dz_j = -p_j (log p_j + H). Overwrites `logits`.
    """
    scale, softcap, temperature = settings.transform.scale, settings.transform.softcap, settings.temperature
    slope = None
    if softcap is not None:
        # z = (c / T) tanh(scale x / c), so dz/dx = (scale / T) (1 - (z T / c)^2).
        slope = (logits * (temperature / softcap)).square_().neg_().add_(1.0)
    logits -= logsumexp[:, None]
    weights = grad_logprobs[:, None]
    if entropy_and_grad is not None:
        entropy, grad_entropy = entropy_and_grad
        weights = (logits + entropy[:, None]).mul_(grad_entropy[:, None]).add_(weights)
    grad = logits.exp_().mul_(weights).neg_()
    grad.scatter_add_(-1, targets[:, None], grad_logprobs[:, None])
    if slope is not None:
        grad *= slope
    factor = scale / temperature
    return grad if factor == 1.0 else grad.mul_(factor)
