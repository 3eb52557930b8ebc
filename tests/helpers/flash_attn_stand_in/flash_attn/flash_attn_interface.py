"""The forward and the backward function of variable lengths, in plain PyTorch, with flash-attn's names and arguments.

The last query of a sequence sees its last key, as in flash-attn since 2.1.
"""

from collections.abc import Iterator
from itertools import pairwise

import torch
from torch import Tensor


def _spans(cu_queries: Tensor, cu_keys: Tensor) -> Iterator[tuple[slice, slice]]:
    pairs = zip(pairwise(cu_queries.tolist()), pairwise(cu_keys.tolist()), strict=True)
    return ((slice(*queries), slice(*keys)) for queries, keys in pairs)


def _per_query_head(keys: Tensor, heads: int) -> Tensor:
    return keys.repeat_interleave(heads // keys.shape[1], 1).double()


def _weights(query: Tensor, key: Tensor, scale: float, left: int) -> Tensor:
    """Return the logarithms of unnormalised causal weights, [heads, queries, keys]."""
    scores = torch.einsum("qhd,khd->hqk", query.double(), _per_query_head(key, query.shape[1])) * scale
    behind = torch.arange(len(query))[:, None] + len(key) - len(query) - torch.arange(len(key))
    return scores.masked_fill((behind < 0) | ((behind > left) if left >= 0 else torch.tensor(False)), -torch.inf)


def _flash_attn_varlen_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float,
    softmax_scale: float,
    causal: bool,
    window_size_left: int = -1,
    window_size_right: int = -1,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    return_softmax: bool = False,
    block_table: Tensor | None = None,
    leftpad_k: Tensor | None = None,
    seqused_k: Tensor | None = None,
    zero_tensors: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return (output [T, heads, D], log-sum-exp [heads, T], nothing, nothing)."""
    assert causal
    assert dropout_p == softcap == 0
    output, sums = torch.empty_like(q), q.new_empty(q.shape[1], q.shape[0], dtype=torch.float32)
    for queries, keys in _spans(cu_seqlens_q, cu_seqlens_k):
        weights = _weights(q[queries], k[keys], softmax_scale, window_size_left)
        values = _per_query_head(v[keys], q.shape[1])
        output[queries] = torch.einsum("hqk,khd->qhd", weights.softmax(-1), values).to(q.dtype)
        sums[:, queries] = weights.logsumexp(-1).float()
    return output, sums, q.new_empty(0), q.new_empty(0)


def _flash_attn_varlen_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    softmax_lse: Tensor,
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float,
    softmax_scale: float,
    causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    alibi_slopes: Tensor | None,
    deterministic: bool,
    rng_state: Tensor | None = None,
    zero_tensors: bool = False,
) -> Tensor:
    """Write the gradients into `dq`, `dk` and `dv`."""
    for queries, keys in _spans(cu_seqlens_q, cu_seqlens_k):
        with torch.enable_grad():
            query, key, value = (x.detach().requires_grad_() for x in (q[queries], k[keys], v[keys]))
            weights = _weights(query, key, softmax_scale, window_size_left)
            shares = (weights - softmax_lse[:, queries, None].double()).exp()
            mean = torch.einsum("qhd,qhd->hq", dout[queries].double(), out[queries].double())
            gains = torch.einsum("qhd,khd->hqk", dout[queries].double(), _per_query_head(value, q.shape[1]))
            slopes = shares.detach() * (gains.detach() - mean[..., None])
            through_weights = (slopes * weights.nan_to_num(neginf=0)).sum()
            through_values = (shares.detach() * gains).sum()
            found = torch.autograd.grad(through_weights + through_values, (query, key, value))
        for whole, here, gradient in zip((dq, dk, dv), (queries, keys, keys), found, strict=True):
            whole[here] = gradient.to(whole.dtype)
    return q.new_empty(0)


def _unused(*args: object, **kwargs: object) -> None:
    raise NotImplementedError


_flash_attn_forward = _flash_attn_backward = flash_attn_func = flash_attn_varlen_func = _unused
