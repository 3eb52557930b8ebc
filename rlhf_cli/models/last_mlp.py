"""The last layer's MLP, computed only for the tokens that are read.

After it no token looks at another one, so its outputs for prompts and other tokens that predict no target have no
effect.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn


class LastMLP:
    """Hooks around the MLP of a decoder's last layer; without effect if a decoder has other names for its parts, or
    its MLP takes more than the hidden states."""

    def __init__(self, decoder: nn.Module) -> None:
        self._rows_R: torch.Tensor | None = None
        self._num_tokens = 0
        layers = getattr(decoder, "layers", None)
        mlp = getattr(layers[-1], "mlp", None) if layers else None
        if mlp is not None:
            mlp.register_forward_pre_hook(self._take)
            mlp.register_forward_hook(self._put_back)

    @contextmanager
    def only(self, rows_R: torch.Tensor) -> Iterator[None]:
        """Forward passes in the block compute it for these positions [R], each given once; others get nothing added."""
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
        if isinstance(output, tuple):  # of a mixture of experts, with what its router chose
            return (self._spread(output[0], self._rows_R), *output[1:])
        return self._spread(output, self._rows_R)

    def _spread(self, output_1RD: torch.Tensor, rows_R: torch.Tensor) -> torch.Tensor:
        whole_1TD = output_1RD.new_zeros(1, self._num_tokens, output_1RD.shape[2])
        return whole_1TD.index_copy(1, rows_R, output_1RD)
