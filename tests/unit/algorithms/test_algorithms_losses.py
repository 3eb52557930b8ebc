"""Policy and value losses, rollout correction, and the combined objectives."""

import math
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from pydantic import ValidationError

from rlhf_cli.algorithms.aggregation import Metrics, StepTotals, aggregate, combine_metrics
from rlhf_cli.algorithms.entropy import EntropyState
from rlhf_cli.algorithms.importance_correction import correction_weights, correlation
from rlhf_cli.algorithms.kl import kl_estimate
from rlhf_cli.algorithms.objective import (
    LossWeights,
    finish_policy_metrics,
    finish_value_metrics,
    next_weights,
    policy_objective,
    token_terms,
    value_objective,
)
from rlhf_cli.algorithms.policy_loss import PolicyColumns, ppo_clip
from rlhf_cli.algorithms.value_loss import clipped_value_loss, explained_variance
from rlhf_cli.config.policy import POLICY_LOSSES, LossAgg, PolicyConfig
from rlhf_cli.config.roles import KLTerm


def with_advantages(*advantages: float) -> PolicyColumns:
    """Return columns of one sequence that the anchor policy sampled."""
    count = len(advantages)
    return PolicyColumns(torch.zeros(count), torch.tensor(advantages), torch.tensor([0, count]))


def clip_loss_of_ratio(ratio: float, advantage: float, **kwargs) -> tuple[float, float]:
    """Return the loss of one token and its derivative with respect to the log-prob."""
    logprob = torch.tensor([math.log(ratio)], requires_grad=True)
    settings = PolicyConfig(eps_clip_low_high=(0.2, 0.3), **kwargs)
    loss_K, _ = ppo_clip(logprob, torch.zeros(1), with_advantages(advantage), settings)
    loss_K.sum().backward()
    assert logprob.grad is not None
    return loss_K.item(), logprob.grad.item()


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "gradient"),
    [
        (1.0, 2.0, -2.0, -2.0),
        (1.25, 2.0, -2.5, -2.5),  # within the upper clip bound
        (1.5, 2.0, -2.6, 0.0),
        (0.5, 2.0, -1.0, -1.0),  # positive advantages at a low ratio are never clipped
        (0.5, -2.0, 1.6, 0.0),
        (0.9, -2.0, 1.8, 1.8),
        (1.5, -2.0, 3.0, 3.0),
    ],
)
def test_clipped_surrogate_by_hand(ratio, advantage, loss, gradient) -> None:
    assert clip_loss_of_ratio(ratio, advantage) == pytest.approx((loss, gradient), abs=1e-5)


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "gradient"),
    [(5.0, -2.0, 6.0, 0.0), (2.0, -2.0, 4.0, 4.0), (5.0, 2.0, -2.6, 0.0), (0.1, -2.0, 1.6, 0.0)],
)
def test_dual_clip_bounds_negative_advantages_only(ratio, advantage, loss, gradient) -> None:
    assert clip_loss_of_ratio(ratio, advantage, dual_clip=3.0) == pytest.approx((loss, gradient), abs=1e-5)


def test_clip_flags_say_which_tokens_have_no_gradient() -> None:
    logprobs_K = torch.tensor([1.5, 1.5, 0.5, 0.5, 9.0, 1.0]).log().requires_grad_()
    columns = with_advantages(1.0, -1.0, 1.0, -1.0, -1.0, 1.0)
    loss_K, flags = ppo_clip(logprobs_K, torch.zeros(6), columns, PolicyConfig(eps_clip=0.2, dual_clip=3.0))
    loss_K.sum().backward()
    assert flags["clip_high"].tolist() == [1, 0, 0, 0, 0, 0]
    assert flags["clip_low"].tolist() == [0, 0, 0, 1, 0, 0]
    assert flags["clip_dual"].tolist() == [0, 0, 0, 0, 1, 0]
    held = flags["clip_high"] + flags["clip_low"] + flags["clip_dual"]
    assert logprobs_K.grad is not None
    assert ((logprobs_K.grad == 0) == held.bool()).all()


def test_an_exploded_ratio_stays_finite() -> None:
    loss_K, _ = ppo_clip(torch.tensor([0.0]), torch.tensor([-200.0]), with_advantages(-1.0), PolicyConfig(eps_clip=0.2))
    assert float(loss_K) == pytest.approx(math.exp(20), rel=1e-4)


@pytest.mark.parametrize(
    ("value", "old", "target", "loss", "gradient", "clipped"),
    [
        (1.0, 1.0, 3.0, 2.0, -2.0, 0.0),
        (2.0, 1.0, 3.0, 1.125, 0.0, 1.0),  # moved 1.0 towards the return, and 0.5 is allowed
        (0.0, 1.0, 3.0, 4.5, -3.0, 0.0),  # moved away from the return: not clipped
        (1.25, 1.0, 3.0, 1.53125, -1.75, 0.0),
    ],
)
def test_value_loss_by_hand(value, old, target, loss, gradient, clipped) -> None:
    values_K = torch.tensor([value], requires_grad=True)
    loss_K, clipped_K = clipped_value_loss(values_K, torch.tensor([old]), torch.tensor([target]), value_clip=0.5)
    loss_K.sum().backward()
    assert values_K.grad is not None
    assert (loss_K.item(), values_K.grad.item(), clipped_K.item()) == pytest.approx((loss, gradient, clipped))


def weights(kind, diffs: list[float], cu: list[int]) -> tuple[list[float], list[float]]:
    diff_K = torch.tensor(diffs).log()
    weight_K, corrected_K = correction_weights(
        diff_K, torch.zeros_like(diff_K), torch.tensor(cu), kind=kind, cap=2.0, keep_range=(0.5, 5.0)
    )
    return [round(w, 5) for w in weight_K.tolist()], corrected_K.tolist()


def test_corrections_by_hand() -> None:
    ratios, cu = [0.25, 1.0, 4.0, 8.0], [0, 2, 4]
    assert weights("off", ratios, cu) == ([1, 1, 1, 1], [0, 0, 0, 0])
    assert weights("token_clip", ratios, cu) == ([0.25, 1, 2, 2], [0, 0, 1, 1])
    assert weights("token_mask", ratios, cu) == ([0, 1, 4, 0], [1, 0, 0, 1])
    # Geometric means: sqrt(0.26) = 0.51, kept with the token ratios; sqrt(32) = 5.66, masked.
    assert weights("seq_mask", [0.26, 1.0, 4.0, 8.0], cu) == ([0.26, 1, 0, 0], [0, 0, 1, 1])


def test_an_unknown_correction_is_named() -> None:
    with pytest.raises(ValueError, match="seq_mask or off, not 'tis'"):
        weights("tis", [1.0], [0, 1])


def test_corrections_of_nothing_are_empty() -> None:
    for kind in ("off", "token_clip", "token_mask", "seq_mask"):
        assert weights(kind, [], [0]) == ([], [])


def make_columns(num_sequences: int = 12) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    lengths = torch.randint(1, 9, (num_sequences,), generator=generator)
    cu = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    num_tokens = int(cu[-1])
    old_K = -torch.rand(num_tokens, generator=generator) * 3
    return {
        "cu": cu,
        "old_K": old_K,
        "rollout_K": old_K + 0.4 * torch.randn(num_tokens, generator=generator),
        "ref_K": old_K - 0.3 * torch.rand(num_tokens, generator=generator),
        "logprobs_K": old_K + 0.3 * torch.randn(num_tokens, generator=generator),
        "entropy_K": torch.rand(num_tokens, generator=generator),
        "advantages_K": torch.randn(num_tokens, generator=generator),
        "values_K": torch.randn(num_tokens, generator=generator),
        "old_values_K": torch.randn(num_tokens, generator=generator),
        "returns_K": torch.randn(num_tokens, generator=generator),
        # Groups of three sequences.
        "prompt_tokens_K": lengths.view(-1, 3).sum(1).repeat_interleave(3).repeat_interleave(lengths).float(),
        "kept_K": torch.rand(num_tokens, generator=generator) < 0.5,
        "covariant_K": torch.rand(num_tokens, generator=generator) < 0.3,
        "correct_K": (torch.arange(num_sequences) % 3 == 1).repeat_interleave(lengths).float(),
    }


WITH_ENTROPY = LossWeights(kl={}, entropy=EntropyState(0.1))
WEIGHTS = LossWeights(kl={}, entropy=EntropyState(0.0))


def run_policy(columns, first: int, last: int, settings: PolicyConfig, weights: LossWeights = WEIGHTS):
    """Compute the objective of sequences first..last of the step and its gradient for all log-probs and entropies."""
    cu = columns["cu"]
    rows = slice(int(cu[first]), int(cu[last]))
    logprobs_K, entropy_K = (columns[name].clone().requires_grad_() for name in ("logprobs_K", "entropy_K"))
    loss, metrics = policy_objective(
        logprobs_K[rows],
        entropy_K[rows],
        PolicyColumns(
            old_K=columns["old_K"][rows],
            rollout_K=columns["rollout_K"][rows],
            advantages_K=columns["advantages_K"][rows],
            cu=cu[first : last + 1] - cu[first],
            frozen_K=dict.fromkeys(weights.kl, columns["ref_K"][rows]),
            kept_K=columns["kept_K"][rows] if settings.top_entropy_quantile < 1 else None,
            covariant_K=columns["covariant_K"][rows] if settings.policy_loss in ("clip_cov", "kl_cov") else None,
            prompt_tokens_K=columns["prompt_tokens_K"][rows],
            correct_K=columns["correct_K"][rows] if settings.correct_nll_coef else None,
        ),
        settings=settings,
        totals=StepTotals(
            num_tokens=int(cu[-1]),
            num_sequences=len(cu) - 1,
            num_prompts=float((1 / columns["prompt_tokens_K"]).sum()),
            num_correct=int(columns["correct_K"].sum()),
        ),
        weights=weights,
        max_new_tokens=10,
    )
    loss.backward()
    entropy_grad = torch.zeros_like(entropy_K) if entropy_K.grad is None else entropy_K.grad  # without entropy weight
    return loss.detach(), torch.stack([logprobs_K.grad, entropy_grad]), metrics


@pytest.mark.parametrize(
    "settings",
    [
        *({"rollout_correction": correction} for correction in ("token_clip", "token_mask", "seq_mask", "off")),
        *({"policy_loss": loss} for loss in POLICY_LOSSES if loss != "clip"),
        {"off_policy_mask_threshold": 0.1},
        {"unbiased_kl": True, "use_kl_loss": True, "kl_estimator": "k3"},
        {"top_entropy_quantile": 0.5},
        {"correct_nll_coef": 0.1, "loss_agg": "seq_mean"},
        *({"loss_agg": agg} for agg in ("seq_mean", "seq_sum_norm", "prompt_mean")),
    ],
    ids=lambda settings: "-".join(map(str, settings.values())),
)
def test_policy_objective_of_one_batch_equals_the_sum_of_its_micro_batches(settings) -> None:
    columns, settings = make_columns(), PolicyConfig(**settings)
    weights = replace(WITH_ENTROPY, kl={"ref": KLTerm(0.3, "k3"), "prior": KLTerm(0.2, "k2")})
    whole, whole_gradient, whole_metrics = run_policy(columns, 0, 12, settings, weights)
    loss, gradient, metrics = torch.zeros(()), torch.zeros_like(whole_gradient), Metrics()
    for first, last in [(0, 1), (1, 8), (8, 8), (8, 12)]:  # one of the ranks is idle
        part, part_gradient, part_metrics = run_policy(columns, first, last, settings, weights)
        loss, gradient, metrics = loss + part, gradient + part_gradient, combine_metrics(metrics, part_metrics)
    torch.testing.assert_close(loss, whole)
    torch.testing.assert_close(gradient, whole_gradient)
    torch.testing.assert_close(metrics, whole_metrics)


def test_only_tokens_that_are_kept_have_a_gradient_and_all_count_in_the_mean() -> None:
    columns, settings = make_columns(), PolicyConfig(top_entropy_quantile=0.5)
    _, (gradient_K, _), metrics = run_policy(columns, 0, 12, settings)
    _, (plain_K, _), _ = run_policy(columns, 0, 12, PolicyConfig())
    torch.testing.assert_close(gradient_K, plain_K * columns["kept_K"])
    assert float(metrics["entropy_kept"]) == pytest.approx(float(columns["kept_K"].float().mean()))


def test_correct_responses_and_observations_add_their_mean_log_likelihoods_by_hand() -> None:
    """The responses of 2 and 1 tokens are right and wrong; 4 tokens are observations, 2 of them on another rank."""
    logprobs_K, observed_O = torch.tensor([-1.0, -2.0, -3.0]).requires_grad_(), torch.tensor([-0.5, -1.5])
    cu, zeros_K = torch.tensor([0, 2, 3]), torch.zeros(3)
    settings = PolicyConfig(correct_nll_coef=0.1, observation_nll_coef=0.2)

    def objective(correct_K: torch.Tensor | None, observed_O: torch.Tensor | None, **totals: int):
        columns = PolicyColumns(zeros_K - 1, zeros_K, cu, correct_K=correct_K)
        given: dict[str, Any] = {"settings": settings, "weights": WEIGHTS, "max_new_tokens": 4}
        return policy_objective(
            logprobs_K, zeros_K, columns, totals=StepTotals(3, 2, **totals), observed_O=observed_O, **given
        )

    plain, metrics = objective(None, None)
    assert float(plain.detach()) == 0.0
    assert not {"correct_nll", "observation_nll"} & metrics.keys()
    loss, metrics = objective(torch.tensor([1.0, 1.0, 0.0]), observed_O, num_correct=2, num_observed=4)
    assert float(loss.detach()) == pytest.approx(0.1 * (1 + 2) / 2 + 0.2 * (0.5 + 1.5) / 4)
    assert (float(metrics["correct_nll"]), float(metrics["observation_nll"])) == (1.5, 0.5)
    (gradient_K,) = torch.autograd.grad(loss, logprobs_K)
    assert gradient_K.tolist() == pytest.approx([-0.05, -0.05, 0.0])
    none_right, metrics = objective(zeros_K, observed_O[:0])
    assert float(none_right.detach()) == 0.0
    assert (float(metrics["correct_nll"]), float(metrics["observation_nll"])) == (0.0, 0.0)


def test_a_mean_over_prompts_weighs_tokens_by_the_length_of_their_prompt() -> None:
    """Prompts with 1 + 3 and with 2 tokens; then only the first sequence."""
    values_K, cu = torch.tensor([8.0, 4.0, 4.0, 4.0, 1.0, 3.0]), torch.tensor([0, 1, 4, 6])
    prompt_tokens_K = torch.tensor([4.0, 4.0, 4.0, 4.0, 2.0, 2.0])

    def mean(stop: int, num_prompts: float) -> float:
        totals = StepTotals(num_tokens=stop, num_sequences=3, num_prompts=num_prompts)
        columns = {"prompt_tokens_K": prompt_tokens_K[:stop]}
        return float(aggregate(values_K[:stop], cu, totals, kind="prompt_mean", max_new_tokens=9, **columns))

    assert mean(6, 2.0) == pytest.approx((20 / 4 + 4 / 2) / 2)
    assert mean(1, 1 / 4) == pytest.approx(8.0)
    assert mean(0, 0.0) == 0.0


def test_policy_objective_equals_a_loop_over_tokens() -> None:
    columns = make_columns()
    settings = PolicyConfig(eps_clip_low_high=(0.1, 0.25), rollout_correction="token_clip")
    loss, _, metrics = run_policy(columns, 0, 12, settings, WITH_ENTROPY)
    total, num_tokens = 0.0, int(columns["cu"][-1])
    for t in range(num_tokens):
        logprob, old, rollout, advantage, entropy = (
            float(columns[name][t]) for name in ("logprobs_K", "old_K", "rollout_K", "advantages_K", "entropy_K")
        )
        ratio = math.exp(logprob - old)
        surrogate = min(ratio * advantage, min(max(ratio, 0.9), 1.25) * advantage)
        total += -surrogate * min(math.exp(old - rollout), 2.0) - 0.1 * entropy
    assert float(loss) == pytest.approx(total / num_tokens, rel=1e-5)
    assert float(metrics["approx_kl"]) == pytest.approx(float((columns["old_K"] - columns["logprobs_K"]).mean()))
    ratio_K = (columns["logprobs_K"] - columns["old_K"]).exp()
    assert float(metrics["ratio_max"]) == pytest.approx(float(ratio_K.max()))
    assert float(metrics["approx_k3"]) == pytest.approx(float((ratio_K - 1 - ratio_K.log()).mean()), rel=1e-4)
    assert float(metrics["rollout_diff_max"]) == pytest.approx(
        float((columns["old_K"] - columns["rollout_K"]).abs().max())
    )


def test_on_policy_the_ratio_is_one_and_the_gradient_that_of_reinforce() -> None:
    logprobs_K = torch.tensor([-0.5, -1.0, -2.0], requires_grad=True)
    advantages_K = torch.tensor([1.0, -2.0, 3.0])
    rollout_K = torch.tensor([-0.5, -1.0 - math.log(1.5), -2.0 - math.log(4.0)])
    loss, metrics = policy_objective(
        logprobs_K,
        None,
        PolicyColumns(rollout_K=rollout_K, advantages_K=advantages_K, cu=torch.tensor([0, 2, 3])),
        settings=PolicyConfig(),
        totals=StepTotals(num_tokens=3, num_sequences=2),
        weights=WEIGHTS,
        max_new_tokens=2,
    )
    loss.backward()
    assert float(metrics["ratio_mean"]) == 1.0
    assert float(metrics["ratio_max"]) == 1.0
    assert float(metrics["clip_low"] + metrics["clip_high"]) == 0.0
    expected = -advantages_K * torch.tensor([1.0, 1.5, 2.0]) / 3
    torch.testing.assert_close(logprobs_K.grad, expected)
    assert float(metrics["rollout_corrected"]) == pytest.approx(1 / 3)


def test_an_off_policy_mask_excludes_bad_responses_that_have_become_unlikely() -> None:
    """Mean falls of 0.6, 0.4 and 0.6 nats per token, A < 0 in the first two; the denominator stays."""
    fallen = [-1.0, -0.2, -0.4, -0.4, -0.6, -0.6]
    logprobs_K = torch.tensor(fallen).sub(1.0).requires_grad_()
    advantages_K = torch.tensor([-1.0, -1.0, -1.0, -1.0, 1.0, 1.0])
    rollout_K = torch.full((6,), -1.0)
    columns = PolicyColumns(rollout_K, advantages_K, torch.tensor([0, 2, 4, 6]), old_K=logprobs_K.detach())
    settings = PolicyConfig(off_policy_mask_threshold=0.5, rollout_correction="off")
    totals = StepTotals(num_tokens=6, num_sequences=3)
    loss, metrics = policy_objective(
        logprobs_K, None, columns, settings=settings, totals=totals, weights=WEIGHTS, max_new_tokens=2
    )
    loss.backward()
    assert logprobs_K.grad is not None
    assert logprobs_K.grad.tolist() == pytest.approx([0.0, 0.0, 1 / 6, 1 / 6, -1 / 6, -1 / 6])
    assert float(metrics["rollout_corrected"]) == pytest.approx(2 / 6)


def test_the_unbiased_divergence_has_the_gradient_of_the_true_one() -> None:
    """The expectation over samples of the old policy, by enumeration of a distribution over four tokens."""
    torch.manual_seed(0)
    logits, old, ref = (torch.randn(4, dtype=torch.float64) for _ in range(3))
    logits.requires_grad_()
    model = logits.log_softmax(0)
    (true,) = torch.autograd.grad((model.exp() * (model - ref.log_softmax(0))).sum(), logits, retain_graph=True)
    columns = PolicyColumns(
        rollout_K=old.log_softmax(0),
        advantages_K=torch.zeros(4),
        cu=torch.tensor([0, 4]),
        old_K=old.log_softmax(0),
        frozen_K={"ref": ref.log_softmax(0)},
    )
    weights = replace(WEIGHTS, kl={"ref": KLTerm(1.0, "k3")})
    settings = PolicyConfig(unbiased_kl=True, use_kl_loss=True, kl_estimator="k3")
    terms = token_terms(model, columns, settings=settings, weights=weights)
    (found,) = torch.autograd.grad((columns.rollout_K.exp() * terms.kl_K["ref"]).sum(), logits)
    torch.testing.assert_close(found, true)


@pytest.mark.parametrize("kind", ["k2", "k3"])
def test_the_divergence_in_the_loss_is_weighed_averaged_and_measured(kind) -> None:
    columns = make_columns()
    settings = PolicyConfig(loss_agg="seq_mean")
    plain, plain_gradient, _ = run_policy(columns, 0, 12, settings)
    loss, gradient, metrics = run_policy(columns, 0, 12, settings, replace(WEIGHTS, kl={"ref": KLTerm(0.3, kind)}))
    logprobs_K, cu = columns["logprobs_K"].clone().requires_grad_(), columns["cu"].tolist()
    kl_K = kl_estimate(logprobs_K, columns["ref_K"], kind)
    by_response = [kl_K[start:end] for start, end in pairwise(cu)]
    term = 0.3 * torch.stack([kl.mean() for kl in by_response]).mean()
    term.backward()
    torch.testing.assert_close(loss - plain, term.detach())
    torch.testing.assert_close(gradient[0] - plain_gradient[0], logprobs_K.grad)
    assert float(metrics["kl"]) == pytest.approx(float(kl_K.detach().sum()) / 12)


def test_a_measured_entropy_changes_the_weight_of_its_bonus_and_no_other() -> None:
    settings = PolicyConfig(entropy_target=0.5, entropy_delta=1e-3)
    weights = replace(WEIGHTS, kl={"ref": KLTerm(0.3, "k3")})
    expected = replace(weights, entropy=EntropyState(1e-3))
    assert next_weights(weights, {"entropy": 0.4}, settings=settings) == expected
    assert next_weights(weights, {"entropy": 0.4}, settings=PolicyConfig()) == weights


def test_an_idle_micro_batch_gives_zero_with_a_graph() -> None:
    parameter = torch.ones(3, requires_grad=True)
    empty = parameter[:0]
    loss, metrics = policy_objective(
        empty,
        empty,
        PolicyColumns(rollout_K=torch.zeros(0), advantages_K=torch.zeros(0), cu=torch.tensor([0])),
        settings=PolicyConfig(),
        totals=StepTotals(num_tokens=0, num_sequences=0),
        weights=WITH_ENTROPY,
        max_new_tokens=2,
    )
    loss.backward()
    assert parameter.grad is not None
    assert parameter.grad.tolist() == [0.0, 0.0, 0.0]
    assert all(float(value) == 0.0 for value in metrics.values())


def test_an_entropy_bonus_without_entropies_is_refused() -> None:
    column = torch.zeros(1)
    with pytest.raises(ValueError, match="the entropy has a weight but was not computed"):
        policy_objective(
            column,
            None,
            PolicyColumns(rollout_K=column, advantages_K=column, cu=torch.tensor([0, 1])),
            settings=PolicyConfig(),
            totals=StepTotals(num_tokens=1, num_sequences=1),
            weights=WITH_ENTROPY,
            max_new_tokens=2,
        )


def test_probability_correlation_from_parts_equals_the_direct_one() -> None:
    columns = make_columns()
    metrics: dict[str, torch.Tensor] = {}
    for first, last in [(0, 5), (5, 12)]:
        metrics = combine_metrics(metrics, run_policy(columns, first, last, PolicyConfig())[2])
    direct = torch.corrcoef(torch.stack([columns["old_K"].exp(), columns["rollout_K"].exp()]).double())[0, 1]
    finished = finish_policy_metrics(metrics)
    assert finished["rollout_prob_correlation"] == pytest.approx(float(direct), rel=1e-6)
    assert not any(name.startswith("moment") for name in finished)


def test_equal_constants_correlate_and_one_constant_does_not() -> None:
    assert correlation(x_mean=1, y_mean=1, xx_mean=1, yy_mean=1, xy_mean=1) == 1.0
    assert correlation(x_mean=1, y_mean=1, xx_mean=1, yy_mean=2, xy_mean=1) == 0.0


def test_value_objective_and_explained_variance_add_up_over_micro_batches() -> None:
    columns = make_columns()
    num_tokens = int(columns["cu"][-1])
    totals = StepTotals(num_tokens=num_tokens, num_sequences=12)
    values_K = columns["values_K"].clone().requires_grad_()
    loss, metrics = torch.zeros(()), Metrics()
    for first, last in [(0, 3), (3, 3), (3, num_tokens)]:
        part, part_metrics = value_objective(
            values_K[first:last],
            old_values_K=columns["old_values_K"][first:last],
            returns_K=columns["returns_K"][first:last],
            cu=torch.tensor([0, last - first]),
            value_clip=0.2,
            loss_agg="token_mean",
            totals=totals,
            max_new_tokens=9,
        )
        loss, metrics = loss + part, combine_metrics(metrics, part_metrics)
    loss.backward()
    values, returns, old = columns["values_K"], columns["returns_K"], columns["old_values_K"]
    clipped = old + (values - old).clamp(-0.2, 0.2)
    expected = 0.5 * torch.maximum((values - returns) ** 2, (clipped - returns) ** 2).mean()
    torch.testing.assert_close(loss.detach(), expected)
    finished = finish_value_metrics(metrics)
    assert finished["explained_variance"] == pytest.approx(
        float(1 - (returns - values).double().var() / returns.double().var()), rel=1e-5
    )
    assert finished["value_clip"] == pytest.approx(
        float(((clipped - returns) ** 2 > (values - returns) ** 2).float().mean())
    )


@pytest.mark.parametrize(
    ("kind", "weights"),
    # Token weights: 1 of 4; 1 of 2 responses with 3 and 1 tokens; 1 of 2 responses with up to 5 tokens.
    [("token_mean", [1 / 4] * 4), ("seq_mean", [1 / 6, 1 / 6, 1 / 6, 1 / 2]), ("seq_sum_norm", [1 / 10] * 4)],
)
def test_the_mean_of_the_value_loss_is_the_actors(kind: LossAgg, weights: list[float]) -> None:
    """Returns are 0, so values 1, 2, 3 and 4 are the errors, and the losses are half their squares."""
    values_K = torch.tensor([1.0, 2.0, 3.0, 4.0], requires_grad=True)
    loss, metrics = value_objective(
        values_K,
        old_values_K=values_K.detach(),
        returns_K=torch.zeros(4),
        cu=torch.tensor([0, 3, 4]),
        value_clip=0.5,
        loss_agg=kind,
        totals=StepTotals(num_tokens=4, num_sequences=2),
        max_new_tokens=5,
    )
    expected = sum(w * half for w, half in zip(weights, [0.5, 2.0, 4.5, 8.0], strict=True))
    assert loss.item() == pytest.approx(expected)
    assert metrics["value_loss"].item() == pytest.approx(expected)
    (gradient_K,) = torch.autograd.grad(loss, values_K)
    assert gradient_K.tolist() == pytest.approx([w * v for w, v in zip(weights, [1, 2, 3, 4], strict=True)])


def test_explained_variance_of_a_perfect_critic_is_one_and_of_constant_returns_zero() -> None:
    assert explained_variance(return_mean=1, return_square=3, error_mean=0, error_square=0) == 1.0
    assert explained_variance(return_mean=2, return_square=4, error_mean=1, error_square=5) == 0.0


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"sapo_tau": (1.0, 0.0), "policy_loss": "sapo"}, "both must be above 0"),
        ({"use_kl_loss": True}, "k1 in the loss has a gradient with zero expectation: with use_kl_loss, set k2 or k3"),
        ({"dual_clip": 3.0, "policy_loss": "sapo"}, "dual_clip needs --policy_loss clip"),
        ({"eps_clip": 0.1, "policy_loss": "cispo"}, "eps_clip needs --policy_loss clip or gspo"),
        ({"entropy_target": 0.2, "entropy_loss_coef": 0.1}, r"entropy_loss_coef 0\.1 exceeds entropy_max 0\.005"),
        ({"eps_clip_low_high": (1.2, 0.2)}, r"clip range 1\.2 below"),
        ({"eps_clip_low_high": (0.2, 0.0)}, "above > 0"),
        (
            {"rollout_correction": "seq_mask", "rollout_correction_range": (1.5, 5.0)},
            r"rollout_correction_range 1\.5 5 must contain 1",
        ),
    ],
)
def test_settings_that_make_no_sense_are_refused(settings: dict, message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        PolicyConfig(**settings)
