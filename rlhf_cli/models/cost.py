"""The cost of a sequence in a model, by its length."""

from transformers import (
    PretrainedConfig,
)


def quadratic_cost(config: PretrainedConfig) -> float:
    """Return q such that a sequence of L tokens costs in proportion to L + q L^2 (multiplications of a forward pass).

    A token takes one multiplication per weight of the projections, MLP and head, in a mixture only the chosen experts;
    causal attention L^2 / 2 times 2 multiplications per layer and dimension of the query heads.
    """
    text = config.get_text_config()
    hidden, layers = text.hidden_size, text.num_hidden_layers
    head_size = getattr(text, "head_dim", None) or hidden // text.num_attention_heads
    query = text.num_attention_heads * head_size
    key_value = (getattr(text, "num_key_value_heads", None) or text.num_attention_heads) * head_size
    weights = layers * (2 * hidden * query + 2 * hidden * key_value + 3 * hidden * active_width(text))
    return layers * query / (weights + hidden * text.vocab_size)


def active_width(text: PretrainedConfig) -> int:
    """Return the width of the MLPs that a token runs through in a layer; of a mixture, in a layer with experts."""
    dense: int = getattr(text, "intermediate_size", None) or 4 * text.hidden_size
    num_active = getattr(text, "num_experts_per_tok", None)
    if not num_active:
        return dense
    expert: int = getattr(text, "moe_intermediate_size", None) or dense
    shared = getattr(text, "shared_expert_intermediate_size", None)
    return int(num_active * expert + (shared or (getattr(text, "n_shared_experts", None) or 0) * expert))
