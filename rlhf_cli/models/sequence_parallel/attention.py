"""Sequence-parallel attention: communication around each rank's attention kernel.

- `ulysses` (arXiv 2309.14509): each rank processes all tokens for a subset of heads.
- `gather` (arXiv 2407.21783, 3.3.2): each rank processes its queries against all gathered keys.
- `ring`: like gather, with a ring-flash-attn kernel that overlaps gathering keys for some heads with computing others.
"""

import functools
import importlib
import sys
from collections.abc import Callable
from importlib.util import find_spec
from types import ModuleType
from typing import Any

import torch

from rlhf_cli.errors import UsageError
from rlhf_cli.models.sequence_parallel.shards import GatherTokens, HeadsForTokens, Shards, TokensForHeads

_RING_PACKAGE = "ring_flash_attn"


def attend_shared(
    query_1HLD: torch.Tensor,
    key_1HLD: torch.Tensor,
    value_1HLD: torch.Tensor,
    shards: Shards,
    attend: Callable[..., torch.Tensor],
    **kwargs: Any,
) -> torch.Tensor:
    """Compute attention [1, local tokens, heads, size] for this rank's queries.

    Args:
        attend: the kernel, (query [1, heads, tokens, size], key and value [1, kv heads, tokens, size], `kwargs`) ->
            [1, tokens, heads, size].
        kwargs: arguments that transformers passes to every attention function, see `Part.runs`.
    """
    ranks = shards.ranks
    query, key, value = (tensor[0].transpose(0, 1) for tensor in (query_1HLD, key_1HLD, value_1HLD))
    if ranks.mode == "ulysses":
        repeats = key_repeats(query.shape[1], key.shape[1], ranks.size)
        # All-to-all splits heads evenly over ranks, so repeat key heads if their number is not a multiple of the ranks.
        if repeats > 1:
            key, value = key.repeat_interleave(repeats, 1), value.repeat_interleave(repeats, 1)
        whole = (TokensForHeads.apply(tensor, ranks).transpose(0, 1)[None] for tensor in (query, key, value))
        if (sinks := kwargs.get("s_aux")) is not None:
            kwargs["s_aux"] = sinks.chunk(ranks.size)[ranks.rank]
        return HeadsForTokens.apply(attend(*whole, **kwargs)[0], ranks)[None]
    if ranks.mode == "ring":
        return _attend_by_ring(query, key, value, shards, **kwargs)[None]
    keys = shards.keys or slice(None)
    seen = (GatherTokens.apply(tensor, ranks)[keys].transpose(0, 1)[None] for tensor in (key, value))
    return attend(query_1HLD, *seen, **kwargs)


def key_repeats(heads: int, kv_heads: int, size: int) -> int:
    """Return how often to repeat each key head so that every rank receives the keys for its query heads."""
    if kv_heads % size == 0:
        return 1
    return size // kv_heads if size % kv_heads == 0 else heads // kv_heads


def _attend_by_ring(
    query_LHD: torch.Tensor, key_LHD: torch.Tensor, value_LHD: torch.Tensor, shards: Shards, **kwargs: Any
) -> torch.Tensor:
    assert kwargs.get("key_index") is None, "can_share_prompts is false for this kernel"
    window = kwargs.get("sliding_window") or 0
    output_LHD: torch.Tensor = _ring_kernel()(
        query_LHD,
        key_LHD,
        value_LHD,
        kwargs["cu_seq_lens_q"],
        kwargs["cu_seq_lens_k"],
        kwargs["max_length_q"],
        kwargs["max_length_k"],
        # Gather one head while computing another: the smallest buffers.
        heads_k_stride=1,
        local_k_slice=shards.keys,
        softmax_scale=kwargs.get("scaling"),
        causal=True,
        # The kernel counts keys to the left of the query; transformers includes the query itself.
        window_size=(window - 1, 0) if window else (-1, -1),
        group=shards.ranks.group,
    )
    return output_LHD


@functools.cache
def _ring_kernel() -> Callable[..., Any]:
    """Load the llama3 kernel from its module only: importing the package fails with transformers 5."""
    spec = find_spec(_RING_PACKAGE)
    assert spec is not None, "check_ring_kernel verified the installation"
    # A stand-in package makes Python skip the real __init__, which imports the failing modules.
    package = ModuleType(_RING_PACKAGE)
    package.__path__ = list(spec.submodule_search_locations or ())
    before = sys.modules.get(_RING_PACKAGE)
    sys.modules[_RING_PACKAGE] = package
    try:
        module = importlib.import_module(f"{_RING_PACKAGE}.llama3_flash_attn_varlen")
    finally:
        if before is None:
            del sys.modules[_RING_PACKAGE]
        else:
            sys.modules[_RING_PACKAGE] = before
    return module.llama3_flash_attn_varlen_func


def check_ring_kernel() -> None:
    """Raise UsageError if ring-flash-attn or its dependency flash-attn is not installed."""
    for package, extra in ((_RING_PACKAGE, "ring"), ("flash_attn", "flash")):
        if find_spec(package) is None:
            name = package.replace("_", "-")
            raise UsageError(f"--ring_flash_attn needs the package {name}: pip install 'rlhf-cli[{extra}]'")
