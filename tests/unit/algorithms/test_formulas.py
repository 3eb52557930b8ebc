"""Formulas with numbers equal what training computes, and traces are the derivatives of the objective."""

import re
from dataclasses import replace
from typing import Any

import pytest
import torch

from rlhf_cli.algorithms.advantages import compute_advantages, whiten
from rlhf_cli.algorithms.aggregation import StepTotals
from rlhf_cli.algorithms.entropy import EntropyState
from rlhf_cli.algorithms.estimators.estimator import Estimator, Experience, Turns
from rlhf_cli.algorithms.estimators.gae import ActorCriticPolicyConfig
from rlhf_cli.algorithms.estimators.group import GroupPolicyConfig
from rlhf_cli.algorithms.estimators.reinforce import ReinforcePolicyConfig
from rlhf_cli.algorithms.estimators.table import ESTIMATORS
from rlhf_cli.algorithms.formulas import (
    advantage_formula,
    correction_formula,
    loss_formula,
    mean_formula,
    ratio_formula,
    whitening_formula,
)
from rlhf_cli.algorithms.objective import LossWeights, policy_objective
from rlhf_cli.algorithms.policy_loss import PolicyColumns
from rlhf_cli.algorithms.token_trace import TokenTrace, policy_columns
from rlhf_cli.config.policy import POLICY_LOSSES, PolicyConfig
from rlhf_cli.config.roles import KLTerm

CU = torch.tensor([0, 2, 3, 5, 6])
SETTINGS = {
    "ppo": ActorCriticPolicyConfig(gamma=0.9, lambd=0.8),
    "ppo adaptive": ActorCriticPolicyConfig(gamma=0.9, lambd_alpha=0.8),
    "reinforce++": ReinforcePolicyConfig(gamma=0.5),
    "reinforce++_group": ReinforcePolicyConfig(baseline="group"),
    "grpo": GroupPolicyConfig(),
    "rloo": PolicyConfig(),
    "remax": PolicyConfig(),
    "grpo_passk": GroupPolicyConfig(advantage="passk"),
    "gigpo": GroupPolicyConfig(advantage="gigpo", gigpo_weight=0.5, gigpo_gamma=0.9),
    "gdpo": GroupPolicyConfig(aggregate="normalize_then_sum", init_kl_coef=0.0),
}
WEIGHTS = LossWeights({"ref": KLTerm(0.3, "k3")}, EntropyState(0.0, True))


def experience() -> Experience:
    """Return four responses of 2, 1, 2 and 1 tokens to two prompts, with rewards 1, 0, 0.5 and 2."""
    return Experience(
        shaped_N=torch.tensor([-0.1, 1.0, 0.0, 0.2, 0.5, 2.0], dtype=torch.float64),
        parts=((1.0, torch.tensor([1.0, 0.0, 0.5, 2.0])), (0.5, torch.tensor([0.0, 1.0, 1.0, 3.0]))),
        values_N=torch.tensor([0.3, 0.6, 0.1, 0.2, 0.4, 0.9]),
        bootstrap_B=torch.tensor([0.0, 0.7, 0.0, 0.0]),
        cu=CU,
        groups_B=torch.tensor([0, 0, 1, 1]),
        trained_B=torch.tensor([True, True, True, True]),
        greedy_B=torch.tensor([0.5, 0.5, 1.0, 1.0], dtype=torch.float64),
        # The first response has two turns, of which the second follows the same observation as the second response.
        turns=Turns(torch.tensor([0, 1, 2, 3, 5, 6]), torch.tensor([0, 2, 3, 4, 5]), torch.tensor([0, 1, 1, 2, 2])),
    )


def last_number(line: str) -> float:
    return float(re.findall(r"-?[\d.]+(?:e-?\d+)?", line)[-1])


@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize(("sample", "token"), [(0, 0), (0, 1), (1, 0), (2, 1), (3, 0)])
def test_formulas_of_advantages_end_with_the_advantage(name, sample, token):
    estimator, given = replace(ESTIMATORS[name.split()[0]], whiten=False), experience()
    found = compute_advantages(estimator, given, settings=SETTINGS[name]).at_tokens(CU)
    lines = advantage_formula(estimator, given, SETTINGS[name], sample=sample, token=token)
    (line,) = (line for line in lines if line.startswith("A = "))
    assert last_number(line) == pytest.approx(float(found[int(CU[sample]) + token]), abs=1e-5)


def test_a_group_without_spread_has_the_advantage_zero():
    given = replace(experience(), shaped_N=torch.tensor([0.0, 1.0, 1.0, 0.0, 0.5, 2.0], dtype=torch.float64))
    lines = advantage_formula(ESTIMATORS["grpo"], given, GroupPolicyConfig(), sample=0, token=1)
    assert lines[0] == "rewards of the group: [1] 1"
    assert last_number(lines[1]) == 0.0


def test_the_formula_of_whitening_ends_with_the_whitened_value():
    given, raw_N = experience(), torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0, 9.0])
    assert last_number(whitening_formula(raw_N, given, place=4)) == pytest.approx(float(whiten(raw_N)[4]), abs=1e-5)


def test_code_of_a_user_is_named():
    assert advantage_formula(Estimator("mine.py:f"), experience(), None, sample=0, token=0) == ["A from mine.py:f"]
    settings = PolicyConfig.model_construct(**{**dict(PolicyConfig()), "policy_loss": "mine.py:g"})
    assert loss_formula(settings, {"loss": 0.5}) == ["loss from mine.py:g = 0.5"]


def columns() -> PolicyColumns:
    old_K = torch.tensor([-1.0, -0.5, -2.0, -0.1, -0.7, -0.2])
    return PolicyColumns(
        rollout_K=old_K - torch.tensor([0.0, 0.1, -0.2, 1.2, 0.0, 0.0]),
        advantages_K=torch.tensor([1.0, 1.0, -0.5, 0.3, -0.3, -2.0]),
        cu=CU,
        old_K=old_K,
        frozen_K={"ref": old_K + 0.1},
        covariant_K=torch.tensor([True, False, False, True, False, True]),
    )


def traced(settings: PolicyConfig) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Return the trace of a step of one micro-batch, and the derivative of its loss."""
    assert columns().old_K is not None
    logprobs_K = (columns().old_K + torch.tensor([0.5, -0.1, 0.3, -0.4, 0.0, -0.6])).requires_grad_()
    entropy_K, totals = torch.full((6,), 0.4), StepTotals(num_tokens=10, num_sequences=5)
    common: dict[str, Any] = {"settings": settings, "totals": totals, "weights": WEIGHTS, "max_new_tokens": 8}
    trace = TokenTrace()
    trace.begin_step()
    place = {"sample": torch.zeros(6), "token": torch.arange(6.0)}
    trace.add(place | policy_columns(logprobs_K, entropy_K, columns(), **common))
    loss, _ = policy_objective(logprobs_K, entropy_K, columns(), **common)
    (gradient_K,) = torch.autograd.grad(loss, logprobs_K)
    return trace.steps[0][0], gradient_K


@pytest.mark.parametrize("agg", ["token_mean", "seq_mean", "seq_sum_norm"])
@pytest.mark.parametrize("loss", POLICY_LOSSES)
def test_a_trace_has_the_gradient_of_the_loss_and_formulas_its_values(loss, agg):
    settings = PolicyConfig(policy_loss=loss, loss_agg=agg, use_kl_loss=True, kl_estimator="k3")
    trace, gradient_K = traced(settings)
    assert trace["gradient"].equal(gradient_K)
    assert trace["ref_coef"].tolist() == pytest.approx([0.3] * 6)
    for token in range(6):
        values = {name: float(column[token]) for name, column in trace.items()}
        assert last_number(ratio_formula(settings, values)) == pytest.approx(values["ratio"], rel=1e-4)
        assert f"= {values['loss'] + 0.0:.6g}" in loss_formula(settings, values)[0].replace("-0 ", "0 ")


def test_a_trace_has_the_gradient_with_respect_to_the_entropy():
    """A bonus of 0.2 on the mean over 10 tokens: -0.2 / 10 for each; 0 without a bonus."""
    logprobs_K, entropy_K = torch.full((6,), -1.0), torch.full((6,), 0.4)
    common: dict[str, Any] = {"settings": PolicyConfig(), "totals": StepTotals(10, 5), "max_new_tokens": 8}
    for weight in (0.2, 0.0):
        found = policy_columns(
            logprobs_K, entropy_K, columns(), weights=LossWeights({}, EntropyState(weight)), **common
        )
        assert found["entropy_gradient"].tolist() == pytest.approx([-weight / 10] * 6)


def test_a_trace_returns_the_columns_of_a_sequence_in_the_order_of_its_tokens():
    trace = TokenTrace()
    trace.begin_step()
    for sample, token, logprob in (([1.0, 0.0], [1.0, 0.0], [-0.2, -0.9]), ([1.0], [0.0], [-0.1])):
        values = {"sample": sample, "token": token, "logprob": logprob}
        trace.add({name: torch.tensor(column) for name, column in values.items()})
    assert trace.of_sequence(1)["logprob"].tolist() == pytest.approx([-0.1, -0.2])


def test_the_formula_of_the_correction_names_the_off_policy_mask():
    settings = PolicyConfig(off_policy_mask_threshold=0.5)
    values = {"anchor": -2.0, "rollout": -1.0, "advantage": -1.0, "weight": 0.0, "corrected": 1.0}
    assert "below the engine's by more than 0.5 nats per token" in correction_formula(settings, values)
    assert correction_formula(settings, values | {"weight": 0.5}).startswith("w = exp(old - engine)")


def test_the_formula_of_the_clipped_loss_names_the_bound():
    trace, _ = traced(PolicyConfig(use_kl_loss=True, kl_estimator="k3"))
    tokens = [{name: float(column[token]) for name, column in trace.items()} for token in range(6)]
    bounds = [loss_formula(PolicyConfig(), values)[1] for values in tokens]
    assert bounds == [
        "A > 0 and r above 1.2: clipped, no gradient",  # exp(0.5) = 1.65
        "not clipped",
        "not clipped",  # exp(0.3) = 1.35, but A < 0
        "not clipped",
        "not clipped",
        "A < 0 and r below 0.8: clipped, no gradient",  # exp(-0.6) = 0.55
    ]
    # min(1.64872 x 1, 1.2 x 1)
    assert loss_formula(PolicyConfig(), tokens[0])[0].endswith("= -min(1.64872, 1.2) = -1.2")


def test_the_formula_of_the_correction_names_the_cap():
    trace, _ = traced(PolicyConfig(use_kl_loss=True, kl_estimator="k3"))
    values = {name: float(column[3]) for name, column in trace.items()}
    # exp(-0.1 - -1.3) = 3.32, above 2
    assert correction_formula(PolicyConfig(), values) == (
        "w = exp(old - engine) = exp(-0.1 - -1.3) = 2, capped at 2 (truncated importance sampling)"
    )


@pytest.mark.parametrize(
    ("agg", "weight"),
    [
        ("token_mean", "1 / 10 tokens of the step"),
        ("seq_mean", "1 / (5 responses of the step x 2 tokens of this one)"),
        ("seq_sum_norm", "1 / (5 responses of the step x max_new_tokens 8)"),
        ("prompt_mean", "1 / (1.5 prompts of the step x 6 tokens of this one)"),
    ],
)
def test_the_weight_of_a_token_in_the_mean(agg, weight):
    settings = PolicyConfig(loss_agg=agg)
    given = {"num_tokens": 10, "num_sequences": 5, "length": 2, "max_new_tokens": 8}
    assert mean_formula(settings, **given, prompts=(1.5, 6.0)) == weight  # type: ignore[arg-type]
