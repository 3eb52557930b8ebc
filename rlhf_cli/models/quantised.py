"""Weights in 4 bits (bitsandbytes) as the numbers that they stand for."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from rlhf_cli.models.tensor_parallel import whole_shape

Dequantise = Callable[[torch.Tensor, Any], torch.Tensor]


def _by_bitsandbytes(packed: torch.Tensor, state: Any) -> torch.Tensor:
    from bitsandbytes.functional import dequantize_4bit

    dense: torch.Tensor = dequantize_4bit(packed, state)
    return dense


def dense(
    named: Iterable[tuple[str, torch.Tensor]],
    parameters: Mapping[str, nn.Parameter],
    *,
    dequantise: Dequantise = _by_bitsandbytes,
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors of these parameters, dequantised one at a time if they are in 4 bits."""
    for name, tensor in named:
        state = getattr(parameters[name], "quant_state", None)
        yield name, tensor if state is None else dequantise(tensor, state)


def dense_layout(parameter: torch.Tensor) -> tuple[tuple[int, ...], torch.dtype]:
    """Return shape and type of the whole weight, wherever it is partitioned, split over ranks or packed in 4 bits."""
    state = getattr(parameter, "quant_state", None)
    if state is not None:
        return tuple(state.shape), state.dtype
    return whole_shape(parameter), parameter.dtype
