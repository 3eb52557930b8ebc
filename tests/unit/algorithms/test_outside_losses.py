"""Losses of others: the page's examples run in the objectives, and results of another form are refused."""

import pytest
import torch
from extending_page import page_file
from online_settings import resolve

from rlhf_cli.algorithms.aggregation import StepTotals
from rlhf_cli.algorithms.entropy import EntropyState
from rlhf_cli.algorithms.objective import LossWeights, PolicyColumns, policy_objective
from rlhf_cli.config.plugins import require_plugins
from rlhf_cli.config.policy import PolicyConfig
from rlhf_cli.errors import RunError


def loss_of(policy_loss: str, **settings):
    """Loss and gradient of three tokens with the ratios 4, 1 and 1."""
    logprobs_K = torch.tensor([-1.0, -2.0, -0.5], requires_grad=True)
    old_K = logprobs_K.detach() - torch.tensor([4.0, 1.0, 1.0]).log()
    columns = PolicyColumns(old_K, torch.tensor([1.0, 2.0, -3.0]), torch.tensor([0, 1, 3]), old_K=old_K)
    loss, metrics = policy_objective(
        logprobs_K,
        None,
        columns,
        settings=PolicyConfig(policy_loss=policy_loss, **settings),
        totals=StepTotals(num_tokens=3, num_sequences=2),
        weights=LossWeights(0.0, EntropyState(0.0)),
        max_new_tokens=9,
    )
    loss.backward()
    return loss.item(), logprobs_K.grad, metrics


def test_the_page_s_policy_loss_trains_as_it_says(tmp_path) -> None:
    path = page_file(tmp_path, "damped_loss.py")
    config = resolve("rloo", policy_loss=f"{path}:damped", eps_clip="0.1")
    require_plugins(config)
    loss, gradient_K, metrics = loss_of(config.policy.policy_loss)
    # Per token -2 sqrt(ratio) A: -2*2*1, -2*1*2, -2*1*-3; a third of each by the mean over three tokens.
    assert loss == pytest.approx((-4.0 - 4.0 + 6.0) / 3)
    torch.testing.assert_close(gradient_K, torch.tensor([-2.0, -2.0, 3.0]) / 3)
    assert metrics["ratio_max"] == 4.0


@pytest.mark.parametrize(
    ("result", "reason"),
    [
        ("logprobs_K", "has to return two values"),
        ("(logprobs_K.sum(), {})", r"has to return a loss of shape \(3,\)"),
        ("(logprobs_K, {'ratio': logprobs_K})", "returns no metric 'clip_low'"),
    ],
)
def test_a_result_of_another_form_is_refused(result, reason, tmp_path) -> None:
    path = tmp_path / "own.py"
    path.write_text(f"def f(logprobs_K, anchor_K, columns, settings): return {result}\n")
    with pytest.raises(RunError, match=reason):
        loss_of(f"{path}:f")
