"""Shapes of plain decoders from their config.json, without the seconds that importing transformers and torch takes."""

from types import SimpleNamespace
from typing import Any

from rlhf_cli.models.cost import head_size, key_value_width
from rlhf_cli.planning.shapes import (
    ModelShape,
    backward_values,
    fused_savings,
    kept_values,
    largest_layer,
    num_positions,
    recomputed_values,
)

Values = dict[str, Any]
"""Contents of a config.json."""
_BIASED = {"qwen2": ("q_proj", "k_proj", "v_proj")}
"""Projections that always have a bias, by type."""
_NORMALIZED = ("qwen3",)
"""Types with a norm of query heads and one of key heads."""
_TYPES = ("llama", "mistral", "qwen2", "qwen3")
_NEEDED = (
    *("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads"),
    *("vocab_size", "tie_word_embeddings", "max_position_embeddings"),
)
_UNUSUAL = ("attention_bias", "mlp_bias", "quantization_config", "auto_map")
"""Settings with which a model has other parameters."""


def plain_shape(config: Values) -> ModelShape | None:
    """Return the shape of a model from the contents of its config.json, or None if it is not a plain decoder.

    Example: Qwen2.5-7B has 4 * 3,584 + 2 * 512 + 3 * 18,944 columns of 3,584 weights in the projections of a layer.
    """
    # Only transformers has the head size of a Qwen3 model without one.
    needed = (*_NEEDED, "head_dim") if config.get("model_type") in _NORMALIZED else _NEEDED
    is_complete = all(config.get(name) is not None for name in needed)
    if config.get("model_type") not in _TYPES or not is_complete or any(config.get(name) for name in _UNUSUAL):
        return None
    text = SimpleNamespace(**{"hidden_act": "silu"} | config)
    # The names of older files, which transformers replaces when it reads them.
    text.rope_parameters = config.get("rope_parameters") or renamed_rope(config.get("rope_scaling") or {})
    text.get_text_config = lambda: text
    text.to_dict = lambda: config
    return _shape(text)


def renamed_rope(rope: Values) -> Values:
    """Return settings of rotary embeddings with the key that transformers uses today."""
    return rope | {"rope_type": rope.get("rope_type") or rope.get("type")}


def _shape(text: Any) -> ModelShape:
    hidden, layers, table = text.hidden_size, text.num_hidden_layers, text.vocab_size * text.hidden_size
    query, key = text.num_attention_heads * head_size(text), key_value_width(text)
    linears = _linears(hidden, text.intermediate_size, query, key)
    biases = sum(outputs for name, _, outputs in linears if name in _BIASED.get(text.model_type, ()))
    norms = 2 * hidden + (2 * head_size(text) if text.model_type in _NORMALIZED else 0)
    decoder = layers * (sum(inputs * outputs for _, inputs, outputs in linears) + biases + norms) + hidden
    return ModelShape(
        parameters=decoder + table * (1 if text.tie_word_embeddings else 2),
        active=decoder + table,
        head=table,
        has_tied_head=text.tie_word_embeddings,
        largest=max(table, *(inputs * outputs for _, inputs, outputs in linears)),
        layers=layers,
        hidden=hidden,
        vocabulary=text.vocab_size,
        attention_layers=layers,
        query_width=query,
        key_heads=text.num_key_value_heads,
        cache_values=layers * 2 * key,
        kept_values=kept_values(text),
        recomputed_values=recomputed_values(text),
        layer_values=largest_layer(text),
        fused_savings=fused_savings(text),
        backward_values=backward_values(text),
        fused_backward_values=backward_values(text, is_fused=True),
        capped_heads=0,
        positions=num_positions(text),
        linears=tuple((*layer, layers) for layer in linears),
    )


def _linears(hidden: int, width: int, query: int, key: int) -> list[tuple[str, int, int]]:
    """Return name, inputs and outputs of the linear layers of a decoder layer."""
    attention = [("q_proj", hidden, query), ("k_proj", hidden, key), ("v_proj", hidden, key), ("o_proj", query, hidden)]
    return [*attention, ("gate_proj", hidden, width), ("up_proj", hidden, width), ("down_proj", width, hidden)]
