"""What models read of a pack: its data come from other layers."""

from typing import Any, ClassVar, Protocol

import torch


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
