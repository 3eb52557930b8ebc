"""Compute cost by sequence length."""

from transformers import PretrainedConfig

_LINEAR = frozenset({"conv", "linear_attention", "mlp", "moe"})
"""Names in `layer_types` of layers without attention, whose cost is linear."""
RECURRENT = frozenset({"linear_attention", "hybrid"})
"""Names in `layer_types` of layers with a recurrent state, alone or beside attention."""


def quadratic_cost(config: PretrainedConfig) -> float:
    """Return q such that the forward pass for L tokens costs in proportion to L + q L^2 multiply-adds.

    Per token: one multiply-add per weight in projections, MLP and head, with only active experts. Causal attention: L^2
    / 2 times 2 multiply-adds per attention layer and query dimension.
    """
    text = config.get_text_config()
    hidden, layers = text.hidden_size, text.num_hidden_layers
    head_size = getattr(text, "head_dim", None) or hidden // text.num_attention_heads
    query = text.num_attention_heads * head_size
    key_value = (getattr(text, "num_key_value_heads", None) or text.num_attention_heads) * head_size
    # Other mixers count as if they had the projections of attention.
    # Query and output projections, key and value projections, and the three MLP matrices (gate, up, down).
    weights = layers * (2 * hidden * query + 2 * hidden * key_value + 3 * hidden * active_width(text))
    return num_attention_layers(text) * query / (weights + hidden * text.vocab_size)


def num_attention_layers(text: PretrainedConfig) -> int:
    """Return the number of layers with attention, alone or beside a recurrent layer."""
    types = getattr(text, "layer_types", None)
    return int(text.num_hidden_layers) if types is None else sum(kind not in _LINEAR for kind in types)


def num_recurrent_layers(text: PretrainedConfig) -> int:
    """Return the number of layers with a recurrent state."""
    return sum(kind in RECURRENT for kind in getattr(text, "layer_types", None) or ())


def active_width(text: PretrainedConfig) -> int:
    """Return the MLP width per token and layer; for mixtures, the combined width of active experts."""
    dense: int = getattr(text, "intermediate_size", None) or 4 * text.hidden_size
    num_active = getattr(text, "num_experts_per_tok", None)
    if not num_active:
        return dense
    expert: int = getattr(text, "moe_intermediate_size", None) or dense
    shared = getattr(text, "shared_expert_intermediate_size", None)
    return int(num_active * expert + (shared or (getattr(text, "n_shared_experts", None) or 0) * expert))
