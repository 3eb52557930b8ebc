"""Pack fields that models read, and filler tokens after a pack.

The pack records are defined in another layer, hence the protocols.
"""

from dataclasses import replace
from typing import Any, ClassVar, Protocol

import torch

from rlhf_cli.models.vision.pictures import PackPictures


class _KeysLike(Protocol):
    """Keys visible to each run in a pack with shared prefixes; a dataclass."""

    __dataclass_fields__: ClassVar[dict[str, Any]]

    @property
    def index_U(self) -> torch.Tensor: ...
    @property
    def cu_seqlens(self) -> torch.Tensor: ...
    @property
    def max_seqlen(self) -> int: ...


class PackLike(Protocol):
    """Pack fields read by models: T tokens from B concatenated sequences, K of them targets; a dataclass."""

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
    def keys(self) -> _KeysLike | None: ...
    @property
    def pictures(self) -> PackPictures | None: ...
    @property
    def routed_experts(self) -> torch.Tensor | None: ...
    @property
    def host(self) -> "PackLike | None": ...


def host_of(pack: PackLike) -> PackLike:
    """Return the pack in host memory, where reading values does not wait for a GPU."""
    return pack.host or pack


def with_filler(pack: PackLike, count: int) -> PackLike:
    """Append `count` filler tokens: a run that no other token attends to and that is never read."""
    if not count:
        return pack
    num_tokens = pack.input_ids_T.numel()
    filler_F = pack.input_ids_T.new_zeros(count)
    # In packs with shared prefixes, filler tokens attend to themselves only.
    keys = pack.keys and replace(
        pack.keys,
        index_U=torch.cat([pack.keys.index_U, torch.arange(num_tokens, num_tokens + count, device=filler_F.device)]),
        cu_seqlens=torch.cat([pack.keys.cu_seqlens, pack.keys.cu_seqlens[-1:] + count]),
        max_seqlen=max(pack.keys.max_seqlen, count),
    )
    experts_TLk = pack.routed_experts
    if experts_TLk is not None:
        own_choice = experts_TLk.new_full((count, *experts_TLk.shape[1:]), -1)
        experts_TLk = torch.cat([experts_TLk, own_choice])
    return replace(
        pack,
        input_ids_T=torch.cat([pack.input_ids_T, filler_F]),
        # Filler outputs are discarded, so any valid position works.
        position_ids_T=torch.cat([pack.position_ids_T, filler_F]),
        cu_seqlens=torch.cat([pack.cu_seqlens, pack.cu_seqlens[-1:] + count]),
        max_seqlen=max(pack.max_seqlen, count),
        keys=keys,
        pictures=pack.pictures and pack.pictures.with_filler(count),
        routed_experts=experts_TLk,
        host=pack.host and with_filler(pack.host, count),
    )
