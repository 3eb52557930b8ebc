"""Causal attention inside each sequence of a flat pack on a CPU, forward and backward, as one operator.

PyTorch's flash kernel for CPUs spends most of its backward pass on padding when sequences are short. Here a long
sequence is a few batched matrix products over blocks of queries, the heads that share a key head together in one, and
keys beyond the diagonal block are never touched; short ones of about one length are a padded batch. Probabilities are
computed again in the backward pass, so memory does not grow with the square of the length.
"""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

BLOCK = 128
"""Query rows per block: scores of 8 heads and a few hundred keys then stay in a core's cache."""
LENGTH_STEP = 16
"""Short sequences are padded to less than this many tokens more."""
SHORT = 3 * LENGTH_STEP
"""Longest sequences that are worth copying into a padded batch: a few large operations instead of many small ones."""


@torch.library.custom_op("rlhf_cli::varlen_attention", mutates_args=())
def varlen_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cu_seqlens: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    scale: float,
    window: int,
) -> torch.Tensor:
    """Attention output [T, heads, value size] of query [T, heads, size], key and value [U, kv heads, size].

    `cu_seqlens` [S + 1] bounds the sequences' queries, `cu_seqlens_k` their keys, of which a sequence may have more:
    those come before its own, and the last query sees the last key. `window` is the number of tokens a position sees,
    itself included, or 0 for all before it. Scores and softmax are float32 (float64 for float64 operands).
    """
    output = query.new_empty(*query.shape[:2], value.shape[-1])
    query_GNTD, output_GNTD = _grouped(query, key.shape[1]), _grouped(output, key.shape[1])
    key_GTD, value_GTD = key.transpose(0, 1), value.transpose(0, 1)
    masks = _Masks(query, window)
    for batch in _padded_batches(cu_seqlens, cu_seqlens_k):
        inputs = batch.queries(query, key.shape[1]), batch.keys(key), batch.keys(value)
        batch.put_queries(_attend(*inputs, masks.of_whole(batch.length), scale=scale), output)
    for queries, keys, offset in _blocks(cu_seqlens, cu_seqlens_k, window):
        inputs = _rows(query_GNTD, queries), key_GTD[:, keys], value_GTD[:, keys]
        result = _attend(*inputs, masks.of(queries.stop - queries.start, offset), scale=scale)
        output_GNTD[:, :, queries] = result.unflatten(1, (-1, queries.stop - queries.start))
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
) -> torch.Tensor:
    return query.new_empty(*query.shape[:2], value.shape[-1])


@torch.library.custom_op("rlhf_cli::varlen_attention_backward", mutates_args=())
def varlen_attention_backward(
    grad: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cu_seqlens: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    scale: float,
    window: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of query, key and value, in their shapes and types; key and value are added up in float32."""
    num_groups, wide = key.shape[1], _wide(query.dtype)
    grad_query = query.new_empty(query.shape)
    grad_key, grad_value = key.new_zeros(key.shape, dtype=wide), value.new_zeros(value.shape, dtype=wide)
    query_GNTD, grad_query_GNTD = _grouped(query, num_groups), _grouped(grad_query, num_groups)
    grad_GNTD = _grouped(grad, num_groups)
    key_GTD, value_GTD = key.transpose(0, 1), value.transpose(0, 1)
    grad_key_GTD, grad_value_GTD = grad_key.transpose(0, 1), grad_value.transpose(0, 1)
    masks = _Masks(query, window)
    for batch in _padded_batches(cu_seqlens, cu_seqlens_k):
        inputs = batch.queries(query, num_groups), batch.keys(key), batch.keys(value)
        grad_rows = batch.queries(grad, num_groups, blank=True)
        grads = _attend_backward(grad_rows, *inputs, masks.of_whole(batch.length), scale=scale)
        batch.put_queries(grads[0], grad_query)
        batch.put_keys(grads[1], grad_key)
        batch.put_keys(grads[2], grad_value)
    for queries, keys, offset in _blocks(cu_seqlens, cu_seqlens_k, window):
        inputs = _rows(query_GNTD, queries), key_GTD[:, keys], value_GTD[:, keys]
        mask = masks.of(queries.stop - queries.start, offset)
        grads = _attend_backward(_rows(grad_GNTD, queries), *inputs, mask, scale=scale)
        grad_query_GNTD[:, :, queries] = grads[0].unflatten(1, (-1, queries.stop - queries.start))
        grad_key_GTD[:, keys] += grads[1]
        grad_value_GTD[:, keys] += grads[2]
    return grad_query, grad_key.to(key.dtype), grad_value.to(value.dtype)


@varlen_attention_backward.register_fake
def _(
    grad: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cu_seqlens: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    scale: float,
    window: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return query.new_empty(query.shape), key.new_empty(key.shape), value.new_empty(value.shape)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    *tensors, ctx.scale, ctx.window = inputs
    ctx.save_for_backward(*tensors)


def _backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    grads = varlen_attention_backward(grad, *ctx.saved_tensors, ctx.scale, ctx.window)
    return (*grads, None, None, None, None)


varlen_attention.register_autograd(_backward, setup_context=_setup_context)


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _grouped(tensor_THD: torch.Tensor, num_groups: int) -> torch.Tensor:
    """View [groups, heads of a group, T, size] of [T, heads, size]."""
    return tensor_THD.unflatten(1, (num_groups, -1)).permute(1, 2, 0, 3)


def _rows(tensor_GNTD: torch.Tensor, queries: slice) -> torch.Tensor:
    """[groups, heads of a group * rows, size]: the heads that share a key head become rows of one product."""
    return tensor_GNTD[:, :, queries].flatten(1, 2)


@dataclass(frozen=True)
class _PaddedBatch:
    """Sequences of a pack, n of at most `length` tokens, as rows of a rectangle.

    Its padding comes last, so that under a causal mask no token sees it: what it holds does not matter, only its own
    gradient must be zero.
    """

    length: int
    query_index: torch.Tensor  # [n, length] positions of the queries; any where there is no token
    key_index: torch.Tensor  # [n, length] positions of the keys
    is_token: torch.Tensor  # [n, length]

    def queries(self, tensor_THD: torch.Tensor, num_groups: int, *, blank: bool = False) -> torch.Tensor:
        """[n * groups, heads of a group * length, size]; with `blank`, zero where there is no token."""
        tensor_BLHD = tensor_THD[self.query_index]
        if blank:
            tensor_BLHD.masked_fill_(~self.is_token[:, :, None, None], 0)
        return tensor_BLHD.unflatten(2, (num_groups, -1)).permute(0, 2, 3, 1, 4).flatten(2, 3).flatten(0, 1)

    def keys(self, tensor_UGD: torch.Tensor) -> torch.Tensor:
        """[n * groups, length, size]."""
        return tensor_UGD[self.key_index].transpose(1, 2).flatten(0, 1)

    def put_queries(self, result_BRD: torch.Tensor, whole_THD: torch.Tensor) -> None:
        """Write what has the form of `queries` to the queries' places."""
        self._put(result_BRD, whole_THD, self.query_index)

    def put_keys(self, result_BRD: torch.Tensor, whole_UGD: torch.Tensor) -> None:
        """Write what has the form of `keys` to the keys' places."""
        self._put(result_BRD, whole_UGD, self.key_index)

    def _put(self, result_BRD: torch.Tensor, whole: torch.Tensor, index: torch.Tensor) -> None:
        result_BLHD = result_BRD.view(len(index), whole.shape[1], self.length, -1).transpose(1, 2)
        whole[index[self.is_token]] = result_BLHD[self.is_token].to(whole.dtype)


def _padded_batches(cu_seqlens: torch.Tensor, cu_seqlens_k: torch.Tensor) -> Iterator[_PaddedBatch]:
    """The short sequences of a pack that have no keys but their own, together with those of about their length."""
    lengths = cu_seqlens.diff()
    sizes = torch.where(_is_short(lengths, cu_seqlens_k.diff()), (lengths + LENGTH_STEP - 1) // LENGTH_STEP, 0)
    for size in range(1, SHORT // LENGTH_STEP + 1):
        chosen = sizes == size
        if chosen.any():
            offsets = torch.arange(int(lengths[chosen].max()))
            queries, keys = (
                (bounds[:-1].long()[chosen][:, None] + offsets).clamp_(max=int(bounds[-1]) - 1)
                for bounds in (cu_seqlens, cu_seqlens_k)
            )
            yield _PaddedBatch(offsets.numel(), queries, keys, offsets < lengths[chosen][:, None])


def _is_short(lengths: torch.Tensor, lengths_k: torch.Tensor) -> torch.Tensor:
    return (lengths <= SHORT) & (lengths == lengths_k)


def _blocks(cu_seqlens: torch.Tensor, cu_seqlens_k: torch.Tensor, window: int) -> Iterator[tuple[slice, slice, int]]:
    """(queries, keys, offset) of the other sequences: near-equal blocks of about BLOCK queries, all keys they see.

    `offset` is the number of keys that come before the one of the first query.
    """
    short = _is_short(cu_seqlens.diff(), cu_seqlens_k.diff()).tolist()
    bounds, bounds_k = itertools.pairwise(cu_seqlens.tolist()), itertools.pairwise(cu_seqlens_k.tolist())
    for is_short, (start, end), (start_k, end_k) in zip(short, bounds, bounds_k, strict=True):
        if is_short:
            continue
        length, shift = end - start, end_k - end
        count = max(1, (length + BLOCK // 2) // BLOCK)
        cuts = [start + length * index // count for index in range(count + 1)]
        for first, stop in itertools.pairwise(cuts):
            first_key = max(start_k, first + shift - window + 1) if window else start_k
            yield slice(first, stop), slice(first_key, stop + shift), first + shift - first_key


class _Masks:
    """Additive masks of the blocks of one call; full triangles are cut out of one."""

    def __init__(self, like: torch.Tensor, window: int) -> None:
        self._triangle = torch.full((2 * BLOCK, 2 * BLOCK), -torch.inf, dtype=_wide(like.dtype)).triu_(1)
        self._window = window

    def of_whole(self, length: int) -> torch.Tensor:
        """Mask [length, length] of a sequence."""
        return self.of(length, 0)

    def of(self, rows: int, offset: int) -> torch.Tensor:
        """Mask [rows, c] for the last c of `offset + rows` keys; the keys before those are seen by every row."""
        if not self._window or offset + rows <= self._window:
            return self._triangle[:rows, :rows]
        distance = torch.arange(rows)[:, None] + offset - torch.arange(offset + rows)
        hidden = (distance < 0) | (distance >= self._window)
        return torch.zeros(hidden.shape, dtype=self._triangle.dtype).masked_fill_(hidden, -torch.inf)


def _attend(
    query_BRD: torch.Tensor, key_BTD: torch.Tensor, value_BTD: torch.Tensor, mask: torch.Tensor, *, scale: float
) -> torch.Tensor:
    probabilities = _probabilities(query_BRD, key_BTD, mask, scale=scale)
    return torch.bmm(probabilities.to(value_BTD.dtype), value_BTD)


def _attend_backward(
    grad_BRD: torch.Tensor,
    query_BRD: torch.Tensor,
    key_BTD: torch.Tensor,
    value_BTD: torch.Tensor,
    mask: torch.Tensor,
    *,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of query, key and value."""
    wide = _wide(query_BRD.dtype)
    probabilities = _probabilities(query_BRD, key_BTD, mask, scale=scale)
    grad_probabilities = torch.bmm(grad_BRD.to(wide), value_BTD.to(wide).transpose(1, 2))
    grad_scores = torch._softmax_backward_data(grad_probabilities, probabilities, -1, wide).mul_(scale)
    grad_scores = grad_scores.to(query_BRD.dtype)
    return (
        torch.bmm(grad_scores, key_BTD),
        torch.bmm(grad_scores.transpose(1, 2), query_BRD),
        torch.bmm(probabilities.to(value_BTD.dtype).transpose(1, 2), grad_BRD),
    )


def _probabilities(query_BRD: torch.Tensor, key_BTD: torch.Tensor, mask: torch.Tensor, *, scale: float) -> torch.Tensor:
    """Softmax of the masked scores [..., heads of a group * rows, keys], float32."""
    wide = _wide(query_BRD.dtype)
    scores = torch.bmm(query_BRD.to(wide) * scale, key_BTD.to(wide).transpose(1, 2))
    scores.unflatten(1, (-1, mask.shape[0]))[..., -mask.shape[1] :] += mask
    return torch.softmax(scores, -1)
