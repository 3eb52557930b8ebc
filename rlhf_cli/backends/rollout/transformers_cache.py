"""In-place KV cache for decoding with transformers models.

transformers' DynamicCache copies the entire cache for every token, and StaticCache attends over the full capacity.
Models with sliding-window or other attention layers use DynamicCache. Convolutions and recurrent layers keep a state
per row instead of keys and values.
"""

from collections.abc import Sequence
from typing import Any

import torch
from transformers import Cache, DynamicCache, PretrainedConfig
from transformers.cache_utils import (
    CacheLayerMixin,
    DynamicIndexedLayer,
    DynamicLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionLayer,
)

from rlhf_cli.models.cost import attention_layers, key_value_width, layer_configs
from rlhf_cli.models.mixers.layers import OWN_STATES

_STATES = frozenset({"conv", "hybrid", "hybrid_sliding", "linear_attention"})
"""Names in `layer_types` of layers with convolution or recurrent states."""


class _InPlaceLayer(DynamicLayer):
    """Cache layer with keys and values [rows, heads, capacity, head size]. `update` appends and returns views."""

    def __init__(self, capacity: int) -> None:
        super().__init__()
        self.capacity = capacity
        self._length = 0

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        self.dtype, self.device = key_states.dtype, key_states.device
        self.keys = self._room(key_states, len(key_states))
        self.values = self._room(value_states, len(value_states))
        self.is_initialized = True

    def _room(self, states: torch.Tensor, rows: int) -> torch.Tensor:
        return states.new_empty(rows, states.shape[1], self.capacity, states.shape[3])

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: object, **kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        end = self._length + key_states.shape[-2]
        self.keys[:, :, self._length : end] = key_states
        self.values[:, :, self._length : end] = value_states
        self._length = end
        return self.keys[:, :, :end], self.values[:, :, :end]

    def get_seq_length(self) -> int:
        return self._length

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Replace row i by row indices[i]. Rows may be repeated or dropped."""
        self.keys = self._selected(self.keys, indices)
        self.values = self._selected(self.values, indices)

    def _selected(self, states: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
        # Copy only the filled part of the capacity.
        selected = self._room(states, len(indices))
        torch.index_select(states[:, :, : self._length], 0, indices, out=selected[:, :, : self._length])
        return selected

    def append_rows(self, others: Sequence["_InPlaceLayer"], *, capacity: int, width: int | None = None) -> None:
        """Append the rows of `others`, so that all rows end at column `width`, by default the last one of this layer.

        Columns beyond a row's are zero. Rows may lose columns at the left, which must be padding.
        """
        width = self._length if width is None else width
        layers = [self, *others]
        lengths = [layer._length for layer in layers]
        self.capacity = capacity
        self.keys = self._aligned([layer.keys for layer in layers], lengths, width)
        self.values = self._aligned([layer.values for layer in layers], lengths, width)
        self._length = width

    def _aligned(self, parts: list[torch.Tensor], lengths: list[int], width: int) -> torch.Tensor:
        aligned = self._room(parts[0], sum(map(len, parts)))
        for rows, states, length in zip(aligned.split([*map(len, parts)]), parts, lengths, strict=True):
            kept = min(length, width)
            # Zeros, because attention multiplies padding by 0, and NaN times 0 is NaN.
            rows[:, :, : width - kept] = 0
            rows[:, :, width - kept : width] = states[:, :, length - kept : length]
        return aligned


class _StateLayer(LinearAttentionLayer):
    """Cache layer with a convolution and a recurrent state [rows, ...]. They have no columns to align."""

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Replace row i by row indices[i]. Rows may be repeated or dropped."""
        for states in (self.conv_states, self.recurrent_states):
            states.update({number: state.index_select(0, indices) for number, state in _filled(states)})

    def append_rows(self, others: Sequence["_StateLayer"], **_: int | None) -> None:
        """Append the rows of `others`."""
        for name in ("conv_states", "recurrent_states"):
            parts = [getattr(layer, name) for layer in (self, *others)]
            parts[0].update({number: torch.cat([part[number] for part in parts]) for number, _ in _filled(parts[0])})

    def num_bytes(self) -> int:
        """Return the memory of the states."""
        return sum(state.nbytes for states in (self.conv_states, self.recurrent_states) for _, state in _filled(states))


def _filled(states: dict[int, torch.Tensor | None]) -> list[tuple[int, torch.Tensor]]:
    # LFM2 has no recurrent state, and MLPs of Nemotron-H have a layer without any.
    return [(number, state) for number, state in states.items() if state is not None]


class _StateAndKeysLayer(_StateLayer, _InPlaceLayer):
    """Cache layer of models with attention and a recurrent layer side by side."""

    def __init__(self, capacity: int, number_of_states: int) -> None:
        _InPlaceLayer.__init__(self, capacity)
        LinearAttentionLayer.__init__(self, number_of_states=number_of_states)

    def lazy_initialization(self, *args: torch.Tensor, **kwargs: object) -> None:
        # transformers passes keys and values by position, states by keyword.
        (_InPlaceLayer if args else _StateLayer).lazy_initialization(self, *args, **kwargs)

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        _StateLayer.batch_select_indices(self, indices)
        _InPlaceLayer.batch_select_indices(self, indices)

    def append_rows(self, others: Sequence["_StateAndKeysLayer"], **sizes: Any) -> None:  # type: ignore[override]
        _StateLayer.append_rows(self, others)
        _InPlaceLayer.append_rows(self, others, **sizes)


def decoding_cache(config: PretrainedConfig, *, capacity: int) -> Cache:
    """Create an empty cache for sequences of up to `capacity` tokens."""
    return Cache(layers=[_in_place(layer, capacity) for layer in DynamicCache(config=config).layers])


def _in_place(layer: CacheLayerMixin | LinearAttentionLayer, capacity: int) -> CacheLayerMixin | LinearAttentionLayer:
    # By exact type: sliding windows are subclasses, and keep their layers.
    if type(layer) is DynamicLayer:
        return _InPlaceLayer(capacity)
    if type(layer) is LinearAttentionLayer:
        return _StateLayer(layer.number_of_states)
    if type(layer) is LinearAttentionAndFullAttentionLayer:
        return _StateAndKeysLayer(capacity, layer.number_of_states)
    return layer


def keeps_states(architecture: PretrainedConfig) -> bool:
    """Return whether a model has convolution or recurrent states, and this module can manage them."""
    text = architecture.get_text_config()
    return text.model_type not in OWN_STATES and not _STATES.isdisjoint(getattr(text, "layer_types", None) or ())


def has_only_full_attention(config: PretrainedConfig) -> bool:
    """Return whether all attention layers use full attention, so that rows can join a batch."""
    layers = decoding_cache(config, capacity=0).layers
    return all(isinstance(layer, _InPlaceLayer | _StateLayer) for layer in layers)


def join_caches(caches: list[Cache], rows: torch.Tensor, *, capacity: int) -> Cache:
    """Concatenate caches along the rows, select `rows`, and set the capacity to `capacity` tokens.

    All caches must contain the same number of tokens. The first one is modified and returned.
    """
    joined = caches[0]
    for index, layer in enumerate(joined.layers):
        others = [cache.layers[index] for cache in caches[1:]]
        if others and isinstance(layer, _StateLayer):
            layer.append_rows(others, capacity=capacity)
        elif others:
            # Keys of an indexer select the tokens that sparse attention sees.
            for name in ("keys", "values", *(["indexer_keys"] if isinstance(layer, DynamicIndexedLayer) else [])):
                setattr(layer, name, torch.cat([getattr(one, name) for one in (layer, *others)]))
        if isinstance(layer, _InPlaceLayer):
            layer.capacity = capacity
        layer.batch_select_indices(rows)
    return joined


def append_rows(cache: Cache, other: Cache, *, width: int, capacity: int) -> None:
    """Append the rows of `other` to a cache for which `has_only_full_attention` holds, in place.

    All rows end at column `width` afterwards.
    """
    for layer, others in zip(cache.layers, other.layers, strict=True):
        layer.append_rows([others], width=width, capacity=capacity)


def select_rows(cache: Cache, indices: torch.Tensor) -> None:
    """Select, drop or repeat cache rows, in place."""
    for layer in cache.layers:
        layer.batch_select_indices(indices)


def bytes_per_token(config: PretrainedConfig, dtype: torch.dtype) -> int:
    """Compute the KV cache bytes per token."""
    layers = zip(layer_configs(config), attention_layers(config), strict=True)
    # Factor 2 for keys and values.
    return 2 * dtype.itemsize * sum(key_value_width(layer) for layer, has_attention in layers if has_attention)


def state_bytes(model: Any) -> int:
    """Return the bytes of all convolution and recurrent states per row: 0 for most models."""
    cache = decoding_cache(model.config.get_text_config(), capacity=1)
    states = [layer for layer in cache.layers if isinstance(layer, _StateLayer)]
    if states:
        # Shapes of states are known to the layers only: decode one token.
        token = torch.zeros(1, 1, dtype=torch.int64, device=model.device)
        # With positions, because Qwen-VL models remember the shifts that they compute themselves.
        model(input_ids=token, position_ids=token, past_key_values=cache, use_cache=True, logits_to_keep=1)
    return sum(layer.num_bytes() for layer in states)
