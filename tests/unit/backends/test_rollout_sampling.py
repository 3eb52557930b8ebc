"""Inverse transform sampling of tokens, compared with slow loops and manual calculations."""

import numpy as np
import pytest
import torch

from rlhf_cli.backends.rollout.transformers_sampling import (
    keep_top_p,
    processed_logits,
    request_uniforms,
    sample_tokens,
)
from rlhf_cli.data.rollouts import SamplingParams


def slow_draw(probabilities: np.ndarray, uniform: float) -> int:
    total = 0.0
    for token, probability in enumerate(probabilities):
        total += probability
        if total > uniform:
            return token
    raise AssertionError("probabilities do not add up to 1")


@pytest.mark.parametrize("vocabulary", [64, 300, 4096])
def test_draws_are_those_of_a_loop_over_the_cumulative_sum(vocabulary):
    torch.manual_seed(0)
    logits = torch.randn(50, vocabulary) * 3
    uniforms = torch.rand(50, dtype=torch.float64)
    tokens, logprobs = sample_tokens(logits, uniforms, SamplingParams(1, temperature=0.7))
    probabilities = (logits.double() / 0.7).softmax(-1).numpy()
    expected = [slow_draw(row, uniform) for row, uniform in zip(probabilities, uniforms.tolist(), strict=True)]
    assert tokens.tolist() == expected
    dense = (logits / 0.7).log_softmax(-1).gather(-1, tokens[:, None])[:, 0]
    torch.testing.assert_close(logprobs, dense, atol=1e-5, rtol=0)


def test_a_row_is_drawn_the_same_alone_and_among_others():
    torch.manual_seed(1)
    logits, uniforms = torch.randn(40, 5000), torch.rand(40, dtype=torch.float64)
    sampling = SamplingParams(1, top_p=0.9)
    together = sample_tokens(logits, uniforms, sampling)
    for row in (0, 17, 39):
        alone = sample_tokens(logits[row : row + 1], uniforms[row : row + 1], sampling)
        assert (alone[0][0], alone[1][0]) == (together[0][row], together[1][row])


def test_top_p_keeps_the_smallest_set_that_reaches_it_and_renormalises():
    logits = torch.tensor([[0.15, 0.5, 0.05, 0.3]]).log()
    kept = keep_top_p(logits, 0.7)
    assert torch.isinf(kept[0]).tolist() == [True, False, True, False]
    tokens, logprobs = sample_tokens(
        logits.expand(2, -1), torch.tensor([0.5, 0.7], dtype=torch.float64), SamplingParams(1, top_p=0.7)
    )
    assert tokens.tolist() == [1, 3]  # with 0.5 of 0.8, token 1 is sampled up to a uniform number of 0.625
    torch.testing.assert_close(logprobs.exp(), torch.tensor([0.625, 0.375]))


def test_top_p_below_the_likeliest_token_leaves_that_one():
    logits = torch.tensor([[2.0, 1.0, 0.0]])
    tokens, logprobs = sample_tokens(logits, torch.tensor([0.999], dtype=torch.float64), SamplingParams(1, top_p=0.01))
    assert tokens.tolist() == [0]
    assert logprobs.tolist() == [0.0]


def kept(probabilities, **sampling):
    """Return the renormalised rest of a distribution."""
    logits = torch.tensor([probabilities]).log()
    return processed_logits(logits, SamplingParams(1, **sampling)).softmax(-1)[0].tolist()


def test_top_k_keeps_ties_of_the_last_token_that_stays():
    assert kept([0.4, 0.1, 0.3, 0.2], top_k=2) == pytest.approx([4 / 7, 0, 3 / 7, 0])
    assert kept([0.4, 0.2, 0.2, 0.2], top_k=2) == pytest.approx([0.4, 0.2, 0.2, 0.2])
    assert kept([0.5, 0.25, 0.25], top_k=5) == pytest.approx([0.5, 0.25, 0.25])


def test_min_p_drops_tokens_strictly_below_its_share_of_the_likeliest():
    assert kept([0.5, 0.25, 0.125, 0.125], min_p=0.25) == pytest.approx([0.5, 0.25, 0.125, 0.125])
    assert kept([0.5, 0.25, 0.125, 0.125], min_p=0.26) == pytest.approx([2 / 3, 1 / 3, 0, 0])
    assert kept([0.5, 0.3, 0.2], min_p=1.0) == [1, 0, 0]


def test_temperature_comes_before_min_p_and_top_k_before_top_p():
    # squared and renormalised at temperature 0.5: 0.25 : 0.09 : 0.04, so 0.2 falls below a fifth of 0.5
    assert kept([0.5, 0.3, 0.2], temperature=0.5, min_p=0.2) == pytest.approx([25 / 34, 9 / 34, 0])
    # with 0.4, 0.3 and 0.3, top-p 0.5 keeps two; of the two that top-k leaves, 4/7 suffices alone
    assert kept([0.4, 0.31, 0.29], top_p=0.5) == pytest.approx([40 / 71, 31 / 71, 0])
    assert kept([0.4, 0.31, 0.29], top_p=0.5, top_k=2) == [1, 0, 0]


def test_a_penalty_divides_seen_logits_above_zero_and_multiplies_those_below_also_for_greedy_sampling():
    logits = torch.tensor([[2.0, 1.8, -1.0, -1.2], [2.0, 1.8, -1.0, -1.2]])
    seen = torch.tensor([[True, False, True, False], [False] * 4])
    sampling = SamplingParams(1, repetition_penalty=2.0, greedy=True)
    penalized = torch.tensor([[1.0, 1.8, -2.0, -1.2], [2.0, 1.8, -1.0, -1.2]])
    torch.testing.assert_close(processed_logits(logits, sampling, seen_BV=seen), penalized)
    tokens, logprobs = sample_tokens(logits, torch.zeros(2, dtype=torch.float64), sampling, seen_BV=seen)
    assert tokens.tolist() == [1, 0]
    torch.testing.assert_close(logprobs, penalized.log_softmax(-1)[[0, 1], [1, 0]])


def test_every_row_of_a_large_batch_has_its_own_seen_tokens():
    torch.manual_seed(2)
    logits, seen = torch.randn(300, 2000), torch.rand(300, 2000) < 0.5  # in three chunks
    sampling = SamplingParams(1, repetition_penalty=1.5, greedy=True)
    tokens, _ = sample_tokens(logits, torch.zeros(300, dtype=torch.float64), sampling, seen_BV=seen)
    assert torch.equal(tokens, torch.where(seen & (logits > 0), logits / 1.5, logits).argmax(-1))


def test_greedy_takes_the_likeliest_token_and_its_log_prob_at_temperature_one():
    logits = torch.tensor([[0.0, 2.0, 1.0]])
    sampling = SamplingParams(1, temperature=0.1, top_p=0.1, greedy=True)
    tokens, logprobs = sample_tokens(logits, torch.tensor([0.99], dtype=torch.float64), sampling)
    assert tokens.tolist() == [1]
    torch.testing.assert_close(logprobs, torch.log_softmax(logits, -1)[:, 1])


def test_frequencies_follow_the_distribution():
    probabilities = torch.tensor([0.6, 0.25, 0.1, 0.04, 0.01])
    num_draws = 20_000
    uniforms = request_uniforms(list(range(num_draws)), 1)[:, 0]
    tokens, _ = sample_tokens(probabilities.log().expand(num_draws, -1), uniforms, SamplingParams(1))
    counts = torch.bincount(tokens, minlength=5)
    expected = probabilities * num_draws
    chi_square = ((counts - expected) ** 2 / expected).sum()
    assert chi_square < 18.5  # 99.9 % of chi-square with 4 degrees of freedom


def test_tokens_without_probability_are_never_drawn():
    logits = torch.full((2, 130), -torch.inf)
    logits[:, 70] = 0.0
    nearly_one = float(np.nextafter(1.0, 0.0))
    tokens, logprobs = sample_tokens(logits, torch.tensor([0.0, nearly_one], dtype=torch.float64), SamplingParams(1))
    assert tokens.tolist() == [70, 70]
    assert logprobs.tolist() == [0.0, 0.0]


def test_uniform_numbers_of_a_request_depend_on_its_seed_alone():
    together = request_uniforms([3, 8, 11], 6)
    torch.testing.assert_close(request_uniforms([8], 6)[0], together[1], atol=0, rtol=0)
    torch.testing.assert_close(request_uniforms([8], 3)[0], together[1, :3], atol=0, rtol=0)
    assert not torch.equal(together[0], together[1])
    assert ((together >= 0) & (together < 1)).all()
