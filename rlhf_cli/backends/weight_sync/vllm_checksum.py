"""Mixins that add checksums of received weights to vLLM's nccl and ipc engines.

Mixins instead of wrappers, because vLLM constructs the engines. This module does not import vLLM, so tests can run
without it.
"""

from collections.abc import Iterable
from typing import Any

import torch

from rlhf_cli.backends.weight_sync.transfer import Ledger, check_tensors, checkpoint_shapes, optional_tensors


class _WatchedModel:
    """Proxy for a model that records all tensors passed to `load_weights`."""

    def __init__(self, model: Any, ledger: Ledger, shapes: dict[str, tuple[int, ...]]) -> None:
        self._model = model
        self._ledger = ledger
        self._shapes = shapes

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> object:
        """Record the weights, then load them into the model."""
        # A list, because an iterable can be read only once. vLLM passes one buffer at a time, so it stays small.
        received = list(weights)
        for name, tensor in received:
            self._ledger.add(name, tensor)
            self._shapes[name] = tuple(tensor.shape)
        return self._model.load_weights(received)


class Watching:
    """Mixin that verifies received weights. List it before vLLM's engine in the base classes."""

    model: object
    model_config: Any
    pushed_checksum: int | None = None

    def start_weight_update(self) -> None:
        """Start a new ledger and open the update."""
        self._ledger = Ledger()
        self._shapes: dict[str, tuple[int, ...]] = {}
        super().start_weight_update()  # type: ignore[misc]

    def receive_weights(self, update_info: object) -> None:
        """Receive weights through a proxy that records them."""
        # Safe to swap: during this call, vLLM's engines use only `self.model.load_weights`.
        model = self.model
        self.model = _WatchedModel(model, self._ledger, self._shapes)
        try:
            super().receive_weights(update_info)  # type: ignore[misc]
        finally:
            self.model = model

    def finish_weight_update(self) -> None:
        """Close the update. Raises RunError if tensors are missing or unknown."""
        super().finish_weight_update()  # type: ignore[misc]
        self.pushed_checksum = self._ledger.checksum
        expected = checkpoint_shapes(self.model_config.model)
        if expected:
            check_tensors(self._shapes, expected, optional=optional_tensors(self.model_config.hf_config))


class Reconnecting:
    """Mixin that allows connecting again. List it before a vLLM engine with a communicator in the base classes."""

    def init_transfer_engine(self, init_info: object) -> None:
        """Join the trainer's group, after leaving the previous one."""
        # vLLM overwrites the previous communicator without destroying it, which would leak its GPU buffers.
        self.shutdown()  # type: ignore[attr-defined]
        super().init_transfer_engine(init_info)  # type: ignore[misc]
