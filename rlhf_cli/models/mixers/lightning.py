"""Lightning attention of MiniMax on each run of a pack.

The layer in transformers scans within its forward pass. A pack cannot run that on rows: under ZeRO-3 each call of a
projection is a collective, and ranks have different numbers of rows. So projections compute on the flat pack here.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn


def lightning_scan(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    layer: Any,
    initial_state: torch.Tensor | None = None,
    output_final_state: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the output [rows, length, heads, size], and the state [rows, heads, size, size] after the last token.

    Within a block of tokens it multiplies queries and keys, as attention does; all earlier blocks are in the state
    (arXiv 2405.17381). The arithmetic is that of transformers.
    """
    query, key, value = (tensor.transpose(1, 2) for tensor in (query, key, value))
    state = initial_state
    if state is None:
        state = value.new_zeros(*value.shape[:2], layer.head_dim, layer.head_dim)
    outputs = []
    for start in range(0, query.shape[2], layer.block_size):
        block_query, block_key, block_value = (
            tensor[:, :, start : start + layer.block_size] for tensor in (query, key, value)
        )
        count = block_query.shape[2]
        scores = block_query @ block_key.transpose(-1, -2) * layer.diagonal_decay[:, :, :count, :count]
        outputs.append(block_query * layer.query_decay[:, :count] @ state + scores @ block_value)
        added = (block_key * layer.key_decay[:, -count:]).transpose(-1, -2) @ block_value
        state = state * torch.exp(-layer.slope_rate * count) + added
    return torch.cat(outputs, dim=2).transpose(1, 2), state


def lightning_forward(
    layer: Any, hidden_states: torch.Tensor, scan: Callable[..., tuple[torch.Tensor, Any]]
) -> tuple[torch.Tensor, None]:
    """Compute the layer for a flat pack [1, T, D], with the scan `scan`."""
    projected = layer.act_fn(layer.qkv_proj(hidden_states))
    parts = projected.unflatten(-1, (layer.num_attention_heads, 3 * layer.head_dim)).split(layer.head_dim, dim=-1)
    scanned = layer.norm(scan(*parts, layer)[0].flatten(2))
    return layer.out_proj(nn.functional.sigmoid(layer.output_gate(hidden_states)) * scanned), None
