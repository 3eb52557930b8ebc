"""Losses of the Tinker API, worked out by hand: values, gradients, defaults and refused parameters."""

import math

import pytest
import torch

from rlhf_cli.algorithms.tinker_losses import LOSSES, tinker_loss
from rlhf_cli.errors import UsageError

# Ratios 2, 0.5 and 1 to the sampler's log-probs, with advantages 1, -1 and 3.
LOGPROBS = torch.log(torch.tensor([0.5, 0.25, 0.1]))
SAMPLED = {
    "logprobs": torch.log(torch.tensor([0.25, 0.5, 0.1])),
    "advantages": torch.tensor([1.0, -1.0, 3.0]),
    "sequence_ratio_mask": torch.tensor([1.0, 0.0, 1.0]),
}


def loss_and_gradient(name: str, inputs: dict[str, torch.Tensor], **given: float) -> tuple[list[float], list[float]]:
    """Return the losses per token and their gradients with respect to the log-probs."""
    loss = tinker_loss(name)
    logprobs = LOGPROBS.clone().requires_grad_()
    losses = loss.function(logprobs, inputs, loss.config(name, given))
    (gradient,) = torch.autograd.grad(losses.sum(), logprobs)
    return losses.tolist(), gradient.tolist()


def test_cross_entropy_weighs_the_negative_logprobs():
    weights = torch.tensor([1.0, 0.0, 0.5])
    losses, gradient = loss_and_gradient("cross_entropy", {"weights": weights})
    assert losses == pytest.approx([math.log(2), 0, 0.5 * math.log(10)])
    assert gradient == pytest.approx([-1, 0, -0.5])


def test_importance_sampling_is_the_ratio_times_the_advantage():
    losses, gradient = loss_and_gradient("importance_sampling", SAMPLED)
    assert losses == pytest.approx([-2, 0.5, -3])
    # d exp(l - q) / dl is the ratio itself.
    assert gradient == pytest.approx([-2, 0.5, -3])


@pytest.mark.parametrize(
    ("given", "losses", "gradient"),
    [
        # Defaults 0.8 and 1.2: min(2, 1.2) * 1; min(-0.5, -0.8) is clipped to 0.8 * -1; 1 * 3.
        ({}, [-1.2, 0.8, -3], [0, 0, -3]),
        ({"clip_low_threshold": 0.4, "clip_high_threshold": 3.0}, [-2, 0.5, -3], [-2, 0.5, -3]),
        ({"clip_high_threshold": 1.5}, [-1.5, 0.8, -3], [0, 0, -3]),
    ],
)
def test_ppo_takes_the_lower_of_clipped_and_unclipped(given, losses, gradient):
    found = loss_and_gradient("ppo", SAMPLED, **given)
    assert found[0] == pytest.approx(losses)
    assert found[1] == pytest.approx(gradient)


def test_cispo_weighs_logprobs_by_a_bounded_ratio_without_a_gradient():
    given = {"clip_low_threshold": 0.8, "clip_high_threshold": 1.5}
    losses, gradient = loss_and_gradient("cispo", SAMPLED, **given)
    logprobs = [math.log(0.5), math.log(0.25), math.log(0.1)]
    factors = [1.5 * 1, 0.8 * -1, 1 * 3]
    assert losses == pytest.approx([-factor * logprob for factor, logprob in zip(factors, logprobs, strict=True)])
    assert gradient == pytest.approx([-factor for factor in factors])


def test_cispo_clips_only_above_by_default():
    assert loss_and_gradient("cispo", SAMPLED)[1] == pytest.approx([-2, 0.5, -3])
    assert LOSSES["cispo"].defaults == {"clip_low_threshold": 0.0, "clip_high_threshold": 4.0}


def test_dro_has_a_quadratic_penalty():
    losses, gradient = loss_and_gradient("dro", SAMPLED, beta=0.5)
    log2 = math.log(2)
    # -(l A - beta / 2 (l - q)^2), with l - q = log 2, -log 2 and 0.
    assert losses == pytest.approx([log2 + 0.25 * log2**2, -2 * log2 + 0.25 * log2**2, 3 * math.log(10)])
    assert gradient == pytest.approx([-1 + 0.5 * log2, 1 - 0.5 * log2, -3])


def test_gspo_uses_the_geometric_mean_of_the_marked_ratios():
    given = {"clip_low_threshold": 0.5, "clip_high_threshold": 2.0}
    losses, gradient = loss_and_gradient("gspo", SAMPLED, **given)
    # Marked ratios 2 and 1: sqrt(2), which every token has, also the one that is not marked.
    root = math.sqrt(2)
    assert losses == pytest.approx([-root, root, -3 * root])
    assert gradient == pytest.approx([-root, root, -3 * root])


def test_gspo_without_marked_tokens_has_the_ratio_1():
    inputs = SAMPLED | {"sequence_ratio_mask": torch.zeros(3)}
    losses, _ = loss_and_gradient("gspo", inputs, clip_low_threshold=0.5, clip_high_threshold=2.0)
    assert losses == pytest.approx([-1, 1, -3])


@pytest.mark.parametrize(
    ("name", "given", "message"),
    [
        ("ppo", {"eps": 0.2}, "ppo has no parameter 'eps'; it has clip_low_threshold and clip_high_threshold"),
        ("cross_entropy", {"beta": 1.0}, "cross_entropy has no parameter 'beta'; it has none"),
        ("ppo", {"clip_low_threshold": "low"}, "clip_low_threshold of ppo must be a number, not 'low'"),
        ("dro", {}, "dro requires beta: it has no default"),
        ("gspo", {}, "gspo requires clip_low_threshold and clip_high_threshold: they have no default"),
    ],
)
def test_wrong_parameters_are_refused(name, given, message):
    with pytest.raises(UsageError, match=message):
        tinker_loss(name).config(name, given)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("cross_entropi", r"loss_fn 'cross_entropi' is unknown \(did you mean cross_entropy\?\)"),
        ("stable_reinforce", "its formula is not published"),
        ("custom", "pass a function to forward_backward_custom"),
    ],
)
def test_losses_that_the_server_lacks_are_refused(name, message):
    with pytest.raises(UsageError, match=message):
        tinker_loss(name)
