"""GAE, whitening, token rewards, KL and its controller, and the table of estimators."""

import math
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from extending_page import page_code

from rlhf_cli.algorithms.advantages import adaptive_lambdas, compute_advantages, gae, step_advantages, whiten
from rlhf_cli.algorithms.estimators.estimator import Advantages, Estimator, Experience
from rlhf_cli.algorithms.estimators.gae import ActorCriticPolicyConfig, ppo
from rlhf_cli.algorithms.estimators.group import GroupPolicyConfig, dpo
from rlhf_cli.algorithms.estimators.reinforce import ReinforcePolicyConfig
from rlhf_cli.algorithms.estimators.table import ESTIMATORS
from rlhf_cli.algorithms.kl import kl_estimate, next_kl_coef
from rlhf_cli.algorithms.shaping import clip_scores, shaped_scores, token_rewards
from rlhf_cli.config.policy import PolicyConfig
from rlhf_cli.config.scoring import RewardConfig


def slow_gae(rewards, values, cu, gamma, lambd, bootstrap):
    advantages = [0.0] * len(rewards)
    for b, (start, end) in enumerate(pairwise(cu)):
        next_value, next_advantage = bootstrap[b], 0.0
        for t in range(end - 1, start - 1, -1):
            next_advantage = rewards[t] + gamma * next_value - values[t] + gamma * lambd * next_advantage
            next_value, advantages[t] = values[t], next_advantage
    return advantages


@pytest.mark.parametrize(("gamma", "lambd"), [(1.0, 1.0), (1.0, 0.95), (0.9, 0.5), (1.0, 0.0), (0.0, 1.0)])
def test_gae_equals_the_loop(gamma: float, lambd: float) -> None:
    generator = torch.Generator().manual_seed(3)
    lengths = torch.randint(0, 300, (40,), generator=generator)
    cu = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    rewards_N, values_N = torch.randn(2, int(cu[-1]), generator=generator)
    bootstrap_B = torch.randn(40, generator=generator)
    advantages_N, returns_N = gae(rewards_N, values_N, cu, gamma=gamma, lambd=lambd, bootstrap_B=bootstrap_B)
    slow = slow_gae(rewards_N.tolist(), values_N.tolist(), cu.tolist(), gamma, lambd, bootstrap_B.tolist())
    torch.testing.assert_close(advantages_N, torch.tensor(slow), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(returns_N, advantages_N + values_N, rtol=1e-5, atol=1e-5)


def test_gae_with_a_lambda_per_response_equals_the_loop_over_each() -> None:
    generator = torch.Generator().manual_seed(3)
    lengths = torch.randint(0, 50, (30,), generator=generator)
    cu = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    rewards_N, values_N = torch.randn(2, int(cu[-1]), generator=generator, dtype=torch.float64)
    bootstrap_B, lambd_B = torch.rand(2, 30, generator=generator, dtype=torch.float64)
    given = values_N.clone(), rewards_N.clone()
    advantages_N, _ = gae(rewards_N, values_N, cu, gamma=0.9, lambd=lambd_B, bootstrap_B=bootstrap_B)
    assert given[0].equal(values_N)
    assert given[1].equal(rewards_N)
    for number, (start, end) in enumerate(pairwise(cu.tolist())):
        ends = torch.tensor([0, end - start])
        own = {"lambd": float(lambd_B[number]), "bootstrap_B": bootstrap_B[number : number + 1]}
        expected, _ = gae(rewards_N[start:end], values_N[start:end], ends, gamma=0.9, **own)
        torch.testing.assert_close(advantages_N[start:end], expected)


def test_lambda_adapts_to_the_length_and_the_critic_has_its_own() -> None:
    """With alpha 0.25, lambda is 0 for 2 and 4 tokens and 1/2 for 8."""
    cu = torch.tensor([0, 2, 6, 14])
    assert adaptive_lambdas(cu, alpha=0.25).tolist() == [0.0, 0.0, 0.5]
    rewards_N, values_N = torch.zeros(14, dtype=torch.float64), torch.zeros(14, dtype=torch.float64)
    rewards_N[[1, 5, 13]] = 1.0
    ones_B = torch.ones(3, dtype=torch.float64)
    given = Experience(
        shaped_N=rewards_N,
        parts=(),
        values_N=values_N,
        bootstrap_B=None,
        cu=cu,
        groups_B=torch.arange(3),
        trained_B=ones_B.bool(),
        greedy_B=None,
        scores_B=ones_B,
    )
    found = ppo(given, ActorCriticPolicyConfig(lambd_alpha=0.25, critic_lambd=1.0))
    assert found.at_tokens(cu).tolist() == [0.0, 1.0] + [0.0] * 3 + [1.0] + [0.5**power for power in range(7, -1, -1)]
    assert found.returns_N is not None
    assert found.returns_N.tolist() == [1.0] * 14
    same = ppo(given, ActorCriticPolicyConfig(lambd_alpha=0.25)).returns_N
    assert same is not None
    assert same.tolist() == found.at_tokens(cu).tolist()


def test_gae_by_hand() -> None:
    # d = [0 + .5*2 - 1, 1 + .5*0 - 2] = [0, -1]; A = [0 + .5*.5*-1, -1]; then a separate segment: 3 - 1.
    advantages_N, returns_N = gae(
        torch.tensor([0.0, 1.0, 3.0]), torch.tensor([1.0, 2.0, 1.0]), torch.tensor([0, 2, 3]), gamma=0.5, lambd=0.5
    )
    assert advantages_N.tolist() == [-0.25, -1.0, 2.0]
    assert returns_N.tolist() == [0.75, 1.0, 3.0]


def test_a_finished_response_is_worth_nothing_after_its_end_and_a_cut_one_its_bootstrap() -> None:
    rewards_N, values_N, cu = torch.tensor([1.0]), torch.tensor([0.25]), torch.tensor([0, 1])
    assert gae(rewards_N, values_N, cu, gamma=1.0, lambd=1.0)[1].tolist() == [1.0]
    cut = gae(rewards_N, values_N, cu, gamma=0.5, lambd=1.0, bootstrap_B=torch.tensor([4.0]))
    assert cut[1].tolist() == [3.0]


def test_undiscounted_monte_carlo_returns_are_the_sums_of_rewards() -> None:
    rewards_N = torch.tensor([0.5, -1.0, 2.0, 1.0])
    returns_N = gae(rewards_N, torch.randn(4), torch.tensor([0, 3, 4]), gamma=1.0, lambd=1.0)[1]
    torch.testing.assert_close(returns_N, torch.tensor([1.5, 1.0, 2.0, 1.0]))


def test_tool_output_between_trained_tokens_changes_nothing() -> None:
    """GAE over a sequence with two tool output tokens equals GAE over its trained tokens."""
    rewards, values, trained = [0.1, 0.2, 9.0, 9.0, 1.0], [0.5, 0.4, 7.0, 7.0, 0.3], [True, True, False, False, True]
    gamma, lambd = 0.9, 0.8
    expected, next_value, next_advantage = [], 0.0, 0.0
    for reward, value, is_trained in zip(reversed(rewards), reversed(values), reversed(trained), strict=True):
        if is_trained:
            next_advantage = reward + gamma * next_value - value + gamma * lambd * next_advantage
            next_value = value
            expected.append(next_advantage)
    keep = torch.tensor(trained)
    flat = gae(torch.tensor(rewards)[keep], torch.tensor(values)[keep], torch.tensor([0, 3]), gamma=gamma, lambd=lambd)
    torch.testing.assert_close(flat[0], torch.tensor(expected[::-1]))


def test_whitened_values_have_mean_zero_and_unbiased_variance_one() -> None:
    white_N = whiten(torch.tensor([1.0, 2.0, 3.0, 4.0]))
    torch.testing.assert_close(white_N, torch.tensor([-1.5, -0.5, 0.5, 1.5]) / math.sqrt(5 / 3), rtol=1e-6, atol=1e-6)


def test_values_that_do_not_vary_are_whitened_to_zero() -> None:
    assert whiten(torch.full((1000,), 0.1)).abs().max() < 1e-9
    assert whiten(torch.tensor([3.0])).tolist() == [0.0]
    assert whiten(torch.zeros(0)).tolist() == []


@pytest.mark.parametrize(
    ("kind", "expected"),
    [("k1", [0.5, -0.5]), ("k2", [0.125, 0.125]), ("k3", [math.exp(-0.5) - 0.5, math.exp(0.5) - 1.5])],
)
def test_kl_estimators_by_hand(kind, expected) -> None:
    estimate = kl_estimate(torch.tensor([-1.0, -2.0]), torch.tensor([-1.5, -1.5]), kind)
    torch.testing.assert_close(estimate, torch.tensor(expected))


def test_k1_and_k3_are_unbiased() -> None:
    policy, reference = torch.tensor([0.2, 0.5, 0.3]), torch.tensor([0.4, 0.4, 0.2])
    exact = (policy * (policy / reference).log()).sum()
    for kind in ("k1", "k3"):
        torch.testing.assert_close((policy * kl_estimate(policy.log(), reference.log(), kind)).sum(), exact)


@pytest.mark.parametrize(("log_ratio", "gradient"), [(-21.0, 0.0), (-19.0, 1 - math.exp(19)), (2.0, 1 - math.exp(-2))])
def test_k3_never_pushes_the_policy_away_from_the_reference(log_ratio: float, gradient: float) -> None:
    logprobs = torch.tensor([log_ratio], dtype=torch.float64, requires_grad=True)
    kl_estimate(logprobs, torch.zeros(1, dtype=torch.float64), "k3").sum().backward()
    assert logprobs.grad is not None
    assert logprobs.grad.item() == pytest.approx(gradient)


def test_k3_of_a_token_the_reference_never_says_is_finite() -> None:
    assert torch.isfinite(kl_estimate(torch.tensor([-200.0]), torch.tensor([0.0]), "k3")).all()


def test_an_unknown_kl_estimator_is_named() -> None:
    with pytest.raises(ValueError, match="k1, k2 or k3, not 'k4'"):
        kl_estimate(torch.zeros(1), torch.zeros(1), "k4")  # type: ignore[arg-type]


@pytest.mark.parametrize(("kl", "factor"), [(12.0, 1.02), (100.0, 1.02), (11.0, 1.01), (10.0, 1.0), (-5.0, 0.98)])
def test_adaptive_coefficient_follows_the_clipped_error(kl: float, factor: float) -> None:
    coef = next_kl_coef(0.5, kl=kl, target=10.0, horizon=1000, num_sequences=100)
    assert coef == pytest.approx(0.5 * factor)


def test_without_a_target_the_coefficient_is_fixed_and_a_huge_batch_cannot_make_it_negative() -> None:
    assert next_kl_coef(0.5, kl=99.0, target=None, horizon=1, num_sequences=100) == 0.5
    assert next_kl_coef(0.5, kl=0.0, target=1.0, horizon=1, num_sequences=100) == 0.0


def test_a_divergence_that_is_not_finite_does_not_reach_the_coefficient() -> None:
    assert next_kl_coef(0.5, kl=math.nan, target=1.0, horizon=1, num_sequences=100) == 0.5


def test_the_score_lands_on_the_last_token_and_the_penalty_on_each() -> None:
    rewards_N = token_rewards(
        torch.tensor([2.0, 5.0, -1.0]), torch.tensor([1.0, 2.0, 4.0]), torch.tensor([0, 2, 2, 3]), kl_coef=0.5
    )
    assert rewards_N.tolist() == [-0.5, 1.0, -3.0]


def test_without_a_reference_only_the_score_is_left() -> None:
    scores_B = torch.tensor([2.0, 1.0], dtype=torch.float64)
    assert token_rewards(scores_B, None, torch.tensor([0, 2, 3]), kl_coef=0.5).tolist() == [0.0, 2.0, 1.0]


def shaped(scores: list[float], lengths: list[int], truncated: list[bool], **settings) -> list[float]:
    reward = RewardConfig(reward_funcs=["exact"], **settings)
    shaped_B = shaped_scores(
        torch.tensor(scores), torch.tensor(lengths), torch.tensor(truncated), reward=reward, max_new_tokens=100
    )
    return shaped_B.tolist()


def test_the_raw_score_is_clipped_before_length_shapes_it() -> None:
    assert clip_scores(torch.tensor([-99.0, 3.0, 99.0]), (-10.0, 10.0)).tolist() == [-10.0, 3.0, 10.0]
    scores, lengths, truncated, clip = [99.0, 99.0], [10, 100], [False, True], {"reward_clip_range": (-10.0, 10.0)}
    assert shaped(scores, lengths, truncated) == [99.0, 99.0]  # no clipping by default
    assert shaped(scores, lengths, truncated, **clip) == [10.0, 10.0]
    overlong = {"overlong_buffer_len": 20, "overlong_penalty_factor": 3.0}
    assert shaped(scores, lengths, truncated, **clip, **overlong) == [10.0, 7.0]
    assert shaped(scores, lengths, truncated, **clip, stop_properly_penalty_coef=0.25) == [10.0, 2.5]


def test_ppo_row_whitens_gae_and_keeps_raw_returns() -> None:
    row = ESTIMATORS["ppo"]
    assert (row.critic, row.min_group) == (True, 1)
    experience = Experience(
        shaped_N=torch.tensor([0.0, 1.0, 3.0]),
        parts=(),
        values_N=torch.tensor([1.0, 2.0, 1.0]),
        bootstrap_B=None,
        cu=torch.tensor([0, 2, 3]),
        groups_B=torch.tensor([0, 1]),
        trained_B=torch.tensor([True, True]),
        greedy_B=None,
    )
    found = compute_advantages(row, experience, settings=ActorCriticPolicyConfig(gamma=0.5, lambd=0.5))
    torch.testing.assert_close(found.per_token_N, whiten(torch.tensor([-0.25, -1.0, 2.0])))
    assert found.returns_N is not None
    assert found.returns_N.tolist() == [0.75, 1.0, 3.0]


def whitened(values: list[float]) -> list[float]:
    return [round(value, 4) for value in whiten(torch.tensor(values)).tolist()]


def advantages(name: str, settings: PolicyConfig, **changes) -> list[float]:
    """Compute advantages of three responses (2, 1, 1 tokens) to one prompt and one to another; rewards 1, 0, 0.5, 2."""
    experience = Experience(
        shaped_N=torch.tensor([0.0, 1.0, 0.0, 0.5, 2.0]),
        parts=((1.0, torch.tensor([1.0, 0.0, 0.5, 2.0])), (0.5, torch.tensor([3.0, 3.0, 9.0, 9.0]))),
        values_N=None,
        bootstrap_B=None,
        cu=torch.tensor([0, 2, 3, 4, 5]),
        groups_B=torch.tensor([0, 0, 0, 1]),
        trained_B=torch.tensor([True, True, True, True]),
        greedy_B=torch.tensor([0.5, 0.5, 0.5, 3.0]),
    )
    found = compute_advantages(ESTIMATORS[name], replace(experience, **changes), settings=settings)
    assert found.returns_N is None
    return [round(advantage, 4) for advantage in found.at_tokens(torch.tensor([0, 2, 3, 4, 5])).tolist()]


@pytest.mark.parametrize(
    ("name", "settings", "expected"),
    [
        ("reinforce++_group", PolicyConfig(), whitened([0.5, 0.5, -0.5, 0.0, 0.0])),
        ("reinforce++", ReinforcePolicyConfig(gamma=0.5), whitened([0.5, 1.0, 0.0, 0.5, 2.0])),
        ("grpo", GroupPolicyConfig(), [1.0, 1.0, -1.0, 0.0, 0.0]),
        ("grpo", GroupPolicyConfig(advantage_std="none"), [0.5, 0.5, -0.5, 0.0, 0.0]),
        ("grpo_passk", GroupPolicyConfig(), [1.0, 1.0, 0.0, 0.0, 0.0]),
        # Before whitening: 1, -1, 0, 0 plus half of -.57735, -.57735, 1.1547, 0; mean 0, variance 2.5 / 3.
        ("gdpo", GroupPolicyConfig(), [0.7792, 0.7792, -1.4117, 0.6325, 0.0]),
        ("rloo", PolicyConfig(), [0.75, 0.75, -0.75, 0.0, 0.0]),
        ("remax", PolicyConfig(), [0.5, 0.5, -0.5, 0.0, -1.0]),
    ],
)
def test_rows_without_a_critic_by_hand(name, settings, expected) -> None:
    assert advantages(name, settings) == expected


def dpo_experience(log_ratios: list[list[float]], scores: list[float], groups: list[int]) -> Experience:
    """Return an experience with the KL penalty 0.1 * log-ratio in the rewards of the tokens."""
    scores_B, lengths = torch.tensor(scores, dtype=torch.float64), torch.tensor([len(one) for one in log_ratios])
    cu = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    kl_N = torch.tensor([ratio for one in log_ratios for ratio in one], dtype=torch.float64)
    return Experience(
        shaped_N=token_rewards(scores_B, kl_N, cu, kl_coef=0.1),
        parts=(),
        values_N=None,
        bootstrap_B=None,
        cu=cu,
        groups_B=torch.tensor(groups),
        trained_B=torch.ones(len(scores), dtype=torch.bool),
        greedy_B=None,
        scores_B=scores_B,
    )


def online_dpo(experience: Experience) -> tuple[list[float], dict[str, float]]:
    """Return the advantage of each response, and the metrics."""
    found = dpo(experience, GroupPolicyConfig(advantage="dpo", init_kl_coef=0.1))
    assert found.per_response_B is not None
    return found.per_response_B.tolist(), dict(found.metrics)


def test_online_dpo_by_hand() -> None:
    # Best: the third response, log-ratio 2; worst: the first, log-ratio -1; beta d = 0.3. The last group is alike.
    experience = dpo_experience([[1.0, -2.0], [5.0], [2.0], [0.5], [0.5]], [0.0, 0.5, 1.0, 3.0, 3.0], [4, 4, 4, 1, 1])
    found, metrics = online_dpo(experience)
    weight = 0.1 / (1 + math.exp(0.3))
    assert found == pytest.approx([-weight, 0.0, weight, 0.0, 0.0])
    assert metrics == pytest.approx({"pair_loss": math.log(1 + math.exp(-0.3)), "pair_accuracy": 1.0})
    # A response that is not trained on is in no pair, here the best: beta d = 0.1 * (5 + 1).
    left = replace(experience, trained_B=torch.tensor([True, True, False, True, True]))
    weight = 0.1 / (1 + math.exp(0.6))
    assert online_dpo(left)[0] == pytest.approx([-weight, weight, 0.0, 0.0, 0.0])
    assert online_dpo(replace(experience, scores_B=torch.ones(5).double())) == ([0.0] * 5, {})


def test_the_gradient_of_online_dpo_is_that_of_the_dpo_loss() -> None:
    generator = torch.Generator().manual_seed(1)
    lengths, scores = [3, 2, 4, 1, 2, 3], [0.2, 0.9, 0.9, 0.5, -1.0, 2.0]
    policy = [torch.randn(n, generator=generator, dtype=torch.float64).requires_grad_() for n in lengths]
    reference = [torch.randn(n, generator=generator, dtype=torch.float64) for n in lengths]
    ratios = [(own.detach() - other).tolist() for own, other in zip(policy, reference, strict=True)]
    found, metrics = online_dpo(dpo_experience(ratios, scores, [0, 0, 0, 1, 1, 1]))
    # The policy loss on-policy: the ratio is 1, and only its gradient counts.
    loss = -sum(a * own.sum() for a, own in zip(found, policy, strict=True))
    gradients = torch.autograd.grad(loss, policy)
    # Of equal scores, the first is the best.
    margins = [(policy[c] - reference[c]).sum() - (policy[r] - reference[r]).sum() for c, r in ((1, 0), (5, 4))]
    losses = [-torch.nn.functional.logsigmoid(0.1 * margin) for margin in margins]
    expected = torch.autograd.grad(sum(losses), policy, allow_unused=True)
    for gradient, wanted in zip(gradients, expected, strict=True):
        torch.testing.assert_close(gradient, torch.zeros_like(gradient) if wanted is None else wanted)
    assert metrics["pair_loss"] == pytest.approx(float(sum(losses)) / 2)


def test_what_is_not_trained_has_no_advantage_and_still_counts_in_its_group() -> None:
    trained_B = torch.tensor([True, False, True, True])
    assert advantages("rloo", PolicyConfig(), trained_B=trained_B) == [0.75, 0.75, 0.0, 0.0, 0.0]
    a, b, c, d = whitened([0.5, 0.5, 0.0, 0.0])  # of the group's [.5, .5, -.5, 0] and of 0
    assert advantages("reinforce++_group", PolicyConfig(), trained_B=trained_B) == [a, b, 0.0, c, d]


@pytest.mark.parametrize("name", ["grpo", "grpo_passk", "gdpo", "rloo", "remax"])
def test_scores_per_response_change_no_bit_and_need_no_array_over_tokens(name: str) -> None:
    """Responses of 2, 0, 1 and 1 tokens; the second has no token for its score, and the third is not trained on."""
    cu, scores_B = torch.tensor([0, 2, 2, 3, 4]), torch.tensor([0.1, 7.0, 0.3, -0.2], dtype=torch.float64)
    experience = Experience(
        shaped_N=None,
        parts=((1.0, scores_B),),
        values_N=None,
        bootstrap_B=None,
        cu=cu,
        groups_B=torch.tensor([0, 0, 1, 1]),
        trained_B=torch.tensor([True, True, False, True]),
        greedy_B=scores_B.flip(0),
        scores_B=scores_B,
    )
    assert experience.rewards_B.tolist() == [0.1, 0.0, 0.3, -0.2]
    row = ESTIMATORS[name]
    found = compute_advantages(row, experience, settings=GroupPolicyConfig())
    advantages = row.advantages
    assert advantages is not None
    at_tokens = replace(experience, shaped_N=experience.rewards_N)
    per_token = Estimator(advantages=lambda e, s: Advantages(advantages(e, s).at_tokens(cu)))
    reference = compute_advantages(per_token, at_tokens, settings=GroupPolicyConfig())
    assert found.per_token_N is None
    assert found.per_response_B is not None
    assert found.per_response_B[2] == 0
    assert torch.equal(found.at_tokens(cu), reference.at_tokens(cu))


def test_the_estimator_of_the_extending_page_by_hand() -> None:
    names = page_code("algorithms/estimators/bounded.py")
    experience = Experience(
        shaped_N=torch.tensor([0.0, 3.0, 0.0, 0.5]),
        parts=(),
        values_N=None,
        bootstrap_B=None,
        cu=torch.tensor([0, 2, 3, 4]),
        groups_B=torch.tensor([0, 0, 0]),
        trained_B=torch.ones(3, dtype=torch.bool),
        greedy_B=None,
    )
    found = compute_advantages(names["BOUNDED"], experience, settings=names["BoundedPolicyConfig"](bound=1.5))
    mean = 3.5 / 3
    assert found.at_tokens(experience.cu).tolist() == pytest.approx([1.5, 1.5, -mean, 0.5 - mean])
    assert found.metrics == {"clipped": pytest.approx(1 / 3)}


def test_rows_are_filed_under_their_names() -> None:
    assert all(name == row.name for name, row in ESTIMATORS.items())


NONE = math.nan
STEPS_N = torch.tensor([0.2, NONE, 0.8, NONE, 0.5, 0.9, NONE, 0.1])
STEPS_CU = torch.tensor([0, 3, 5, 8])
"""Three responses with 3, 2 and 3 tokens; the first two belong to one prompt, and NaN marks tokens inside a step."""


def test_tokens_get_the_normalised_rewards_of_their_own_and_later_steps() -> None:
    found_N = step_advantages(STEPS_N, STEPS_CU, torch.tensor([4, 4, 9]))
    std = math.sqrt(((0.2 - 0.5) ** 2 + (0.8 - 0.5) ** 2) / 2)  # of 0.2, 0.8, 0.5
    low, high = (0.2 - 0.5) / (std + 1e-6), (0.8 - 0.5) / (std + 1e-6)
    other = 0.4 / (math.sqrt(2 * 0.4**2) + 1e-6)  # 0.9 and 0.1 around 0.5
    expected = [low + high, high, high, 0.0, 0.0, other - other, -other, -other]
    assert found_N.tolist() == pytest.approx(expected, abs=1e-6)


def experience_of_steps() -> Experience:
    """Rewards 1, 0 and 0 at the last tokens of the responses, and step rewards with weight 0.5."""
    rewards_N = torch.zeros(8)
    rewards_N[2] = 1.0
    return Experience(
        shaped_N=rewards_N,
        parts=(),
        values_N=None,
        bootstrap_B=None,
        cu=STEPS_CU,
        groups_B=torch.tensor([4, 4, 9]),
        trained_B=torch.ones(3, dtype=torch.bool),
        greedy_B=None,
        steps_N=STEPS_N,
        step_weight=0.5,
    )


@pytest.mark.parametrize("row", ["grpo", "rloo"])
def test_steps_are_compared_within_the_group_beside_the_responses(row: str) -> None:
    experience = experience_of_steps()
    without = replace(experience, steps_N=None)
    plain = compute_advantages(ESTIMATORS[row], without, settings=GroupPolicyConfig())
    found = compute_advantages(ESTIMATORS[row], experience, settings=GroupPolicyConfig())
    own_N = step_advantages(STEPS_N, STEPS_CU, experience.groups_B)
    torch.testing.assert_close(found.per_token_N, plain.at_tokens(STEPS_CU) + 0.5 * own_N)
    assert own_N.abs().max() > 0.5
