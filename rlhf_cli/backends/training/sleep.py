"""Moves a role's states between accelerator and host memory, for roles that take turns on a GPU."""

from collections.abc import Iterable
from typing import Any

import torch
from deepspeed.runtime.zero.offload_config import OffloadStateTypeEnum
from torch import nn


class HostCopies:
    """Tensors that are only read, with one copy in host memory that is made once and never written back.

    A tensor that was changed on the accelerator, such as the weight of a reference that moves, is copied again.
    """

    def __init__(self, tensors: Iterable[torch.Tensor], *, pin: bool) -> None:
        self._tensors = list(tensors)
        self._pin = pin
        self._copies: list[torch.Tensor | None] = [None] * len(self._tensors)
        self._versions = [-1] * len(self._tensors)
        self._is_away = False

    def leave(self) -> None:
        """Let the tensors use their copies in host memory."""
        if self._is_away:
            return
        for number, tensor in enumerate(self._tensors):
            tensor.data = self._copy(number, tensor)
        self._is_away = True

    def come_back(self, device: torch.device) -> None:
        """Put the tensors on the device; the copies stay for the next time."""
        if not self._is_away:
            return
        for number, tensor in enumerate(self._tensors):
            tensor.data = tensor.data.to(device, non_blocking=True, copy=True)
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
    """A DeepSpeed engine's tensors on its accelerator: states of trained weights, and weights that stay frozen.

    DeepSpeed moves the states. It leaves frozen weights behind at the stages 1 and 2, and at stage 3 it fails on them,
    so they are moved here; at stage 3 the trained weights beside frozen ones, an adapter's, then stay.
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
        """Whether DeepSpeed can move its states: not at stage 0, nor at stage 1 with bf16 weights."""
        return hasattr(self._engine.optimizer, "offload_states")

    def leave(self, *, with_weights: bool) -> None:
        """Move the states to host memory, and the weights if asked for."""
        if self.are_movable:
            left_out = set() if with_weights else {OffloadStateTypeEnum.lp_params}
            if self._is_partitioned and self._has_frozen:
                left_out.add(OffloadStateTypeEnum.lp_params)
            self._engine.offload_states(include=[s for s in OffloadStateTypeEnum if s not in left_out])
            self._is_away = True
        if with_weights:
            self._frozen.leave()

    def come_back(self) -> None:
        """Bring back what left."""
        if self._is_away:
            self._engine.reload_states()
            self._is_away = False
        self._frozen.come_back(self._device)
