"""What may share a sequence; how ranks compute together is in e2e/test_sequence_parallel.py."""

import pytest
import torch
from tiny_training import make_sequences
from transformers import Qwen2Config

from rlhf_cli.data.packing.packs import pack
from rlhf_cli.errors import UsageError
from rlhf_cli.models.sequence_parallel import check_sequence_parallel, key_repeats, part_of


def model(heads: int = 8, key_heads: int = 2, **rope: object) -> Qwen2Config:
    more = {"rope_parameters": {"rope_theta": 1e4, **rope}} if rope else {}
    return Qwen2Config(num_attention_heads=heads, num_key_value_heads=key_heads, hidden_size=64, **more)


@pytest.mark.parametrize(
    ("heads", "key_heads", "size", "repeats"), [(8, 4, 2, 1), (8, 2, 4, 2), (8, 1, 8, 8), (6, 2, 3, 3)]
)
def test_every_rank_gets_the_keys_of_its_query_heads(heads, key_heads, size, repeats) -> None:
    """Rank r has the query heads r * heads / size and on; after repeating, its key heads are those of these queries."""
    assert key_repeats(heads, key_heads, size) == repeats
    sent = torch.arange(key_heads).repeat_interleave(repeats).view(size, -1)
    wanted = torch.arange(heads).div(heads // key_heads, rounding_mode="floor").view(size, -1)
    per_key = wanted.shape[1] // sent.shape[1]
    assert torch.equal(sent.repeat_interleave(per_key, dim=1), wanted)


@pytest.mark.parametrize(
    ("config", "size", "num_ranks", "attention", "fault"),
    [
        (model(), 3, 4, "varlen", "--sequence_parallel_size 3 does not divide the 4 ranks of the run"),
        (model(6), 4, 4, "varlen", "--sequence_parallel_size 4 does not divide the model's 6 attention heads"),
        (model(), 2, 2, "sdpa", "attn_implementation varlen, and this run takes sdpa"),
        (model(rope_type="dynamic", factor=2.0), 2, 2, "varlen", "rotary positions of type dynamic need the whole"),
    ],
)
def test_ranks_that_cannot_share_a_sequence_are_refused(config, size, num_ranks, attention, fault) -> None:
    with pytest.raises(UsageError, match=fault):
        check_sequence_parallel(config, size=size, num_ranks=num_ranks, attention=attention)


def test_one_rank_a_sequence_asks_for_nothing() -> None:
    check_sequence_parallel(model(7, 7), size=1, num_ranks=3, attention="eager")
    one = pack(make_sequences(3))
    part = part_of(one, None)
    assert part.pack is one
    assert torch.equal(part.rows_k, one.rows_K)
    assert part.whole(one.targets_K) is one.targets_K
