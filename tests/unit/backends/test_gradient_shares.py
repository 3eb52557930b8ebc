"""Shares of tokens in the gradient of an optimizer step, on the real engine."""

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from test_online_trained_roles import role_settings
from tiny_training import make_sequences
from torch import nn

from rlhf_cli.algorithms.aggregation import StepTotals
from rlhf_cli.algorithms.entropy import EntropyState
from rlhf_cli.algorithms.gradient_share import Projection, compared
from rlhf_cli.algorithms.objective import LossWeights
from rlhf_cli.backends.roles.ranks import ActorRank
from rlhf_cli.backends.roles.serialization import RankWork
from rlhf_cli.backends.roles.watch import Place, Watch, joined_projections, with_place
from rlhf_cli.backends.training.step_gradients import projection
from rlhf_cli.data.packing.packs import TokenSequence

pytestmark = pytest.mark.usefixtures("group_of_one")


def test_a_share_is_the_projection_of_the_tokens_gradient_on_that_of_the_step():
    """Two tokens with losses 3a + 4b and 2a: g = (5, 4), g_0 . g = 31 and g_1 . g = 10 of |g|^2 = 41."""
    module = nn.Linear(2, 1, bias=False)
    terms_K = module(torch.tensor([[3.0, 4.0], [2.0, 0.0]]))[:, 0]
    step = {"weight": torch.tensor([[5.0, 4.0]])}
    first, second = (projection(term, module, step) for term in terms_K)
    assert (first.product, first.norm, first.step_norm) == (31.0, 5.0, pytest.approx(math.sqrt(41)))
    assert (first.share, second.share) == pytest.approx((31 / 41, 10 / 41))
    assert module.weight.grad is None


def test_vectors_are_compared_over_all_tensors():
    """(3, 4, 1) and (0, 4, 0): the product is 16, the norms are sqrt 26 and 4."""
    one = {"a": torch.tensor([3.0, 4.0]), "b": torch.tensor([1.0])}
    found = compared(one, {"a": torch.tensor([0.0, 4.0])})
    assert (found.product, found.norm, found.step_norm) == (16.0, pytest.approx(math.sqrt(26)), 4.0)
    assert found.cosine == pytest.approx(4 / math.sqrt(26))


def test_a_step_without_a_gradient_has_no_shares():
    assert (Projection(0.0, 0.0, 0.0).share, Projection(0.0, 0.0, 0.0).cosine) == (0.0, 0.0)


def test_projections_of_ranks_are_joined_by_optimizer_step():
    one, other = Projection(1.0, 1.0, 2.0), Projection(3.0, 2.0, 2.0)
    assert joined_projections([[{(0, 1): one}, {}], [{}, {(2, 0): other}]]) == [{(0, 1): one}, {(2, 0): other}]


def samples() -> list[TokenSequence]:
    """Return sequences with the columns of an update, as if an engine had sampled them with slightly other weights."""
    rng = np.random.default_rng(3)

    def values(sequence: TokenSequence, scale: float) -> np.ndarray:
        return rng.normal(0, scale, sequence.num_trained).astype(np.float32)

    return [
        with_place(
            replace(one, columns={"rollout_logprobs": values(one, 0.1) - 4, "advantages": values(one, 1.0)}), number
        )
        for number, one in enumerate(make_sequences(4))
    ]


def test_the_gradient_of_a_step_is_whole_with_partitioned_weights(tiny_model_dir):
    sequences = samples()
    totals = StepTotals(sum(one.num_trained for one in sequences), len(sequences))
    actor = ActorRank(role_settings(tiny_model_dir, 3))
    weights = LossWeights({}, EntropyState(0.0))
    (found,) = actor.update(RankWork([[sequences]], [totals]), True, weights, watch=Watch(keeps_gradient=True))
    assert actor.record is not None
    assert compared(actor.record.gradient, {}).norm == pytest.approx(found["grad_norm"], rel=1e-5)


@pytest.mark.parametrize(
    ("stage", "given", "close"),
    [
        (0, {}, 1e-5),
        (2, {}, 1e-5),
        (2, {"lora_rank": 4}, 1e-5),
        (2, {"dtype": "bf16"}, 2e-2),
        (0, {"dtype": "bf16"}, 2e-2),
    ],
)
def test_the_shares_of_all_tokens_sum_to_one(tiny_model_dir, stage, given: Any, close):
    """In two optimizer steps of two micro-batches, the second after the weights moved, with an entropy bonus."""
    sequences = samples()
    places: list[Place] = [(n, token) for n, one in enumerate(sequences) for token in range(one.num_trained)]
    actor = ActorRank(role_settings(tiny_model_dir, stage, **given))
    totals = StepTotals(sum(one.num_trained for one in sequences), len(sequences))
    step = [sequences[:2], sequences[2:]]
    weights = LossWeights({}, EntropyState(0.01))
    found = actor.update(RankWork([step, step], [totals, totals]), True, weights, watch=Watch(tuple(places), True))
    assert actor.record is not None
    for metrics, projections in zip(found, actor.record.projections, strict=True):
        assert projections.keys() == set(places)
        assert sum(one.share for one in projections.values()) == pytest.approx(1, abs=close)
        assert all(one.step_norm == pytest.approx(metrics["grad_norm"], rel=close) for one in projections.values())
    assert compared(actor.record.gradient, {}).norm == pytest.approx(found[0]["grad_norm"], rel=close)
    assert all("lora" in name for name in actor.record.gradient) == ("lora_rank" in given)
