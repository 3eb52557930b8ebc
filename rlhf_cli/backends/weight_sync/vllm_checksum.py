"""Adds to vLLM's own nccl and ipc engines what ours has built in: a ledger of what arrived.

A mixin rather than a wrapper, as vLLM builds its engines itself. Leaves out vLLM, so that it is tested without.
"""

from collections.abc import Iterable
from typing import Any

import torch

from rlhf_cli.backends.weight_sync.transfer import Ledger, check_tensors, checkpoint_shapes, optional_tensors


class WatchedModel:
    """Stands for a model whose `load_weights` is entered in a ledger."""

    def __init__(self, model: Any, ledger: Ledger, shapes: dict[str, tuple[int, ...]]) -> None:
        self._model = model
        self._ledger = ledger
        self._shapes = shapes

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> object:
        """Load weights as the model itself does, and note them."""
        held = list(weights)
        for name, tensor in held:
            self._ledger.add(name, tensor)
            self._shapes[name] = tuple(tensor.shape)
        return self._model.load_weights(held)


class Watching:
    """Comes before one of vLLM's engines among the bases of a class."""

    model: object
    model_config: Any
    pushed_checksum: int | None = None

    def start_weight_update(self) -> None:
        """Open a new ledger."""
        self._ledger = Ledger()
        self._shapes: dict[str, tuple[int, ...]] = {}
        super().start_weight_update()  # type: ignore[misc]

    def receive_weights(self, update_info: object) -> None:
        """Receive with the model replaced by one that is watched: the engine only calls its `load_weights`."""
        model = self.model
        self.model = WatchedModel(model, self._ledger, self._shapes)
        try:
            super().receive_weights(update_info)  # type: ignore[misc]
        finally:
            self.model = model

    def finish_weight_update(self) -> None:
        """Close the update; raise RunError names tensors of the checkpoint that did not arrive, or unknown ones."""
        super().finish_weight_update()  # type: ignore[misc]
        self.pushed_checksum = self._ledger.checksum
        expected = checkpoint_shapes(self.model_config.model)
        if expected:
            check_tensors(self._shapes, expected, optional=optional_tensors(self.model_config.hf_config))


class Reconnecting:
    """Comes before an engine with a communicator of its own among the bases of a class."""

    def init_transfer_engine(self, init_info: object) -> None:
        """Join the trainer's group. Leave the former one first: it would keep its buffers on the GPU for good."""
        self.shutdown()  # type: ignore[attr-defined]
        super().init_transfer_engine(init_info)  # type: ignore[misc]
