"""Moves a role's states between GPU and host memory, for roles that share a GPU in turn."""

from collections.abc import Iterable
from typing import Any

import torch
from deepspeed.runtime.zero.offload_config import OffloadStateTypeEnum
from torch import nn


class HostCopies:
    """Read-only tensors with a permanent copy in host memory, so that moving to the host copies nothing.

    If a tensor was modified on the GPU, such as the weights of a moving reference, it is copied again.
    """

    def __init__(self, tensors: Iterable[torch.Tensor], *, pin: bool) -> None:
        self._tensors = list(tensors)
        self._pin = pin
        self._copies: list[torch.Tensor | None] = [None] * len(self._tensors)
        self._versions = [-1] * len(self._tensors)
        self._is_away = False

    def leave(self) -> None:
        """Switch all tensors to the host copies."""
        if self._is_away:
            return
        for number, tensor in enumerate(self._tensors):
            tensor.data = self._copy(number, tensor)
        self._is_away = True

    def come_back(self, device: torch.device) -> None:
        """Copy all tensors to the device. The host copies are kept."""
        if not self._is_away:
            return
        for number, tensor in enumerate(self._tensors):
            # Asynchronous with pinned memory. Later kernels on the same stream wait for the copy.
            tensor.data = tensor.data.to(device, non_blocking=True, copy=True)
            # torch increments the version with each in-place change.
            self._versions[number] = tensor._version
        self._is_away = False

    def _copy(self, number: int, tensor: torch.Tensor) -> torch.Tensor:
        copy = self._copies[number]
        if copy is None:
            copy = torch.empty_like(tensor.data, device="cpu", pin_memory=self._pin)
        if self._versions[number] != tensor._version:
            copy.copy_(tensor.data)
        self._copies[number] = copy
        return copy


class TrainedStates:
    """Moves a DeepSpeed engine's tensors off the GPU: states and trained weights by DeepSpeed, frozen weights here.

    DeepSpeed's `offload_states` ignores frozen weights at stages 1 and 2, and fails on them at stage 3. With frozen
    weights at stage 3, the trained weights (an adapter) therefore stay on the GPU.
    """

    def __init__(self, engine: Any, module: nn.Module, *, device: torch.device) -> None:
        self._engine = engine
        self._device = device
        frozen = [getattr(p, "ds_tensor", p) for p in module.parameters() if not p.requires_grad]
        self._frozen = HostCopies(frozen, pin=device.type == "cuda")
        self._is_partitioned = any(hasattr(p, "ds_tensor") for p in module.parameters())
        self._has_frozen = bool(frozen)
        self._is_away = False

    @property
    def are_movable(self) -> bool:
        """Whether DeepSpeed supports moving the states: not at stage 0, and not at stage 1 with bf16 weights."""
        return hasattr(self._engine.optimizer, "offload_states")

    def leave(self, *, with_weights: bool) -> None:
        """Move the states to host memory, and also the weights if `with_weights` is set."""
        if self.are_movable:
            left_out = set() if with_weights else {OffloadStateTypeEnum.lp_params}
            if self._is_partitioned and self._has_frozen:
                left_out.add(OffloadStateTypeEnum.lp_params)
            self._engine.offload_states(include=[s for s in OffloadStateTypeEnum if s not in left_out])
            self._is_away = True
        if with_weights:
            self._frozen.leave()

    def come_back(self) -> None:
        """Move everything back to the GPU."""
        if self._is_away:
            self._engine.reload_states()
            self._is_away = False
        self._frozen.come_back(self._device)
