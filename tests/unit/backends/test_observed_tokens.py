"""Observations as additional targets of actor updates: they change no other term, and no micro-batch changes them."""

from dataclasses import replace

import numpy as np
import pytest
from shared_roles import WEIGHTS, role_settings, samples

from rlhf_cli.algorithms.estimators.gae import ActorCriticPolicyConfig
from rlhf_cli.backends.roles.planner import MicroBatchPlanner
from rlhf_cli.backends.roles.ranks import ActorRank
from rlhf_cli.backends.roles.serialization import RankWork
from rlhf_cli.backends.roles.watch import Watch, with_place
from rlhf_cli.config.train import BatchConfig
from rlhf_cli.data.packing.packs import TokenSequence
from rlhf_cli.trainers.online.batch import with_observations

pytestmark = pytest.mark.usefixtures("group_of_one")

POLICY = ActorCriticPolicyConfig(observation_nll_coef=0.3, loss_agg="seq_mean")
STEPS = [np.arange(0, 8), np.arange(0, 8)]


def episodes() -> list[TokenSequence]:
    """Return responses whose third and fourth tokens are observations if more tokens follow."""
    found = []
    for one in samples():
        places = np.flatnonzero(one.loss_mask)
        observed = places[2:4] if len(places) > 4 else places[:0]
        mask, kept = one.loss_mask.copy(), ~np.isin(places, observed)
        mask[observed] = False
        found.append(replace(one, loss_mask=mask, columns={name: v[kept] for name, v in one.columns.items()}))
    return found


def work(given: list[TokenSequence], max_tokens: int = 500) -> RankWork:
    return MicroBatchPlanner(1, BatchConfig(train_max_tokens_per_gpu=max_tokens), 0.0).steps(given, STEPS)[0]


def test_observations_add_their_mean_log_likelihood_and_change_no_other_metric(tiny_model_dir):
    given = episodes()
    several = with_observations(given, POLICY)
    observed = [replace(one, loss_mask=two.loss_mask & ~one.loss_mask) for one, two in zip(given, several, strict=True)]
    plain = ActorRank(role_settings(tiny_model_dir, 1, policy=replace_coef(0.0)))
    logprobs = np.concatenate(plain.logprobs([observed]))
    expected = plain.update(work(given), on_policy=False, weights=WEIGHTS)
    whole, parts = (
        ActorRank(role_settings(tiny_model_dir, 1, policy=POLICY)).update(
            work(several, max_tokens), on_policy=False, weights=WEIGHTS
        )
        for max_tokens in (500, 28)
    )
    assert len(logprobs) == 8  # of the four responses with more than four tokens
    assert whole[0]["observation_nll"] == pytest.approx(-logprobs.mean(), rel=1e-5)
    # The entropy bonus, ratios and KL of the first step cover sampled tokens only.
    for name in expected[0].keys() - {"loss", "grad_norm"}:
        assert whole[0][name] == pytest.approx(expected[0][name], rel=1e-5, abs=1e-7), name
    assert abs(whole[0]["grad_norm"] - expected[0]["grad_norm"]) > 1e-3
    assert whole[1]["observation_nll"] < whole[0]["observation_nll"]
    for one, other in zip(whole, parts, strict=True):
        assert one == pytest.approx(other, rel=1e-4, abs=1e-6)


def test_a_trace_has_only_sampled_tokens_with_their_numbers(tiny_model_dir):
    given = [with_place(one, number) for number, one in enumerate(with_observations(episodes(), POLICY))]
    rank = ActorRank(role_settings(tiny_model_dir, 1, policy=POLICY))
    rank.update(work(given), on_policy=False, weights=WEIGHTS, watch=Watch(tokens=((0, 2),)))
    assert rank.record is not None
    assert rank.record.trace.of_sequence(0)["token"].tolist() == list(range(7))
    assert (0, 2) in rank.record.projections[0]


def test_totals_count_observations_apart() -> None:
    """Of 2 + 1 tokens, one is an observation; both sampled tokens belong to a prompt with 2 tokens."""
    marks = [
        {"observed": [0, 1], "correct": [1, 0], "prompt_tokens": [2, 0]},
        {"observed": [0], "correct": [0], "prompt_tokens": [2]},
    ]
    given = [
        TokenSequence(
            np.arange(4, dtype=np.int32),
            np.arange(4) >= 4 - len(one["observed"]),
            columns={name: np.array(values, np.float32) for name, values in one.items()},
        )
        for one in marks
    ]
    (totals,) = MicroBatchPlanner(1, BatchConfig(), 0.0).steps(given, [np.arange(2)])[0].totals
    assert (totals.num_tokens, totals.num_observed, totals.num_correct) == (2, 1, 1)
    assert (totals.num_sequences, totals.num_prompts) == (2, 1.0)


def replace_coef(coef: float) -> ActorCriticPolicyConfig:
    return POLICY.model_copy(update={"observation_nll_coef": coef})
