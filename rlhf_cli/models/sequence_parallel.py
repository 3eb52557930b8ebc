"""Sequence parallelism: the ranks of a group have the same pack, and each computes a run of its tokens.

Around attention the ranks exchange tokens for heads: a rank attends with all tokens in some of the heads (Ulysses,
arXiv 2309.14509). Each rank projects the hidden states of its own tokens. Then every rank gets the results of all
tokens and computes the whole loss, so that no loss has to know about the group. Each rank's gradient is the share of
its own tokens, so that the gradients of all ranks add up to the gradient of the whole pack.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from transformers import PretrainedConfig

from rlhf_cli.errors import UsageError
from rlhf_cli.models.packs import PackLike

POSITIONS_BY_LENGTH = {"dynamic", "longrope"}
"""Kinds of rotary positions that depend on the longest position at hand, of which a rank sees only its own."""


@dataclass(frozen=True)
class Shards:
    """The tokens of a pack that each rank of `group` computes: rank i from `bounds[i]` to `bounds[i + 1]`."""

    group: dist.ProcessGroup
    bounds: tuple[int, ...]

    @property
    def size(self) -> int:
        """Ranks of the group."""
        return len(self.bounds) - 1

    @property
    def rank(self) -> int:
        """This process's place in the group."""
        return dist.get_rank(self.group)

    @property
    def counts(self) -> list[int]:
        """Tokens of each rank."""
        return [stop - start for start, stop in zip(self.bounds, self.bounds[1:], strict=False)]

    @property
    def own(self) -> slice:
        """The tokens of this rank."""
        return slice(self.bounds[self.rank], self.bounds[self.rank + 1])


@dataclass(frozen=True)
class Part:
    """The part of a pack that this rank computes; without a group the whole pack.

    `tokens` selects from the pack's tokens, `targets` from its K targets; `rows_k` are the positions of this rank's
    targets, `read_r` the positions that are read, among its own tokens.
    """

    pack: PackLike
    tokens: slice
    targets: torch.Tensor | slice
    rows_k: torch.Tensor
    read_r: torch.Tensor
    shards: Shards | None = None

    def whole(self, values_k: torch.Tensor) -> torch.Tensor:
        """Return [K] on every rank from each rank's values of its own targets, in the pack's order."""
        if self.shards is None:
            return values_k
        owner_K = _owners(self.pack.rows_K, self.shards)
        counts = torch.bincount(owner_K, minlength=self.shards.size).tolist()
        by_rank_K = GatherRows.apply(values_k, counts, self.shards)
        return by_rank_K[owner_K.argsort(stable=True).argsort()]


def part_of(pack: PackLike, group: dist.ProcessGroup | None) -> Part:
    """Return this rank's part of a pack; filler gives every rank a token at least."""
    if group is None:
        return Part(pack, slice(None), slice(None), pack.rows_K, pack.read_R)
    size = dist.get_world_size(group)
    pack = _with_tokens(pack, size)
    num_tokens = pack.input_ids_T.numel()
    shards = Shards(group, tuple(num_tokens * rank // size for rank in range(size + 1)))
    own = shards.own
    targets = torch.nonzero(_owners(pack.rows_K, shards) == shards.rank).squeeze(1)
    read_r = pack.read_R[(pack.read_R >= own.start) & (pack.read_R < own.stop)]
    return Part(pack, own, targets, pack.rows_K[targets] - own.start, read_r - own.start, shards)


def _owners(rows_K: torch.Tensor, shards: Shards) -> torch.Tensor:
    """Return the rank that has each row, int64 [K]."""
    ends = torch.tensor(shards.bounds[1:], device=rows_K.device)
    return torch.bucketize(rows_K, ends, right=True)


def _with_tokens(pack: PackLike, least: int) -> PackLike:
    """Return the pack with `least` tokens or more: filler that no token sees is a run of its own behind the others."""
    missing = least - pack.input_ids_T.numel()
    if missing <= 0:
        return pack
    filler = pack.input_ids_T.new_zeros(missing)
    keys = pack.keys and replace(
        pack.keys,
        index_U=torch.cat([pack.keys.index_U, pack.input_ids_T.numel() + torch.arange(missing, device=filler.device)]),
        cu_seqlens=torch.cat([pack.keys.cu_seqlens, pack.keys.cu_seqlens[-1:] + missing]),
        max_seqlen=max(pack.keys.max_seqlen, missing),
    )
    return replace(
        pack,
        input_ids_T=torch.cat([pack.input_ids_T, filler]),
        position_ids_T=torch.cat([pack.position_ids_T, filler]),
        cu_seqlens=torch.cat([pack.cu_seqlens, pack.cu_seqlens[-1:] + missing]),
        max_seqlen=max(pack.max_seqlen, missing),
        keys=keys,
    )


def attend_by_heads(
    query_1HLD: torch.Tensor,
    key_1HLD: torch.Tensor,
    value_1HLD: torch.Tensor,
    shards: Shards,
    attend: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor],
) -> torch.Tensor:
    """Return the attention output [1, own tokens, heads, size] of own queries, from all tokens' keys.

    Args:
        attend: attention of whole sequences in some heads: query [1, heads, T, size], key and value [1, kv heads, T,
            size] -> [1, T, heads, size].
    """
    heads, kv_heads = query_1HLD.shape[1], key_1HLD.shape[1]
    repeats = key_repeats(heads, kv_heads, shards.size)
    query, key, value = (tensor[0].transpose(0, 1) for tensor in (query_1HLD, key_1HLD, value_1HLD))
    if repeats > 1:
        key, value = key.repeat_interleave(repeats, 1), value.repeat_interleave(repeats, 1)
    whole = (Exchange.apply(tensor, shards, True).transpose(0, 1)[None] for tensor in (query, key, value))
    return Exchange.apply(attend(*whole)[0], shards, False)[None]


def key_repeats(heads: int, kv_heads: int, size: int) -> int:
    """Return how many times each key head is sent so that every rank has the keys of its query heads.

    Raises:
        UsageError: `heads` does not divide by `size`.
    """
    if heads % size:
        raise UsageError(f"--sequence_parallel_size {size} does not divide the model's {heads} attention heads")
    if kv_heads % size == 0:
        return 1
    return size // kv_heads if size % kv_heads == 0 else heads // kv_heads


def check_sequence_parallel(architecture: PretrainedConfig, *, size: int, num_ranks: int, attention: str) -> None:
    """Raise UsageError if `size` ranks cannot share a sequence of this model."""
    if size == 1:
        return
    if num_ranks % size:
        raise UsageError(f"--sequence_parallel_size {size} does not divide the {num_ranks} ranks of the run")
    if attention != "varlen":
        raise UsageError(
            f"--sequence_parallel_size goes with attn_implementation varlen, and this run takes {attention}"
        )
    text = architecture.get_text_config()
    key_repeats(text.num_attention_heads, getattr(text, "num_key_value_heads", None) or text.num_attention_heads, size)
    rope: dict[str, Any] = getattr(text, "rope_parameters", None) or {}
    kinds = {str(kind.get("rope_type")) for kind in (rope, *rope.values()) if isinstance(kind, dict)}
    if found := sorted(kinds & POSITIONS_BY_LENGTH):
        raise UsageError(f"--sequence_parallel_size: rotary positions of type {found[0]} need the whole sequence")


class Exchange(torch.autograd.Function):
    """[own tokens, H, D] to [all tokens, H / ranks, D], or the way back; the gradient goes the other way."""

    @staticmethod
    def forward(ctx: Any, values: torch.Tensor, shards: Shards, to_heads: bool) -> torch.Tensor:
        ctx.shards, ctx.to_heads = shards, to_heads
        return (_to_heads if to_heads else _to_tokens)(values, shards)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return (_to_tokens if ctx.to_heads else _to_heads)(gradient, ctx.shards), None, None


def _to_heads(values_LHD: torch.Tensor, shards: Shards) -> torch.Tensor:
    own, heads, size = values_LHD.shape
    some = heads // shards.size
    sent = values_LHD.reshape(own, shards.size, some, size).transpose(0, 1).contiguous()
    received = values_LHD.new_empty(shards.bounds[-1], some, size)
    _all_to_all(
        received, sent, [count * some * size for count in shards.counts], [own * some * size] * shards.size, shards
    )
    return received


def _to_tokens(values_ThD: torch.Tensor, shards: Shards) -> torch.Tensor:
    _, some, size = values_ThD.shape
    own = shards.counts[shards.rank]
    received = values_ThD.new_empty(shards.size, own, some, size)
    counts = [count * some * size for count in shards.counts]
    _all_to_all(received, values_ThD.contiguous(), [own * some * size] * shards.size, counts, shards)
    return received.transpose(0, 1).reshape(own, shards.size * some, size)


class GatherRows(torch.autograd.Function):
    """The values of all ranks, rank after rank, from each rank's own.

    The gradient keeps the own values alone, without a sum over ranks: every rank computes the same whole loss.
    """

    @staticmethod
    def forward(ctx: Any, values_k: torch.Tensor, counts: Sequence[int], shards: Shards) -> torch.Tensor:
        start = sum(counts[: shards.rank])
        ctx.own = slice(start, start + counts[shards.rank])
        received_K = values_k.new_empty(sum(counts))
        sent = values_k.repeat(shards.size)
        _all_to_all(received_K, sent, list(counts), [values_k.numel()] * shards.size, shards)
        return received_K

    @staticmethod
    def backward(ctx: Any, gradient_K: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return gradient_K[ctx.own].contiguous(), None, None


def _all_to_all(
    received: torch.Tensor, sent: torch.Tensor, received_counts: list[int], sent_counts: list[int], shards: Shards
) -> None:
    dist.all_to_all_single(received.view(-1), sent.view(-1), received_counts, sent_counts, group=shards.group)
