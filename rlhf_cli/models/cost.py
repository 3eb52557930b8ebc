"""Compute cost by sequence length."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PretrainedConfig

_LINEAR = frozenset({"conv", "linear_attention", "mlp", "moe"})
"""Names in `layer_types` of layers without attention, whose cost is linear."""
RECURRENT = frozenset({"linear_attention", "hybrid"})
"""Names in `layer_types` of layers with a recurrent state, alone or beside attention."""


def quadratic_cost(config: "PretrainedConfig") -> float:
    """Return q such that the forward pass for L tokens costs in proportion to L + q L^2 multiply-adds.

    Per token: one multiply-add per weight in projections, MLP and head, with only active experts. Causal attention: L^2
    / 2 times 2 multiply-adds per attention layer and query dimension.
    """
    text = config.get_text_config()
    weights, queries = text.hidden_size * text.vocab_size, 0
    for layer, has_attention in zip(layer_configs(text), attention_layers(text), strict=True):
        query = layer.num_attention_heads * head_size(layer)
        # Other mixers count as if they had the projections of attention.
        # Query and output projections, key and value projections, and the three MLP matrices (gate, up, down).
        weights += layer.hidden_size * (2 * query + 2 * key_value_width(layer) + 3 * active_width(layer))
        queries += query * has_attention
    return queries / weights


def layer_configs(text: "PretrainedConfig") -> "list[PretrainedConfig]":
    """Return the configuration of each layer. Sizes may differ: Gemma 4 has larger heads for full attention."""
    # In older releases of transformers, all layers have the same sizes.
    return list(getattr(text, "per_layer_config", None) or [text] * text.num_hidden_layers)


def head_size(layer: "PretrainedConfig") -> int:
    """Return the size of a layer's attention heads."""
    return getattr(layer, "head_dim", None) or layer.hidden_size // layer.num_attention_heads


def key_value_width(layer: "PretrainedConfig") -> int:
    """Return the number of key values, or value values, that a layer with attention computes per token."""
    return (getattr(layer, "num_key_value_heads", None) or layer.num_attention_heads) * head_size(layer)


def attention_layers(text: "PretrainedConfig") -> list[bool]:
    """Return for each layer whether it has attention, alone or beside a recurrent layer."""
    types = getattr(text, "layer_types", None) or ["full_attention"] * text.num_hidden_layers
    return [kind not in _LINEAR for kind in types]


def num_recurrent_layers(text: "PretrainedConfig") -> int:
    """Return the number of layers with a recurrent state."""
    return sum(kind in RECURRENT for kind in getattr(text, "layer_types", None) or ())


def active_width(text: "PretrainedConfig") -> int:
    """Return the MLP width per token and layer; for mixtures, the combined width of active experts."""
    dense: int = getattr(text, "intermediate_size", None) or 4 * text.hidden_size
    if getattr(text, "block_auto_adjust_ff_dim", False):
        # LFM2's layers have two thirds of the configured width.
        dense = 2 * dense // 3
    num_active = getattr(text, "num_experts_per_tok", None)
    if not num_active:
        return dense
    expert: int = getattr(text, "moe_intermediate_size", None) or dense
    shared = getattr(text, "shared_expert_intermediate_size", None)
    return int(num_active * expert + (shared or (getattr(text, "n_shared_experts", None) or 0) * expert))
