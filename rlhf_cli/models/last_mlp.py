"""Compute the last layer's MLP only for tokens that are read.

No token attends to another after this layer, so MLP outputs for prompts and other tokens without a target have no
effect.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn


class LastMLP:
    """Hooks on the last layer's MLP.

    They do nothing if the decoder uses other module names or its MLP takes more than hidden states.
    """

    def __init__(self, decoder: nn.Module) -> None:
        self._rows_R: torch.Tensor | None = None
        self._num_tokens = 0
        layers = getattr(decoder, "layers", None)
        mlp = getattr(layers[-1], "mlp", None) if layers else None
        if mlp is not None:
            # Hooks instead of a wrapper module: module names and state dict keys stay the same.
            mlp.register_forward_pre_hook(self._take)
            mlp.register_forward_hook(self._put_back)

    @contextmanager
    def only(self, rows_R: torch.Tensor) -> Iterator[None]:
        """Restrict forward passes in the block to these positions [R], without duplicates; other positions get 0."""
        self._rows_R = rows_R
        try:
            yield
        finally:
            self._rows_R = None

    def _take(self, mlp: nn.Module, args: tuple[Any, ...]) -> tuple[object, ...]:
        if self._rows_R is None or len(args) != 1:
            return args
        (hidden_1TD,) = args
        self._num_tokens = hidden_1TD.shape[1]
        return (hidden_1TD.index_select(1, self._rows_R),)

    def _put_back(self, mlp: nn.Module, args: tuple[object, ...], output: object) -> object:
        if self._rows_R is None or len(args) != 1:
            return output
        # Mixture-of-experts MLPs also return router outputs.
        if isinstance(output, tuple):
            return (self._spread(output[0], self._rows_R), *output[1:])
        return self._spread(output, self._rows_R)

    def _spread(self, output_1RD: torch.Tensor, rows_R: torch.Tensor) -> torch.Tensor:
        whole_1TD = output_1RD.new_zeros(1, self._num_tokens, output_1RD.shape[2])
        # index_copy keeps the graph; rows without a token add 0 to the residual stream.
        return whole_1TD.index_copy(1, rows_R, output_1RD)
