"""Policy losses other than PPO's, and the sum over micro-batches as the mean of a step."""

import math

import pytest
import torch

from rlhf_cli.algorithms.aggregation import StepTotals, aggregate
from rlhf_cli.algorithms.policy_loss import (
    PolicyColumns,
    cispo,
    clip_cov,
    dppo_kl,
    dppo_tv,
    gmpo,
    gspo,
    kl_cov,
    reinforce,
    sapo,
    topr,
    vespo,
)
from rlhf_cli.config.policy import PolicyConfig

CU = torch.tensor([0, 2, 2, 5])


def loss_and_gradient(loss, ratios: list[float], advantages: list[float], **settings):
    """Return the loss of each token, its derivative with respect to the token's log-prob, and the metrics."""
    logprobs_K, anchor_K = torch.tensor(ratios).log().requires_grad_(), torch.zeros(len(ratios))
    columns = PolicyColumns(anchor_K, torch.tensor(advantages), CU)
    loss_K, metrics = loss(logprobs_K, anchor_K, columns, PolicyConfig(policy_loss=loss.__name__, **settings))
    loss_K.sum().backward()
    assert logprobs_K.grad is not None
    return loss_K.detach(), logprobs_K.grad, metrics


def test_gspo_weighs_and_clips_whole_sequences() -> None:
    # Geometric means: sqrt(4 * 1) = 2 in the first sequence, cbrt(.5 * 2 * 1) = 1 in the last.
    loss_K, gradient_K, metrics = loss_and_gradient(
        gspo, [4.0, 1.0, 0.5, 2.0, 1.0], [1.0, -1.0, 3.0, 3.0, 3.0], eps_clip_low_high=(0.1, 0.2)
    )
    torch.testing.assert_close(metrics["ratio"], torch.tensor([2.0, 2.0, 1.0, 1.0, 1.0]))
    torch.testing.assert_close(loss_K, torch.tensor([-1.2, 2.0, -3.0, -3.0, -3.0]))
    torch.testing.assert_close(gradient_K, torch.tensor([0.0, 2.0, -3.0, -3.0, -3.0]))
    assert metrics["clip_high"].tolist() == [1, 0, 0, 0, 0]


def test_the_token_form_of_gspo_has_the_gradient_of_the_sequence_form() -> None:
    """With one advantage per sequence, the token mean of the token form is `-s A` with the same derivative."""
    old_K, advantage_B = torch.tensor([-1.0, -2.0, -0.5, -1.5, -3.0]), torch.tensor([0.7, 0.0, -1.3])
    token_K, sequence_K = (torch.tensor([-1.1, -1.8, -0.6, -1.4, -2.9], requires_grad=True) for _ in range(2))
    advantages_K = advantage_B[torch.tensor([0, 0, 2, 2, 2])]
    settings = PolicyConfig(policy_loss="gspo", eps_clip_low_high=(0.9, 9.0))
    loss_K, _ = gspo(token_K, old_K, PolicyColumns(old_K, advantages_K, CU), settings)
    totals = StepTotals(num_tokens=5, num_sequences=3)
    aggregate(loss_K, CU, totals, kind="seq_mean", max_new_tokens=9).backward()
    whole = sum(
        -torch.exp((sequence_K[a:b] - old_K[a:b]).mean()) * advantage_B[i] / 3
        for i, (a, b) in enumerate([(0, 2), (2, 2), (2, 5)])
        if a < b
    )
    assert isinstance(whole, torch.Tensor)
    whole.backward()
    torch.testing.assert_close(token_K.grad, sequence_K.grad)


def test_cispo_bounds_the_ratio_and_keeps_every_gradient() -> None:
    loss_K, gradient_K, metrics = loss_and_gradient(
        cispo, [0.5, 2.0, 8.0, 8.0], [1.0, 1.0, 1.0, -1.0], cispo_eps_high=5.0
    )
    torch.testing.assert_close(gradient_K, torch.tensor([-0.5, -2.0, -5.0, 5.0]))
    torch.testing.assert_close(loss_K, gradient_K * torch.tensor([0.5, 2.0, 8.0, 8.0]).log())
    assert metrics["clip_high"].tolist() == [0, 0, 1, 1]


@pytest.mark.parametrize(("ratio", "advantage", "tau"), [(1.0, 2.0, 1.0), (1.7, 2.0, 1.0), (0.4, -2.0, 1.5)])
def test_sapo_by_hand(ratio, advantage, tau) -> None:
    loss_K, gradient_K, _ = loss_and_gradient(sapo, [ratio], [advantage], sapo_tau=(1.0, 1.5))
    gate = 1 / (1 + math.exp(-tau * (ratio - 1)))
    assert loss_K.item() == pytest.approx(-4 / tau * gate * advantage, rel=1e-5)
    assert gradient_K.item() == pytest.approx(-4 * gate * (1 - gate) * ratio * advantage, rel=1e-5)


def test_reinforce_weighs_log_probs_with_advantages_alone() -> None:
    loss_K, gradient_K, metrics = loss_and_gradient(reinforce, [0.5, 4.0], [2.0, -3.0])
    assert gradient_K.tolist() == [-2.0, 3.0]
    torch.testing.assert_close(loss_K, torch.tensor([-2.0, 3.0]) * torch.tensor([0.5, 4.0]).log())
    torch.testing.assert_close(metrics["ratio"], torch.tensor([0.5, 4.0]))


@pytest.mark.parametrize(
    ("loss", "settings"),
    [
        (gspo, {"eps_clip_low_high": (3e-4, 4e-4)}),
        *((loss, {}) for loss in (cispo, sapo, reinforce, dppo_tv, dppo_kl, gmpo, topr, clip_cov, kl_cov, vespo)),
    ],
)
def test_where_the_model_is_its_own_anchor_every_loss_has_the_gradient_of_reinforce(loss, settings) -> None:
    advantages = [1.0, -2.0, 0.5, 0.0, -1.0]
    _, gradient_K, metrics = loss_and_gradient(loss, [1.0] * 5, advantages, **settings)
    torch.testing.assert_close(gradient_K, -torch.tensor(advantages))
    assert metrics["ratio"].tolist() == [1.0] * 5
    assert not any(metrics[name].any() for name in ("clip_low", "clip_high", "clip_dual"))


def divergence_loss(loss, tokens: list[tuple[float, float, float]], **settings):
    """Return loss, gradient and metrics for tokens with a probability of the model, one of the engine, and A."""
    model, engine, advantages = map(torch.tensor, zip(*tokens, strict=True))
    logprobs_K, engine_K = model.log().requires_grad_(), engine.log()
    columns = PolicyColumns(engine_K, advantages, torch.tensor([0, len(tokens)]))
    loss_K, metrics = loss(logprobs_K, engine_K, columns, PolicyConfig(policy_loss=loss.__name__, **settings))
    (gradient_K,) = torch.autograd.grad(loss_K.sum(), logprobs_K)
    return loss_K.detach().tolist(), gradient_K.tolist(), metrics


def test_dppo_tv_stops_tokens_by_the_difference_of_probabilities() -> None:
    tokens = [
        (0.75, 0.5, 1.0),  # + 0.25: stopped
        (0.75, 0.5, -1.0),  # moves back towards the engine
        (0.25, 0.5, -1.0),  # - 0.25: stopped
        (0.01, 0.001, 1.0),  # ten times as likely, but only + 0.009
    ]
    loss, gradient, metrics = divergence_loss(dppo_tv, tokens)
    assert loss == pytest.approx([0.0, 1.5, 0.0, -10.0], rel=1e-5)
    assert gradient == pytest.approx([0.0, 1.5, 0.0, -10.0], rel=1e-5)
    assert (metrics["clip_high"].tolist(), metrics["clip_low"].tolist()) == ([1, 0, 0, 0], [0, 0, 1, 0])
    assert divergence_loss(dppo_tv, tokens, dppo_delta_low_high=(0.2, 0.3))[0][0] == pytest.approx(-1.5)


def test_dppo_kl_stops_tokens_by_the_divergence_of_two_outcomes() -> None:
    # 0.5 log(0.5 / 0.75) + 0.5 log(0.5 / 0.25) = 0.1438 nats; 0.5 and 0.6: 0.0204
    tokens = [(0.75, 0.5, 1.0), (0.6, 0.5, 1.0), (0.25, 0.5, 1.0), (0.25, 0.5, -1.0), (1.0, 0.9999999, 1.0)]
    loss, gradient, metrics = divergence_loss(dppo_kl, tokens)
    assert loss == pytest.approx([0.0, -1.2, -0.5, 0.0, -1.0], rel=1e-5)
    assert gradient == pytest.approx(loss)
    assert (metrics["clip_high"].tolist(), metrics["clip_low"].tolist()) == ([1, 0, 0, 0, 0], [0, 0, 0, 1, 0])
    assert divergence_loss(dppo_kl, tokens, dppo_delta_low_high=(0.1, 0.15))[0][0] == pytest.approx(-1.5)


def test_gmpo_weighs_a_response_with_the_geometric_mean_of_clipped_ratios() -> None:
    high = math.exp(0.4)
    ratios, advantages = [2.0, 1.0, 0.5, 2.0, 1.0], [1.0, 1.0, -3.0, -3.0, -3.0]
    loss_K, gradient_K, metrics = loss_and_gradient(gmpo, ratios, advantages)
    # 2 is clipped for A > 0, 0.5 for A < 0; 2 is not for A < 0.
    first, last = math.sqrt(high), (2.0 / high) ** (1 / 3)
    assert loss_K.tolist() == pytest.approx([-first, -first, 3 * last, 3 * last, 3 * last], rel=1e-5)
    assert gradient_K.tolist() == pytest.approx([0.0, -first, 0.0, 3 * last, 3 * last], rel=1e-5)
    assert (metrics["clip_high"].tolist(), metrics["clip_low"].tolist()) == ([1, 0, 0, 0, 0], [0, 0, 1, 0, 0])


def test_clip_cov_stops_and_kl_cov_penalizes_tokens_by_hand() -> None:
    ratios, advantages = torch.tensor([1.1, 2.0, 0.5, 1.5]), torch.tensor([1.0, 1.0, -2.0, -2.0])
    old_K = torch.full((4,), -3.0)
    logprobs_K = (old_K + ratios.log()).requires_grad_()
    columns = PolicyColumns(old_K, advantages, torch.tensor([0, 4]), covariant_K=torch.tensor([1, 0, 1, 0]).bool())
    loss_K, metrics = clip_cov(logprobs_K, old_K, columns, PolicyConfig(policy_loss="clip_cov"))
    assert loss_K.tolist() == pytest.approx([0.0, -1.2, 0.0, 3.0])
    (gradient_K,) = torch.autograd.grad(loss_K.sum(), logprobs_K)
    assert gradient_K.tolist() == pytest.approx([0.0, 0.0, 0.0, 3.0])
    assert metrics["clip_high"].tolist() == [0, 1, 0, 0]
    loss_K, _ = kl_cov(logprobs_K, old_K, columns, PolicyConfig(policy_loss="kl_cov", kl_cov_coef=2.0))
    assert loss_K.tolist() == pytest.approx([-1.1 + 2 * math.log(1.1), -2.0, 1.0 + 2 * math.log(2), 3.0])
    (gradient_K,) = torch.autograd.grad(loss_K.sum(), logprobs_K)
    assert gradient_K.tolist() == pytest.approx([-1.1 + 2, -2.0, 1.0 - 2, 3.0])


def test_vespo_weighs_responses_softly_by_their_ratio() -> None:
    """Ratios 2 (A > 0) and 1/2 (A < 0): phi = 2^2 e^-3 and 2^-3 e^1."""
    _, gradient_K, metrics = loss_and_gradient(vespo, [2.0, 1.0, 0.5, 1.0, 1.0], [1.0, 1.0, -3.0, -3.0, -3.0])
    up, down = 4 * math.exp(-3), 3 / 8 * math.e
    assert gradient_K.tolist() == pytest.approx([-up, -up, down, down, down])
    assert metrics["ratio"].tolist() == pytest.approx([2.0, 2.0, 0.5, 0.5, 0.5])
    _, gradient_K, _ = loss_and_gradient(vespo, [1e-9] * 5, [1.0] * 5)
    assert gradient_K.abs().max() < 1e-12
    _, gradient_K, _ = loss_and_gradient(vespo, [1e9] * 5, [-1.0] * 5)
    assert gradient_K.tolist() == [0.0] * 5


def test_topr_weighs_only_bad_responses_and_at_most_with_1() -> None:
    ratios, advantages = [2.0, 3.0, 0.5, 0.5, 2.0], [1.0, 1.0, -1.0, -1.0, -1.0]
    _, gradient_K, metrics = loss_and_gradient(topr, ratios, advantages)
    assert gradient_K.tolist() == pytest.approx([-1.0, -1.0, 0.5, 0.5, 0.5])
    assert metrics["ratio"].tolist() == pytest.approx([6.0, 6.0, 0.5, 0.5, 0.5])
    _, gradient_K, metrics = loss_and_gradient(topr, ratios, [-1.0] * 5)
    assert gradient_K.tolist() == pytest.approx([1.0, 1.0, 0.5, 0.5, 0.5])
    assert metrics["clip_low"].tolist() == [0, 0, 1, 1, 1]


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("token_mean", (1 + 2 + 3 + 4 + 5) / 5),
        ("seq_mean", (1.5 + 0 + 4) / 3),
        ("seq_sum_norm", 15 / (3 * 10)),
    ],
)
def test_means_of_a_step_by_hand_however_it_is_cut(kind, expected) -> None:
    values_K = torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0], requires_grad=True)
    totals = StepTotals(num_tokens=5, num_sequences=3)
    whole = aggregate(values_K, CU, totals, kind=kind, max_new_tokens=10)
    assert whole.item() == pytest.approx(expected)
    parts = [(values_K[:2], CU[:3]), (values_K[2:], CU[2:] - 2), (values_K[:0], torch.tensor([0]))]
    cut = sum(aggregate(part_K, cu, totals, kind=kind, max_new_tokens=10) for part_K, cu in parts)
    assert isinstance(cut, torch.Tensor)
    gradients = [torch.autograd.grad(total, values_K)[0] for total in (whole, cut)]
    torch.testing.assert_close(cut, whole)
    torch.testing.assert_close(*gradients)


def test_an_unknown_mean_is_named() -> None:
    with pytest.raises(ValueError, match="seq_sum_norm or prompt_mean, not 'mean'"):
        aggregate(torch.ones(1), torch.tensor([0, 1]), StepTotals(1, 1), kind="mean", max_new_tokens=1)  # type: ignore[arg-type]
