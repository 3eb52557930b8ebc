"""Packs rounded up to few lengths where every new length costs a compilation.

On a CPU oneDNN compiles each product in bfloat16 for the very shape of its operands, which takes some milliseconds and
up to a megabyte that it keeps, and packs have ever new lengths. A run of filler tokens that nobody else sees, and of
which nothing is used, makes tokens, tokens that are read and targets few numbers each. Neither GPUs nor products in
float32 compile anything by shape: packs stay as they are there.
"""

from dataclasses import dataclass
from typing import Protocol

import torch

LEAST_STEP = 64
"""Lengths below 8,192 are multiples of it, longer ones of the power of two that is 1/128 to 1/64 of them."""


class KeysLike(Protocol):
    """Which keys the runs of a pack see where sequences share a beginning."""

    @property
    def index_U(self) -> torch.Tensor: ...
    @property
    def cu_seqlens(self) -> torch.Tensor: ...
    @property
    def max_seqlen(self) -> int: ...


class PackLike(Protocol):
    """What is read of a pack: T tokens of B sequences end to end, K of them targets."""

    @property
    def input_ids_T(self) -> torch.Tensor: ...
    @property
    def position_ids_T(self) -> torch.Tensor: ...
    @property
    def cu_seqlens(self) -> torch.Tensor: ...
    @property
    def max_seqlen(self) -> int: ...
    @property
    def rows_K(self) -> torch.Tensor: ...
    @property
    def read_R(self) -> torch.Tensor: ...
    @property
    def targets_K(self) -> torch.Tensor: ...
    @property
    def keys(self) -> KeysLike | None: ...


@dataclass(frozen=True)
class _Keys:
    index_U: torch.Tensor
    cu_seqlens: torch.Tensor
    max_seqlen: int


@dataclass(frozen=True)
class _Pack:
    input_ids_T: torch.Tensor
    position_ids_T: torch.Tensor
    cu_seqlens: torch.Tensor
    max_seqlen: int
    rows_K: torch.Tensor
    read_R: torch.Tensor
    targets_K: torch.Tensor
    keys: KeysLike | None


def rounded_length(length: int) -> int:
    """The least length that is not below this one of those that are used; 0 for 0."""
    step = max(LEAST_STEP, 1 << max(length.bit_length() - 7, 0))
    return -(-length // step) * step


def rounded(pack: PackLike, dtype: torch.dtype) -> PackLike:
    """The pack as a model of this type takes it: with filler behind what is there, or the pack itself.

    Its first K targets are those of the pack.
    """
    if pack.input_ids_T.device.type != "cpu" or dtype != torch.bfloat16:
        return pack
    num_tokens, num_read, num_targets = (ids.numel() for ids in (pack.input_ids_T, pack.read_R, pack.targets_K))
    more_read = rounded_length(num_read) - num_read
    more_targets = rounded_length(num_targets) - num_targets
    filler = rounded_length(num_tokens + more_read) - num_tokens
    if filler == more_targets == 0:
        return pack
    positions_F = torch.arange(filler)
    runs = [filler] if filler else []
    return _Pack(
        input_ids_T=torch.cat([pack.input_ids_T, torch.zeros_like(positions_F)]),
        position_ids_T=torch.cat([pack.position_ids_T, positions_F]),
        cu_seqlens=_with_runs(pack.cu_seqlens, runs),
        max_seqlen=max(pack.max_seqlen, filler),
        rows_K=torch.cat([pack.rows_K, pack.rows_K[-1:].expand(more_targets)]),
        read_R=torch.cat([pack.read_R, num_tokens + positions_F[:more_read]]),
        targets_K=torch.cat([pack.targets_K, pack.targets_K.new_zeros(more_targets)]),
        keys=pack.keys
        and _Keys(
            index_U=torch.cat([pack.keys.index_U, num_tokens + positions_F]),
            cu_seqlens=_with_runs(pack.keys.cu_seqlens, runs),
            max_seqlen=max(pack.keys.max_seqlen, filler),
        ),
    )


def _with_runs(cu_seqlens: torch.Tensor, lengths: list[int]) -> torch.Tensor:
    """Bounds with more runs of these lengths, one at most."""
    return torch.cat([cu_seqlens, *(cu_seqlens[-1:] + length for length in lengths)])
