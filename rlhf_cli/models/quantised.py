"""Dequantize 4-bit weights (bitsandbytes)."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from rlhf_cli.models.tensor_parallel import whole_shape

_Dequantize = Callable[[torch.Tensor, Any], torch.Tensor]


def _by_bitsandbytes(packed: torch.Tensor, state: Any) -> torch.Tensor:
    # bitsandbytes is optional (extra `quant`).
    from bitsandbytes.functional import dequantize_4bit

    dense: torch.Tensor = dequantize_4bit(packed, state)
    return dense


def dense(
    named: Iterable[tuple[str, torch.Tensor]],
    parameters: Mapping[str, nn.Parameter],
    *,
    dequantize: _Dequantize = _by_bitsandbytes,
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the parameters' tensors, dequantizing 4-bit ones one at a time."""
    for name, tensor in named:
        state = getattr(parameters[name], "quant_state", None)
        yield name, tensor if state is None else dequantize(tensor, state)


def dense_layout(parameter: torch.Tensor) -> tuple[tuple[int, ...], torch.dtype]:
    """Return shape and dtype of the full weight, even if it is partitioned, split over ranks or 4-bit."""
    # bitsandbytes packs two values into one byte, so the stored shape is not the weight's shape.
    state = getattr(parameter, "quant_state", None)
    if state is not None:
        return tuple(state.shape), state.dtype
    return whole_shape(parameter), parameter.dtype
