"""Tokens chosen among all tokens in an optimizer step."""

import pytest
import torch

from rlhf_cli.algorithms.token_selection import (
    clip_cov_tokens,
    covariances,
    high_entropy_tokens,
    kl_cov_tokens,
    random_keys,
)
from rlhf_cli.config.policy import PolicyConfig


@pytest.mark.parametrize("fraction", [0.05, 0.2, 0.5, 1.0])
@pytest.mark.parametrize("count", [1, 2, 7, 100])
def test_tokens_with_high_entropy_are_those_above_the_quantile(fraction, count) -> None:
    entropy_N = torch.rand(count, generator=torch.Generator().manual_seed(count))
    expected = entropy_N.double() >= torch.quantile(entropy_N.double(), 1 - fraction)
    assert high_entropy_tokens(entropy_N, fraction).equal(expected)
    assert high_entropy_tokens(entropy_N, 1.0).all()


def test_a_fifth_of_ten_tokens_and_no_token_by_hand() -> None:
    """For 0 to 9, quantile 0.8 is 7.2."""
    assert high_entropy_tokens(torch.arange(10.0), 0.2).tolist() == [False] * 8 + [True] * 2
    assert high_entropy_tokens(torch.zeros(0), 0.2).tolist() == []
    assert high_entropy_tokens(torch.ones(3), 0.2).all()


def test_covariances_by_hand() -> None:
    """Means: -2 and 1."""
    found = covariances(torch.tensor([-1.0, -4.0, -1.0]), torch.tensor([4.0, -2.0, 1.0]))
    assert found.tolist() == [3.0, 6.0, 0.0]


def test_clip_cov_draws_tokens_within_the_range_by_their_keys() -> None:
    covariances_N = torch.tensor([0.5, 2.0, 3.0, 4.0, 6.0, 2.5])
    clipped_N, keys_N = torch.tensor([0, 0, 1, 0, 0, 0]), torch.tensor([1, 9, 2, 5, 3, 7])

    def drawn(**settings) -> list[int]:
        given = PolicyConfig(policy_loss="clip_cov", **settings)
        return clip_cov_tokens(covariances_N, clipped_N, keys_N, given).nonzero().squeeze(1).tolist()

    assert drawn() == [3]  # at least one of 1, 3 and 5
    assert drawn(clip_cov_ratio=0.34) == [3, 5]
    assert drawn(clip_cov_ratio=1.0) == [1, 3, 5]
    assert drawn(clip_cov_range=(6.5, 7.0)) == []


def test_kl_cov_takes_the_highest_covariances() -> None:
    covariances_N = torch.tensor([0.5, 2.0, -3.0, 4.0])

    def taken(ratio: float) -> list[int]:
        given = PolicyConfig(policy_loss="kl_cov", kl_cov_ratio=ratio)
        return kl_cov_tokens(covariances_N, given).nonzero().squeeze(1).tolist()

    assert (taken(2e-4), taken(0.5), taken(1.0)) == ([3], [1, 3], [0, 1, 2, 3])
    assert kl_cov_tokens(torch.zeros(0), PolicyConfig(policy_loss="kl_cov")).tolist() == []


def test_keys_are_spread_and_depend_on_the_seed_and_each_input() -> None:
    rollout_K, targets_K = -torch.rand(20_000, generator=torch.Generator().manual_seed(1)), torch.arange(20_000) % 50
    keys_K = random_keys(rollout_K, targets_K, seed=0)
    assert 0 <= int(keys_K.min()) <= int(keys_K.max()) < 2**31
    counts = torch.histc(keys_K.double(), bins=20, min=0, max=2**31)
    assert 850 < int(counts.min()) <= int(counts.max()) < 1150  # 1,000 each, with a deviation of 31
    for other in (
        random_keys(rollout_K, targets_K, seed=1),
        random_keys(rollout_K, targets_K + 1, seed=0),
        random_keys(rollout_K - 1e-4, targets_K, seed=0),
    ):
        assert float((other == keys_K).float().mean()) < 1e-3
        assert abs(float(torch.corrcoef(torch.stack([other, keys_K]).double())[0, 1])) < 0.05
