"""In-place KV cache for decoding with transformers models.

transformers' DynamicCache copies the entire cache for every token, and StaticCache attends over the full capacity.
Models with sliding-window or other attention layers use DynamicCache.
"""

import torch
from transformers import Cache, DynamicCache, PretrainedConfig
from transformers.cache_utils import DynamicLayer


class InPlaceLayer(DynamicLayer):
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

    def append_rows(self, other: "InPlaceLayer", *, width: int, capacity: int) -> None:
        """Append the rows of `other`, so that all rows end at column `width`. Columns beyond a row's are zero.

        Rows may lose columns at the left, which must be padding.
        """
        self.capacity = capacity
        lengths = self._length, other._length
        self.keys = self._aligned((self.keys, other.keys), lengths, width)
        self.values = self._aligned((self.values, other.values), lengths, width)
        self._length = width

    def _aligned(self, parts: tuple[torch.Tensor, ...], lengths: tuple[int, ...], width: int) -> torch.Tensor:
        aligned = self._room(parts[0], sum(map(len, parts)))
        for rows, states, length in zip(aligned.split([*map(len, parts)]), parts, lengths, strict=True):
            kept = min(length, width)
            # Zeros, because attention multiplies padding by 0, and NaN times 0 is NaN.
            rows[:, :, : width - kept] = 0
            rows[:, :, width - kept : width] = states[:, :, length - kept : length]
        return aligned


def has_only_full_attention(config: PretrainedConfig) -> bool:
    """Return whether all layers use full attention."""
    layer_types = getattr(config, "layer_types", None)
    if layer_types is not None:
        return set(layer_types) == {"full_attention"}
    return getattr(config, "sliding_window", None) is None


def decoding_cache(config: PretrainedConfig, *, capacity: int) -> Cache:
    """Create an empty cache for sequences of up to `capacity` tokens."""
    if not has_only_full_attention(config):
        return DynamicCache(config=config)
    return Cache(layers=[InPlaceLayer(capacity) for _ in range(config.num_hidden_layers)])


def join_caches(caches: list[Cache], rows: torch.Tensor, *, capacity: int) -> Cache:
    """Concatenate caches along the rows, select `rows`, and set the capacity to `capacity` tokens.

    All caches must contain the same number of tokens. The first one is modified and returned.
    """
    joined = caches[0]
    for index, layer in enumerate(joined.layers):
        layers = [cache.layers[index] for cache in caches]
        if len(layers) > 1:
            layer.keys = torch.cat([part.keys for part in layers])
            layer.values = torch.cat([part.values for part in layers])
        if isinstance(layer, InPlaceLayer):
            layer.capacity = capacity
        layer.batch_select_indices(rows)
    return joined


def append_rows(cache: Cache, other: Cache, *, width: int, capacity: int) -> None:
    """Append the rows of `other` to a cache of `InPlaceLayer`s, in place. All rows end at column `width` afterwards."""
    for layer, others in zip(cache.layers, other.layers, strict=True):
        layer.append_rows(others, width=width, capacity=capacity)


def select_rows(cache: Cache, indices: torch.Tensor) -> None:
    """Select, drop or repeat cache rows, in place."""
    for layer in cache.layers:
        layer.batch_select_indices(indices)


def head_size(config: PretrainedConfig) -> int:
    """Return the attention head size."""
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def bytes_per_token(config: PretrainedConfig, dtype: torch.dtype) -> int:
    """Compute the KV cache bytes per token."""
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    # Factor 2 for keys and values.
    return 2 * config.num_hidden_layers * heads * head_size(config) * dtype.itemsize
