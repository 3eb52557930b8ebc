"""Sequence parallelism: all ranks in a group get the same pack, and each computes a contiguous run of tokens.

Ranks exchange tokens in attention (attention.py), and each projects the hidden states of its local tokens. Every rank
then receives all results and computes the full loss, so losses need not know about the group. Each rank's gradient
covers its local tokens, so the sum over ranks is the gradient of the full pack.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from rlhf_cli.models.packs import PackLike, host_of, with_filler
from rlhf_cli.models.sequence_parallel.shards import GatherResults, SequenceRanks, Shards


@dataclass(frozen=True)
class Runs:
    """Boundaries of query runs and of the keys they attend to; the last query in a run attends to the last key.

    `index_U` lists the concatenated key positions of all runs; None means tokens in order.
    """

    cu_queries: torch.Tensor
    cu_keys: torch.Tensor
    max_queries: int
    max_keys: int
    index_U: torch.Tensor | None = None

    def to(self, device: torch.device) -> "Runs":
        """Return the runs on a device."""
        index_U = None if self.index_U is None else self.index_U.to(device)
        return replace(self, cu_queries=self.cu_queries.to(device), cu_keys=self.cu_keys.to(device), index_U=index_U)

    def as_arguments(self) -> dict[str, object]:
        """Return the runs under the argument names that transformers passes to attention functions."""
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
    """This rank's part of a pack, or the full pack without shards.

    - `tokens`: slice of the pack's tokens.
    - `targets`: selection from its K targets.
    - `rows_k`, `read_r`: positions of local targets and of outputs that are read, relative to local tokens.
    - `runs`: boundaries for attention.
    - `counts`: number of targets on each rank. `home_K`: places of the targets in the order of the ranks.

    Example for 8 tokens on 2 ranks: rank 1 has `tokens = slice(4, 8)`, and a target at token 6 has `rows_k = 2`.
    """

    pack: PackLike
    tokens: slice
    targets: torch.Tensor | slice
    rows_k: torch.Tensor
    read_r: torch.Tensor
    runs: Runs
    shards: Shards | None = None
    counts: Sequence[int] = ()
    home_K: torch.Tensor | None = None

    def whole(self, values_k: torch.Tensor) -> torch.Tensor:
        """Gather local values [k] from all ranks into [K] in pack order, on every rank."""
        if self.shards is None:
            return values_k
        by_rank_K: torch.Tensor = GatherResults.apply(values_k, self.counts, self.shards.ranks)
        return by_rank_K[self.home_K]


def part_of(pack: PackLike, ranks: SequenceRanks | None) -> Part:
    """Return this rank's part of a pack. Filler gives all ranks the same number of tokens, at least one."""
    if ranks is None:
        return Part(pack, slice(None), slice(None), pack.rows_K, pack.read_R, _runs(pack))
    num_tokens = pack.input_ids_T.numel()
    # Even an empty pack needs a token per rank: each rank must join the collectives in every layer.
    pack = with_filler(pack, -num_tokens % ranks.size if num_tokens else ranks.size)
    shards = Shards(ranks, pack.input_ids_T.numel() // ranks.size)
    own, runs = shards.own, _runs(pack)
    host, device = host_of(pack), pack.rows_K.device
    if ranks.mode != "ulysses":
        runs, keys = _own_runs(_runs(host), own)
        runs, shards = runs.to(device), Shards(ranks, shards.length, keys)
    owner_K = shards.owners(host.rows_K)
    targets = torch.nonzero(owner_K == ranks.rank).squeeze(1)
    read_r = host.read_R[(host.read_R >= own.start) & (host.read_R < own.stop)] - own.start
    return Part(
        pack,
        own,
        targets.to(device),
        (host.rows_K[targets] - own.start).to(device),
        read_r.to(device),
        runs,
        shards,
        counts=torch.bincount(owner_K, minlength=ranks.size).tolist(),
        # Values arrive in rank order. The argsort of an argsort is the inverse permutation, back to pack order.
        home_K=owner_K.argsort(stable=True).argsort().to(device),
    )


def host_runs(pack: PackLike) -> Runs:
    """Return the runs of a full pack in host memory."""
    return _runs(host_of(pack))


def _runs(pack: PackLike) -> Runs:
    """Return the runs of a full pack."""
    keys = pack.keys or pack
    index_U = pack.keys.index_U if pack.keys else None
    return Runs(pack.cu_seqlens, keys.cu_seqlens, pack.max_seqlen, keys.max_seqlen, index_U)


def _own_runs(whole: Runs, own: slice) -> tuple[Runs, slice | None]:
    """Return the runs of local queries, and the slice of tokens with their keys; None for all tokens.

    A run that starts before `own` includes earlier keys. A run that continues after `own` has keys up to the last local
    query.
    """
    starts, stops = _bounds(whole.cu_queries)
    key_starts, key_stops = _bounds(whole.cu_keys)
    first, last = starts.clamp(min=own.start), stops.clamp(max=own.stop)
    here = last > first
    # Drop runs without local queries, and cut keys by the same number of tokens as the queries.
    key_starts, key_stops = key_starts[here], (key_stops - (stops - last))[here]
    cu_queries, cu_keys = _cumulated((last - first)[here]), _cumulated(key_stops - key_starts)
    max_queries, max_keys = (int(bounds.diff().max()) for bounds in (cu_queries, cu_keys))
    # Without shared prefixes, runs and their keys are contiguous.
    if whole.index_U is None:
        return Runs(cu_queries, cu_keys, max_queries, max_keys), slice(int(key_starts[0]), own.stop)
    spans = zip(key_starts.tolist(), key_stops.tolist(), strict=True)
    index_U = torch.cat([whole.index_U[start:stop] for start, stop in spans])
    return Runs(cu_queries, cu_keys, max_queries, max_keys, index_U), None


def _bounds(cu_seqlens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return cu_seqlens[:-1], cu_seqlens[1:]


def _cumulated(lengths: torch.Tensor) -> torch.Tensor:
    """Return int32 boundaries [B + 1] for runs of these lengths."""
    # FlashAttention kernels require int32 boundaries.
    return torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).to(torch.int32)
