"""Token log-probs and entropies from hidden states and the LM head weight, in chunks of tokens.

A full `[tokens, vocabulary]` float32 tensor is never materialized: the backward pass recomputes each chunk of logits.
The caller selects the tokens to project.
"""

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch.autograd.function import once_differentiable

from rlhf_cli.models.logit_chunks import (
    ChunkSizes,
    HeadGradients,
    HeadWeights,
    LogitTransform,
    chunk_sizes,
    logits_of,
    product_gradient,
    softmax_dtype,
)

Second = Literal["entropy", "log_squares"]


@dataclass(frozen=True)
class _Settings:
    transform: LogitTransform
    temperature: float
    second: Second | None
    sizes: ChunkSizes


def token_logprobs(
    hidden_KD: torch.Tensor,
    weight_VD: torch.Tensor,
    targets_K: torch.Tensor,
    *,
    bias_V: torch.Tensor | None = None,
    temperature: float = 1.0,
    second: Second | None = None,
    transform: LogitTransform | None = None,
    chunk_size: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Compute log-probs of `targets_K` in nats, float32 [K], and a `second` value per token [K] if requested: the
    entropy, or `log sum_v p_v^2`, which has no gradient.

    Logits are `transform(hidden_KD @ weight_VD.T + bias_V) / temperature`. The product is in the operand dtype, the
    rest in float32 (float64 for float64 operands). Log-probs and entropies are differentiable with respect to hidden
    states, weight and bias. `chunk_size` is the number of rows per head product; by default, a product has 256 MiB on a
    CPU and 512 MiB on a GPU.
    """
    if temperature <= 0:
        raise ValueError(f"temperature {temperature} is not positive: log-probs are undefined for greedy decoding")
    vocabulary = len(weight_VD)
    sizes = chunk_sizes(
        hidden_KD.device,
        row_bytes=vocabulary * hidden_KD.element_size(),
        block_row_bytes=vocabulary * 4,
        chunk_size=chunk_size,
    )
    settings = _Settings(transform or LogitTransform(), temperature, second, sizes)
    logprobs_K, second_K = _TokenLogprobs.apply(hidden_KD, weight_VD, bias_V, targets_K, settings)
    if second == "log_squares":
        return logprobs_K, second_K.detach()
    return logprobs_K, second_K if second else None


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
        num_tokens, head = hidden_KD.shape[0], HeadWeights(weight_VD, bias_V)
        logprobs_K = torch.empty(num_tokens, dtype=softmax_dtype(hidden_KD), device=hidden_KD.device)
        second_K = torch.empty_like(logprobs_K if settings.second else logprobs_K[:0])
        for chunk in settings.sizes.chunks(num_tokens):
            product = head.product(hidden_KD[chunk])
            for rows, block in settings.sizes.blocks(chunk):
                log_p = torch.log_softmax(logits_of(product[block], settings.transform, settings.temperature), -1)
                logprobs_K[rows] = log_p.gather(-1, targets_K[rows, None]).squeeze(-1)
                if settings.second == "entropy":
                    second_K[rows] = log_p.exp().mul_(log_p).sum(-1).neg_()
                if settings.second == "log_squares":
                    second_K[rows] = log_p.mul(2).logsumexp(-1)
                # Otherwise it would exist with the logits of the next block.
                del log_p
        # Pass None instead of zeros for an unused entropy: its gradient would cost a third more.
        ctx.set_materialize_grads(False)
        ctx.settings = settings
        # Not as attributes: save_for_backward applies saved-tensor hooks (activation offload) and detects in-place
        # changes.
        ctx.save_for_backward(hidden_KD, weight_VD, bias_V, targets_K, second_K)
        return logprobs_K, second_K

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, grad_logprobs_K: torch.Tensor | None, grad_entropy_K: torch.Tensor | None
    ) -> tuple[object, ...]:
        hidden_KD, weight_VD, bias_V, targets_K, entropy_K = ctx.saved_tensors
        wide = softmax_dtype(hidden_KD)
        if grad_logprobs_K is None:
            grad_logprobs_K = torch.zeros(len(targets_K), dtype=wide, device=hidden_KD.device)
        settings: _Settings = ctx.settings
        gradients = HeadGradients(ctx.needs_input_grad, hidden_KD, HeadWeights(weight_VD, bias_V))
        for chunk in settings.sizes.chunks(hidden_KD.shape[0]):
            product = gradients.head.product(hidden_KD[chunk])
            for rows, block in settings.sizes.blocks(chunk):
                entropies = (entropy_K[rows], grad_entropy_K[rows]) if grad_entropy_K is not None else None
                # The gradient overwrites the product: the logits in this block are no longer needed.
                product[block] = _grad_product(
                    product[block],
                    settings,
                    targets=targets_K[rows],
                    grad_logprobs=grad_logprobs_K[rows],
                    entropies=entropies,
                )
            gradients.add(chunk, product)
        return *gradients.values(), None, None


def _grad_product(
    product: torch.Tensor,
    settings: _Settings,
    *,
    targets: torch.Tensor,
    grad_logprobs: torch.Tensor,
    entropies: tuple[torch.Tensor, torch.Tensor] | None,
) -> torch.Tensor:
    """Compute the gradient with respect to the head output, for logits z, p = softmax(z) and entropy H.

    d logprob / dz_j = [j = target] - p_j and dH / dz_j = -p_j (log p_j + H). `entropies` contains H and its gradient.
    """
    logits = logits_of(product, settings.transform, settings.temperature)
    if entropies is None:
        grad = torch.softmax(logits, -1).mul_(-grad_logprobs[:, None])
    else:
        entropy, grad_entropy = (values[:, None] for values in entropies)
        log_p = torch.log_softmax(logits, -1)
        weights = (log_p + entropy).mul_(grad_entropy).add_(grad_logprobs[:, None])
        grad = log_p.exp_().mul_(weights).neg_()
    grad.scatter_add_(-1, targets[:, None], grad_logprobs[:, None])
    return product_gradient(grad, logits, settings.transform, settings.temperature)
