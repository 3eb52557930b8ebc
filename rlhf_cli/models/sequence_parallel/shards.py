"""Pack shards, and differentiable exchanges between the ranks of a sequence-parallel group."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist

Mode = Literal["ulysses", "gather", "ring"]
"""Communication pattern in attention; `ring` is `gather` with a ring-flash-attn kernel."""


@dataclass(frozen=True)
class SequenceRanks:
    """A group of ranks that process each sequence together, and their communication pattern."""

    group: dist.ProcessGroup
    mode: Mode

    @property
    def size(self) -> int:
        """Number of ranks in the group."""
        return dist.get_world_size(self.group)

    @property
    def rank(self) -> int:
        """This process's rank in the group."""
        return dist.get_rank(self.group)


@dataclass(frozen=True)
class Shards:
    """A pack split into equal runs of `length` tokens, one per rank.

    `keys` is set in modes gather and ring: the tokens of local sequences up to the last local token.
    """

    ranks: SequenceRanks
    length: int
    keys: slice | None = None

    @property
    def own(self) -> slice:
        """This rank's tokens."""
        start = self.ranks.rank * self.length
        return slice(start, start + self.length)

    def owners(self, tokens_K: torch.Tensor) -> torch.Tensor:
        """Return the rank that holds each token, int64 [K]."""
        return tokens_K.div(self.length, rounding_mode="floor")


class TokensForHeads(torch.autograd.Function):
    """All-to-all from [local tokens, H, D] to [all tokens, H / ranks, D]; the backward pass is the reverse."""

    @staticmethod
    def forward(ctx: Any, values_LHD: torch.Tensor, ranks: SequenceRanks) -> torch.Tensor:
        ctx.ranks = ranks
        return _to_heads(values_LHD, ranks)

    @staticmethod
    def backward(ctx: Any, gradient_ThD: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _to_tokens(gradient_ThD, ctx.ranks), None


class HeadsForTokens(torch.autograd.Function):
    """All-to-all from [all tokens, H / ranks, D] to [local tokens, H, D]; the backward pass is the reverse."""

    @staticmethod
    def forward(ctx: Any, values_ThD: torch.Tensor, ranks: SequenceRanks) -> torch.Tensor:
        ctx.ranks = ranks
        return _to_tokens(values_ThD, ranks)

    @staticmethod
    def backward(ctx: Any, gradient_LHD: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _to_heads(gradient_LHD, ctx.ranks), None


def _to_heads(values_LHD: torch.Tensor, ranks: SequenceRanks) -> torch.Tensor:
    own, heads, size = values_LHD.shape
    # all_to_all_single splits dimension 0, so the destination rank must come first.
    sent = values_LHD.reshape(own, ranks.size, heads // ranks.size, size).transpose(0, 1).contiguous()
    return _all_to_all(sent, ranks).view(ranks.size * own, heads // ranks.size, size)


def _to_tokens(values_ThD: torch.Tensor, ranks: SequenceRanks) -> torch.Tensor:
    num_tokens, some, size = values_ThD.shape
    own = num_tokens // ranks.size
    received = _all_to_all(values_ThD.contiguous(), ranks).view(ranks.size, own, some, size)
    return received.transpose(0, 1).reshape(own, ranks.size * some, size)


def _all_to_all(sent: torch.Tensor, ranks: SequenceRanks) -> torch.Tensor:
    received = torch.empty_like(sent)
    dist.all_to_all_single(received.view(-1), sent.view(-1), group=ranks.group)
    return received


class GatherTokens(torch.autograd.Function):
    """All-gather from [local tokens, H, D] to [all tokens, H, D].

    The backward pass sums the gradient over ranks and rounds once.
    """

    @staticmethod
    def forward(ctx: Any, values_LHD: torch.Tensor, ranks: SequenceRanks) -> torch.Tensor:
        ctx.ranks = ranks
        own, *rest = values_LHD.shape
        received_THD = values_LHD.new_empty(ranks.size * own, *rest)
        dist.all_gather_into_tensor(received_THD, values_LHD.contiguous(), group=ranks.group)
        return received_THD

    @staticmethod
    def backward(ctx: Any, gradient_THD: torch.Tensor) -> tuple[torch.Tensor, None]:
        ranks: SequenceRanks = ctx.ranks
        wide = torch.promote_types(gradient_THD.dtype, torch.float32)
        # Not reduce_scatter: it would add in the gradient dtype, rounding once per rank.
        received = _all_to_all(gradient_THD.contiguous(), ranks)
        return received.unflatten(0, (ranks.size, -1)).sum(0, dtype=wide).to(gradient_THD.dtype), None


class GatherResults(torch.autograd.Function):
    """Concatenate each rank's local values in rank order; `counts` is the number of values per rank.

    The backward pass keeps only the local slice and does not sum over ranks: every rank computes the same full loss.
    """

    @staticmethod
    def forward(ctx: Any, values_k: torch.Tensor, counts: Sequence[int], ranks: SequenceRanks) -> torch.Tensor:
        start = sum(counts[: ranks.rank])
        ctx.own = slice(start, start + counts[ranks.rank])
        received_K = values_k.new_empty(sum(counts))
        # Counts differ between ranks, which all_gather_into_tensor does not support.
        sent = values_k.repeat(ranks.size)
        sent_counts = [values_k.numel()] * ranks.size
        dist.all_to_all_single(received_K, sent, list(counts), sent_counts, group=ranks.group)
        return received_K

    @staticmethod
    def backward(ctx: Any, gradient_K: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return gradient_K[ctx.own].contiguous(), None, None
