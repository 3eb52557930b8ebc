"""Custom losses: the documented examples work, and invalid results are rejected."""

import pytest
import torch
from extending_page import page_file
from online_settings import resolve

from rlhf_cli import cli
from rlhf_cli.algorithms.aggregation import StepTotals
from rlhf_cli.algorithms.entropy import EntropyState
from rlhf_cli.algorithms.objective import LossWeights, policy_objective
from rlhf_cli.algorithms.policy_loss import PolicyColumns
from rlhf_cli.algorithms.preference import PairLogprobs, PreferenceSettings, mixed_loss
from rlhf_cli.config.plugins import require_plugins
from rlhf_cli.config.policy import PolicyConfig
from rlhf_cli.errors import RunError, UsageError
from rlhf_cli.options import build_config
from rlhf_cli.runs.offline.dpo import make_objective


def loss_of(policy_loss: str, **settings):
    """Return loss and gradient of three tokens with ratios 4, 1 and 1."""
    logprobs_K = torch.tensor([-1.0, -2.0, -0.5], requires_grad=True)
    old_K = logprobs_K.detach() - torch.tensor([4.0, 1.0, 1.0]).log()
    columns = PolicyColumns(old_K, torch.tensor([1.0, 2.0, -3.0]), torch.tensor([0, 1, 3]), old_K=old_K)
    loss, metrics = policy_objective(
        logprobs_K,
        None,
        columns,
        settings=PolicyConfig(policy_loss=policy_loss, **settings),
        totals=StepTotals(num_tokens=3, num_sequences=2),
        weights=LossWeights({}, EntropyState(0.0)),
        max_new_tokens=9,
    )
    loss.backward()
    return loss.item(), logprobs_K.grad, metrics


def test_the_page_s_policy_loss_trains_as_it_says(tmp_path) -> None:
    path = page_file(tmp_path, "damped_loss.py")
    config = resolve("rloo", policy_loss=f"{path}:damped", eps_clip="0.1")
    require_plugins(config)
    loss, gradient_K, metrics = loss_of(config.policy.policy_loss)
    # Per token -2 sqrt(ratio) A: -2*2*1, -2*1*2, -2*1*-3, each divided by three for the mean over tokens.
    assert loss == pytest.approx((-4.0 - 4.0 + 6.0) / 3)
    torch.testing.assert_close(gradient_K, torch.tensor([-2.0, -2.0, 3.0]) / 3)
    assert metrics["ratio_max"] == 4.0


@pytest.mark.parametrize(
    ("result", "reason"),
    [
        ("logprobs_K", "must return two values"),
        ("(logprobs_K.sum(), {})", r"must return a loss of shape \(3,\)"),
        ("(logprobs_K, {'ratio': logprobs_K})", "returns no metric 'clip_low'"),
    ],
)
def test_a_result_of_another_form_is_refused(result, reason, tmp_path) -> None:
    path = tmp_path / "own.py"
    path.write_text(f"def f(logprobs_K, anchor_K, columns, settings): return {result}\n")
    with pytest.raises(RunError, match=reason):
        loss_of(f"{path}:f")


def pairs_of(*, with_reference: bool) -> PairLogprobs:
    chosen, rejected = torch.tensor([-4.0, -6.0]), torch.tensor([-9.0, -8.0])
    ref_chosen, ref_rejected = torch.tensor([-5.0, -6.0]), torch.tensor([-6.0, -8.0])
    return PairLogprobs(
        chosen_logprobs=chosen,
        rejected_logprobs=rejected,
        ref_chosen_logprobs=ref_chosen if with_reference else None,
        ref_rejected_logprobs=ref_rejected if with_reference else None,
        chosen_lengths=torch.tensor([2.0, 3.0]),
        rejected_lengths=torch.tensor([3.0, 2.0]),
    )


def dpo_config(loss: str, **given):
    cls = cli.COMMANDS["dpo"].config_class
    return build_config(cls, {"pretrain": "x", "dataset": "x", "output": "x", "loss": loss, **given})


def test_the_page_s_loss_on_pairs_is_added_to_the_table_s(tmp_path) -> None:
    path = page_file(tmp_path, "squared_lead.py")
    config = dpo_config(f"hinge,{path}:squared_lead", loss_weights="1,0.5", beta="0.25")
    require_plugins(config)
    objective = make_objective(config.preference)
    assert objective.needs_reference
    pairs = pairs_of(with_reference=True)  # leads d = 1 + 3 and 0 + 0, a quarter of them 1 and 0
    found_B = mixed_loss(objective.names, objective.weights, pairs, objective.settings)
    assert found_B.tolist() == [0.0 + 0.5 * 0.0, 1.0 + 0.5 * 1.0]


def test_the_page_s_loss_without_a_reference_reads_no_setting(tmp_path) -> None:
    path = page_file(tmp_path, "squared_lead.py")
    objective = make_objective(dpo_config(f"{path}:without_reference").preference)
    assert not objective.needs_reference
    found_B = mixed_loss(objective.names, objective.weights, pairs_of(with_reference=False), objective.settings)
    assert found_B.tolist() == [-3.0 + 2.0, -4.0 + 2.0]
    with pytest.raises(UsageError, match=r"beta 0.3 has no effect on loss"):
        make_objective(dpo_config(f"{path}:without_reference", beta="0.3").preference)


def test_a_loss_on_pairs_of_another_form_is_refused(tmp_path) -> None:
    (tmp_path / "own.py").write_text("def f(pairs, settings): return 3.0\ndef g(pairs): return 3.0\n")
    with pytest.raises(RunError, match="one loss per pair"):
        mixed_loss([f"{tmp_path}/own.py:f"], [1.0], pairs_of(with_reference=True), PreferenceSettings())
    with pytest.raises(UsageError, match="g has to take 2 arguments: pairs, settings"):
        require_plugins(dpo_config(f"{tmp_path}/own.py:g"))
    with pytest.raises(UsageError, match=r"--loss dpo: must be sigmoid, ipo, .* or orpo, or code as file.py:NAME"):
        dpo_config("dpo")
