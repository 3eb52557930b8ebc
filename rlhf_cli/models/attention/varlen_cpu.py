"""CPU attention within each packed sequence, causal or bidirectional, forward and backward, as one operator.

PyTorch's CPU flash kernel spends most of the backward pass on padding for short sequences. `kernel` compiles one
without this cost. The code here is the fallback without a compiler and for dtypes other than float32 and bfloat16. It
uses matrix products over query blocks, batches the query heads that share a key head, and skips keys beyond the
diagonal block. The backward pass recomputes probabilities, so memory is linear in the length.
"""

import itertools
from collections.abc import Iterator
from typing import Any

import torch
from torch.nn.functional import pad

from rlhf_cli.models.attention.kernel import NAMES, Operands, VarlenKernel, varlen_kernel
from rlhf_cli.models.compat import softmax_backward

_BLOCK = 128
"""Query rows per block: scores for 8 heads and a few hundred keys then fit a core's cache."""
BOTH_WAYS = -1
"""`window` value for bidirectional attention."""


# A custom operator is opaque to torch.compile, which would otherwise trace the Python loop and stop at ctypes.
@torch.library.custom_op("rlhf_cli::varlen_attention", mutates_args=(), device_types="cpu")
def varlen_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cu_seqlens: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    scale: float,
    window: int,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Compute attention [T, heads, value size] from query [T, heads, size], key and value [U, kv heads, size].

    `cu_seqlens` [S + 1] bounds the queries per sequence, `cu_seqlens_k` the keys. A sequence may have more keys than
    queries; these come first, and the last query attends to the last key. `window` is the number of visible tokens
    including the query, 0 for all preceding tokens, or `BOTH_WAYS`. `sinks` [heads] are the logits of one more key per
    head, with value 0. Scores and softmax are float32 (float64 for float64 operands).
    """
    if kernel := _kernel(query):
        return kernel.forward(Operands(query, key, value, cu_seqlens, cu_seqlens_k, scale, window, sinks))
    output = query.new_empty(*query.shape[:2], value.shape[-1])
    query_GNTD, output_GNTD = _grouped(query, key.shape[1]), _grouped(output, key.shape[1])
    key_GTD, value_GTD = key.transpose(0, 1), value.transpose(0, 1)
    masks = _Masks(query, window)
    for queries, keys, offset in _blocks(cu_seqlens, cu_seqlens_k, window):
        inputs = _rows(query_GNTD, queries), key_GTD[:, keys], value_GTD[:, keys]
        rows = queries.stop - queries.start
        result = _attend(*inputs, masks.of(rows, offset), _of_rows(sinks, key.shape[1], rows), scale=scale)
        output_GNTD[:, :, queries] = result.unflatten(1, (-1, rows))
    return output


@varlen_attention.register_fake
def _(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cu_seqlens: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    scale: float,
    window: int,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    return query.new_empty(*query.shape[:2], value.shape[-1])


@torch.library.custom_op("rlhf_cli::varlen_attention_backward", mutates_args=(), device_types="cpu")
def _varlen_attention_backward(
    grad: torch.Tensor, tensors: list[torch.Tensor], scale: float, window: int
) -> list[torch.Tensor]:
    """Compute the gradients of query, key, value and any sinks in their shapes and dtypes, accumulated in float32.

    `tensors` are those of `varlen_attention`, in order.
    """
    query, key, value, cu_seqlens, cu_seqlens_k, *sinks = tensors
    if kernel := _kernel(query):
        operands = Operands(query, key, value, cu_seqlens, cu_seqlens_k, scale, window, *sinks)
        *grads, of_sinks = kernel.backward(grad, operands)
        return [*grads, *(of_sinks.to(sink.dtype) for sink in sinks)]
    num_groups, wide = key.shape[1], _wide(query.dtype)
    grad_query = query.new_empty(query.shape)
    # Query blocks and the heads in a group add to the same keys, which would round repeatedly in bfloat16.
    grad_key, grad_value = key.new_zeros(key.shape, dtype=wide), value.new_zeros(value.shape, dtype=wide)
    query_GNTD, grad_query_GNTD = _grouped(query, num_groups), _grouped(grad_query, num_groups)
    grad_GNTD = _grouped(grad, num_groups)
    grad_sinks_GN = query.new_zeros(query_GNTD.shape[:2], dtype=wide)
    key_GTD, value_GTD = key.transpose(0, 1), value.transpose(0, 1)
    grad_key_GTD, grad_value_GTD = grad_key.transpose(0, 1), grad_value.transpose(0, 1)
    masks = _Masks(query, window)
    for queries, keys, offset in _blocks(cu_seqlens, cu_seqlens_k, window):
        inputs = _rows(query_GNTD, queries), key_GTD[:, keys], value_GTD[:, keys]
        rows = queries.stop - queries.start
        extra = masks.of(rows, offset), _of_rows(sinks[0] if sinks else None, num_groups, rows)
        of_block = _attend_backward(_rows(grad_GNTD, queries), *inputs, *extra, scale=scale)
        grad_query_GNTD[:, :, queries] = of_block[0].unflatten(1, (-1, rows))
        grad_key_GTD[:, keys] += of_block[1]
        grad_value_GTD[:, keys] += of_block[2]
        grad_sinks_GN += of_block[3].unflatten(1, (-1, rows)).sum((2, 3))
    of_sinks = [grad_sinks_GN.flatten().to(sink.dtype) for sink in sinks]
    return [grad_query, grad_key.to(key.dtype), grad_value.to(value.dtype), *of_sinks]


@_varlen_attention_backward.register_fake
def _(grad: torch.Tensor, tensors: list[torch.Tensor], scale: float, window: int) -> list[torch.Tensor]:
    query, key, value, _, _, *sinks = tensors
    return [tensor.new_empty(tensor.shape) for tensor in (query, key, value, *sinks)]


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    *tensors, ctx.scale, ctx.window, sinks = inputs
    # The output is not saved: the backward pass recomputes probabilities from query and key.
    ctx.save_for_backward(*tensors, *([] if sinks is None else [sinks]))


def _backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    *grads, of_sinks = [*_varlen_attention_backward(grad, list(ctx.saved_tensors), ctx.scale, ctx.window), None][:4]
    return (*grads, None, None, None, None, of_sinks)


varlen_attention.register_autograd(_backward, setup_context=_setup_context)


def _kernel(like: torch.Tensor) -> VarlenKernel | None:
    return varlen_kernel() if like.dtype in NAMES else None


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _grouped(tensor_THD: torch.Tensor, num_groups: int) -> torch.Tensor:
    """View [T, heads, size] as [groups, heads per group, T, size]."""
    return tensor_THD.unflatten(1, (num_groups, -1)).permute(1, 2, 0, 3)


def _of_rows(sinks: torch.Tensor | None, num_groups: int, rows: int) -> torch.Tensor | None:
    """Return the sinks [heads] of the rows in a block, as [groups, heads per group * rows, 1]."""
    return None if sinks is None else sinks.unflatten(0, (num_groups, -1)).repeat_interleave(rows, 1)[..., None]


def _rows(tensor_GNTD: torch.Tensor, queries: slice) -> torch.Tensor:
    """Return [groups, heads per group * rows, size]: heads that share a key head become rows of one product."""
    return tensor_GNTD[:, :, queries].flatten(1, 2)


def _blocks(cu_seqlens: torch.Tensor, cu_seqlens_k: torch.Tensor, window: int) -> Iterator[tuple[slice, slice, int]]:
    """Yield (queries, keys, offset) for all sequences, in similar-sized blocks of about _BLOCK queries.

    `keys` are all visible keys. `offset` is the number of keys before the first query's key.
    """
    bounds, bounds_k = itertools.pairwise(cu_seqlens.tolist()), itertools.pairwise(cu_seqlens_k.tolist())
    for (start, end), (start_k, end_k) in zip(bounds, bounds_k, strict=True):
        if start == end:
            continue
        length, shift = end - start, end_k - end
        count = max(1, (length + _BLOCK // 2) // _BLOCK)
        cuts = [start + length * index // count for index in range(count + 1)]
        for first, stop in itertools.pairwise(cuts):
            first_key = max(start_k, first + shift - window + 1) if window > 0 else start_k
            last_key = end_k if window == BOTH_WAYS else stop + shift
            yield slice(first, stop), slice(first_key, last_key), first + shift - first_key


class _Masks:
    """Additive masks for the blocks in one call, sliced from a single triangle if possible."""

    def __init__(self, like: torch.Tensor, window: int) -> None:
        # _blocks rounds the block count, so a block may have up to 1.5 _BLOCK rows.
        self._triangle = torch.full((2 * _BLOCK, 2 * _BLOCK), -torch.inf, dtype=_wide(like.dtype)).triu_(1)
        self._window = window

    def of(self, rows: int, offset: int) -> torch.Tensor:
        """Return a mask [rows, c] for the last c of `offset + rows` keys; all rows see the earlier keys."""
        if self._window == BOTH_WAYS:
            return self._triangle.new_zeros(rows, 1)
        if not self._window or offset + rows <= self._window:
            return self._triangle[:rows, :rows]
        distance = torch.arange(rows)[:, None] + offset - torch.arange(offset + rows)
        hidden = (distance < 0) | (distance >= self._window)
        return torch.zeros(hidden.shape, dtype=self._triangle.dtype).masked_fill_(hidden, -torch.inf)


def _attend(
    query_BRD: torch.Tensor,
    key_BTD: torch.Tensor,
    value_BTD: torch.Tensor,
    mask: torch.Tensor,
    sinks_BR1: torch.Tensor | None,
    *,
    scale: float,
) -> torch.Tensor:
    probabilities = _probabilities(query_BRD, key_BTD, mask, sinks_BR1, scale=scale)
    return torch.bmm(probabilities[..., : key_BTD.shape[1]].to(value_BTD.dtype), value_BTD)


def _attend_backward(
    grad_BRD: torch.Tensor,
    query_BRD: torch.Tensor,
    key_BTD: torch.Tensor,
    value_BTD: torch.Tensor,
    mask: torch.Tensor,
    sinks_BR1: torch.Tensor | None,
    *,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Compute the gradients of query, key, value and sinks, the last without a column if there are no sinks."""
    wide, keys = _wide(query_BRD.dtype), key_BTD.shape[1]
    probabilities = _probabilities(query_BRD, key_BTD, mask, sinks_BR1, scale=scale)
    grad_probabilities = torch.bmm(grad_BRD.to(wide), value_BTD.to(wide).transpose(1, 2))
    if sinks_BR1 is not None:
        grad_probabilities = pad(grad_probabilities, (0, 1))
    grad_logits = softmax_backward(grad_probabilities, probabilities)
    # Products in the operand dtype, as in the forward pass: bf16 products are faster where the processor supports them.
    grad_scores = grad_logits[..., :keys].mul_(scale).to(query_BRD.dtype)
    return (
        torch.bmm(grad_scores, key_BTD),
        torch.bmm(grad_scores.transpose(1, 2), query_BRD),
        torch.bmm(probabilities[..., :keys].to(value_BTD.dtype).transpose(1, 2), grad_BRD),
        grad_logits[..., keys:],
    )


def _probabilities(
    query_BRD: torch.Tensor, key_BTD: torch.Tensor, mask: torch.Tensor, sinks_BR1: torch.Tensor | None, *, scale: float
) -> torch.Tensor:
    """Compute the softmax of masked scores [..., heads per group * rows, keys], float32; sinks are the last column."""
    wide = _wide(query_BRD.dtype)
    scores = torch.bmm(query_BRD.to(wide) * scale, key_BTD.to(wide).transpose(1, 2))
    # Only the diagonal block needs a mask; earlier keys are visible to all rows.
    scores.unflatten(1, (-1, mask.shape[0]))[..., -mask.shape[1] :] += mask
    if sinks_BR1 is not None:
        scores = torch.cat([scores, sinks_BR1.to(wide)], -1)
    return torch.softmax(scores, -1)
