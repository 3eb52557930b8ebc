"""Sequence parallelism: the ranks of a group have the same pack, and each computes a run of its tokens.

In attention the ranks exchange tokens (attention.py). Each rank projects the hidden states of its own tokens. Then
every rank gets the results of all tokens and computes the whole loss, so that no loss has to know about the group. Each
rank's gradient is the share of its own tokens, so that the gradients of all ranks add up to the gradient of the whole
pack.
"""

from dataclasses import dataclass
from typing import Any

import torch

from rlhf_cli.models.packs import PackLike, with_filler
from rlhf_cli.models.sequence_parallel.shards import GatherResults, SequenceRanks, Shards


@dataclass(frozen=True)
class Runs:
    """The bounds of runs of queries and of the keys that they see; the last query of a run sees its last key.

    `index_U` says which tokens' keys the runs see, one after the other; None for the tokens in their order.
    """

    cu_queries: torch.Tensor
    cu_keys: torch.Tensor
    max_queries: int
    max_keys: int
    index_U: torch.Tensor | None = None

    def as_arguments(self) -> dict[str, Any]:
        """Return the runs by the names under which transformers passes them to attention functions."""
        index = {} if self.index_U is None else {"key_index": self.index_U}
        return {
            "cu_seq_lens_q": self.cu_queries,
            "cu_seq_lens_k": self.cu_keys,
            "max_length_q": self.max_queries,
            "max_length_k": self.max_keys,
            **index,
        }


@dataclass(frozen=True)
class Part:
    """The part of a pack that this rank computes; without shards the whole pack.

    `tokens` selects from the pack's tokens, `targets` from its K targets; `rows_k` are the positions of this rank's
    targets, `read_r` the positions that are read, among its own tokens; `runs` are what attention has to know.
    """

    pack: PackLike
    tokens: slice
    targets: torch.Tensor | slice
    rows_k: torch.Tensor
    read_r: torch.Tensor
    runs: Runs
    shards: Shards | None = None

    def whole(self, values_k: torch.Tensor) -> torch.Tensor:
        """Return [K] on every rank from each rank's values of its own targets, in the pack's order."""
        if self.shards is None:
            return values_k
        ranks, owner_K = self.shards.ranks, self.shards.owners(self.pack.rows_K)
        counts = torch.bincount(owner_K, minlength=ranks.size).tolist()
        by_rank_K = GatherResults.apply(values_k, counts, ranks)
        return by_rank_K[owner_K.argsort(stable=True).argsort()]


def part_of(pack: PackLike, ranks: SequenceRanks | None) -> Part:
    """Return this rank's part of a pack; filler gives every rank as many tokens, one at least."""
    if ranks is None:
        return Part(pack, slice(None), slice(None), pack.rows_K, pack.read_R, _runs(pack))
    num_tokens = pack.input_ids_T.numel()
    pack = with_filler(pack, -num_tokens % ranks.size if num_tokens else ranks.size)
    shards = Shards(ranks, pack.input_ids_T.numel() // ranks.size)
    own, runs = shards.own, _runs(pack)
    if ranks.mode != "ulysses":
        runs, keys = _own_runs(runs, own)
        shards = Shards(ranks, shards.length, keys)
    targets = torch.nonzero(shards.owners(pack.rows_K) == ranks.rank).squeeze(1)
    read_r = pack.read_R[(pack.read_R >= own.start) & (pack.read_R < own.stop)] - own.start
    return Part(pack, own, targets, pack.rows_K[targets] - own.start, read_r, runs, shards)


def _runs(pack: PackLike) -> Runs:
    """Return the runs of a whole pack."""
    keys = pack.keys or pack
    index_U = pack.keys.index_U if pack.keys else None
    return Runs(pack.cu_seqlens, keys.cu_seqlens, pack.max_seqlen, keys.max_seqlen, index_U)


def _own_runs(whole: Runs, own: slice) -> tuple[Runs, slice | None]:
    """Return the runs of the queries `own`, and the tokens that have their keys; None for all tokens.

    A run that begins before `own` has keys before it. A run that goes on behind `own` has its keys up to the last own
    query.
    """
    starts, stops = _bounds(whole.cu_queries)
    key_starts, key_stops = _bounds(whole.cu_keys)
    first, last = starts.clamp(min=own.start), stops.clamp(max=own.stop)
    here = last > first
    key_starts, key_stops = key_starts[here], (key_stops - (stops - last))[here]
    cu_queries, cu_keys = _cumulated((last - first)[here]), _cumulated(key_stops - key_starts)
    max_queries, max_keys = (int(bounds.diff().max()) for bounds in (cu_queries, cu_keys))
    if whole.index_U is None:  # runs lie end to end, and so do their keys
        return Runs(cu_queries, cu_keys, max_queries, max_keys), slice(int(key_starts[0]), own.stop)
    spans = zip(key_starts.tolist(), key_stops.tolist(), strict=True)
    index_U = torch.cat([whole.index_U[start:stop] for start, stop in spans])
    return Runs(cu_queries, cu_keys, max_queries, max_keys, index_U), None


def _bounds(cu_seqlens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return cu_seqlens[:-1], cu_seqlens[1:]


def _cumulated(lengths: torch.Tensor) -> torch.Tensor:
    """Return int32 bounds [B + 1] of runs of these lengths."""
    return torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).to(torch.int32)
