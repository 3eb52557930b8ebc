"""What models read of a pack, which comes from another layer, and filler behind its tokens."""

from dataclasses import replace
from typing import Any, ClassVar, Protocol

import torch

from rlhf_cli.models.vision.pictures import PackPictures


class KeysLike(Protocol):
    """Which keys the runs of a pack see where sequences share a beginning; a dataclass."""

    __dataclass_fields__: ClassVar[dict[str, Any]]

    @property
    def index_U(self) -> torch.Tensor: ...
    @property
    def cu_seqlens(self) -> torch.Tensor: ...
    @property
    def max_seqlen(self) -> int: ...


class PackLike(Protocol):
    """The fields of a pack that are read: T tokens of B sequences end to end, K of them targets; a dataclass."""

    __dataclass_fields__: ClassVar[dict[str, Any]]

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
    def num_sequences(self) -> int: ...
    @property
    def targets_K(self) -> torch.Tensor: ...
    @property
    def keys(self) -> KeysLike | None: ...
    @property
    def pictures(self) -> PackPictures | None: ...


def with_filler(pack: PackLike, count: int) -> PackLike:
    """Return the pack with `count` more tokens behind its own: a run that no other token sees and nobody reads."""
    if not count:
        return pack
    num_tokens = pack.input_ids_T.numel()
    nothing_F = pack.input_ids_T.new_zeros(count)
    keys = pack.keys and replace(
        pack.keys,
        index_U=torch.cat([pack.keys.index_U, torch.arange(num_tokens, num_tokens + count, device=nothing_F.device)]),
        cu_seqlens=torch.cat([pack.keys.cu_seqlens, pack.keys.cu_seqlens[-1:] + count]),
        max_seqlen=max(pack.keys.max_seqlen, count),
    )
    return replace(
        pack,
        input_ids_T=torch.cat([pack.input_ids_T, nothing_F]),
        position_ids_T=torch.cat([pack.position_ids_T, nothing_F]),  # nobody looks at where filler stands
        cu_seqlens=torch.cat([pack.cu_seqlens, pack.cu_seqlens[-1:] + count]),
        max_seqlen=max(pack.max_seqlen, count),
        keys=keys,
        pictures=pack.pictures and pack.pictures.with_filler(count),
    )
