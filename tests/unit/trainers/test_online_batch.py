"""From generations to the training data of policy and critic, compared with manual calculations."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from online_settings import reference_terms
from samples import sample_of

from rlhf_cli.algorithms.estimators.estimator import Advantages, Experience
from rlhf_cli.algorithms.estimators.gae import ActorCriticPolicyConfig
from rlhf_cli.algorithms.estimators.group import GroupPolicyConfig
from rlhf_cli.algorithms.estimators.reinforce import ReinforcePolicyConfig
from rlhf_cli.algorithms.estimators.table import ESTIMATORS
from rlhf_cli.config.model import ReferenceConfig
from rlhf_cli.config.policy import PolicyConfig
from rlhf_cli.config.roles import CriticConfig
from rlhf_cli.config.rollout import DynamicSamplingConfig, RolloutConfig
from rlhf_cli.config.scoring import RewardConfig
from rlhf_cli.config.train import BatchConfig, OptimConfig
from rlhf_cli.data.prompts import Prompt
from rlhf_cli.data.rollouts import Episode, Generation
from rlhf_cli.data.stored_arrays import StoredArray, StoredChunk
from rlhf_cli.models.vision.pictures import PlacedPicture, picture_of_pixels
from rlhf_cli.rewards.parts import join
from rlhf_cli.rewards.records import Score
from rlhf_cli.trainers.online.batch import (
    learning_samples,
    split_last_values,
    weighted_parts,
    with_bootstrap_targets,
    with_observations,
)
from rlhf_cli.trainers.online.groups import usefulness
from rlhf_cli.trainers.online.metrics import (
    clip_metrics,
    clipped_flat,
    failure_metrics,
    rollout_metrics,
    source_metrics,
    zero_std_metrics,
)
from rlhf_cli.trainers.online.rollout import score_request, text_of_response
from rlhf_cli.trainers.online.sample_rows import sample_row
from rlhf_cli.trainers.online.samples import Rollout, Sample
from rlhf_cli.trainers.online.state import OnlineSettings
from rlhf_cli.trainers.online.update_plan import plan_updates

FAILED = Score(None, "failed", "timed out after 30 s", {"format": 1.0})
REWARD = RewardConfig(reward_funcs=["exact"])


def prompt(number: int, source: str = "a.jsonl") -> Prompt:
    return Prompt([7, 8], f"{source} {number}? ", str(number), source, number)


def generation(*token_ids: int, cut: bool = False) -> Generation:
    return Generation(list(token_ids), [-0.1 * (i + 1) for i in range(len(token_ids))], "length" if cut else "stop", 0)


def scored(value: float, status: str = "scored", **parts: float) -> Score:
    return Score(value, status, "", parts)  # type: ignore[arg-type]


def responses_of(
    prompts: list[Prompt], generations: list[Generation], scores: list[Score], groups: list[int]
) -> Rollout:
    columns = enumerate(zip(prompts, generations, scores, groups, strict=True))
    return Rollout([sample_of(p, g, score, group=group, index=n) for n, (p, g, score, group) in columns]).scored()


def settings_of(
    algorithm: str,
    policy: PolicyConfig | None = None,
    reward: RewardConfig = REWARD,
    *,
    distill_coef: float | None = None,
) -> OnlineSettings:
    policy = policy or ActorCriticPolicyConfig()
    return OnlineSettings(
        estimator=ESTIMATORS[algorithm],
        rollout=RolloutConfig(max_new_tokens=4),
        reward=reward,
        policy=policy,
        kl_terms=reference_terms(policy),
        batch=BatchConfig(),
        critic=CriticConfig(),
        reference=ReferenceConfig(),
        optim=OptimConfig(),
        distill_coef=distill_coef,
    )


def floats(*values: float) -> np.ndarray:
    return np.array(values, np.float32)


def test_the_response_is_trained_and_the_prompt_is_not():
    placed = (PlacedPicture(picture_of_pixels("digest", np.zeros((4, 4, 3), np.uint8)), 1, 2, token=7),)
    sequence = sample_of(Prompt([5, 7, 7], "", None, "data.jsonl", 0, pictures=placed), generation(8, 9)).sequence
    assert sequence.token_ids.tolist() == [5, 7, 7, 8, 9]
    assert sequence.pictures == placed
    assert sequence.loss_mask.tolist() == [False, False, False, True, True]


def test_responses_whose_score_failed_are_left_out_in_order():
    responses = responses_of(
        [prompt(0), prompt(0), prompt(1)],
        [generation(1), generation(2, 2), generation(3, 3, 3)],
        [scored(0.0), FAILED, scored(-2.0)],
        [0, 0, 1],
    )
    assert len(responses) == 2
    assert [sequence.token_ids.tolist() for sequence in responses.sequences] == [[7, 8, 1], [7, 8, 3, 3, 3]]
    assert responses.scores_B.tolist() == [0.0, -2.0]  # 0 is a valid score
    assert responses.cu.tolist() == [0, 1, 4]
    assert [np.asarray(logprobs).tolist() for logprobs in responses.rollout_logprobs] == [
        pytest.approx([-0.1]),
        pytest.approx([-0.1, -0.2, -0.3]),
    ]


def test_responses_to_a_prompt_that_was_asked_twice_form_two_groups():
    responses = responses_of([prompt(0)] * 4, [generation(1)] * 4, [scored(1.0)] * 3 + [FAILED], [0, 0, 1, 1])
    assert responses.groups_B.tolist() == [0, 0, 1]


def two_responses(*scores: float) -> Rollout:
    """Return responses of two and one tokens."""
    return responses_of([prompt(0), prompt(1)], [generation(1, 2), generation(3)], [scored(s) for s in scores], [0, 1])


def test_samples_of_ppo_by_hand():
    """With gamma = lambda = 1, returns are sums of future rewards, and advantages are returns minus values.

    KL (k1) is .3, .1 and -.2 nats per token with coefficient .5; scores are 2 and 20, the latter clipped to 10.
    Rewards: -.15, -.05 + 2, .1 + 10. Returns: 1.8, 1.95, 10.1. Values 1, 2, 3: advantages .8, -.05, 7.1 with mean
    2.6166667 and unbiased variance 15.2558333, whitened -.4651117, -.6827328, 1.1478446.
    """
    responses = two_responses(2.0, 20.0)
    responses.old_logprobs = [floats(-1.0, -2.0), floats(-0.5)]
    responses.frozen_logprobs["ref"] = [floats(-1.3, -2.1), floats(-0.3)]
    responses.values = [floats(1.0, 2.0), floats(3.0)]
    reward = RewardConfig(reward_funcs=["exact"], reward_clip_range=(-10.0, 10.0))
    samples, metrics = learning_samples(responses, None, settings_of("ppo", reward=reward), kl_coef=0.5)
    assert samples[0].columns.keys() == {
        "old_logprobs",
        "rollout_logprobs",
        "advantages",
        "old_values",
        "returns",
    }
    assert samples[0].columns["returns"].tolist() == pytest.approx([1.8, 1.95], rel=1e-5)
    assert samples[1].columns["returns"].tolist() == pytest.approx([10.1], rel=1e-5)
    assert samples[0].columns["advantages"].tolist() == pytest.approx([-0.4651117, -0.6827328], rel=1e-4)
    assert samples[1].columns["advantages"].tolist() == pytest.approx([1.1478446], rel=1e-4)
    assert samples[0].columns["old_values"].tolist() == [1.0, 2.0]
    assert samples[1].columns["old_logprobs"].tolist() == [-0.5]
    # .4 nats in the first response, -.2 in the second.
    assert metrics == pytest.approx({"kl": 0.1, "advantage_abs": (0.4651117 + 0.6827328 + 1.1478446) / 3}, rel=1e-4)


def test_an_estimator_gets_its_own_settings_and_logs_its_metrics():
    """The settings replace the policy's, and the metrics start with `advantage/`."""

    def clipped(experience: Experience, settings: OptimConfig) -> Advantages:
        return Advantages(experience.rewards_N, metrics={"l2": settings.l2})

    estimator = replace(ESTIMATORS["rloo"], advantages=clipped)
    settings = replace(settings_of("rloo"), estimator=estimator, estimator_settings=OptimConfig(l2=0.25))
    responses = responses_of([prompt(0)] * 2, [generation(1), generation(2)], [scored(1.0), scored(0.0)], [0, 0])
    _, metrics = learning_samples(responses, None, settings, kl_coef=0.0)
    assert metrics == {"advantage/l2": 0.25, "advantage_abs": 0.5}


def test_a_cut_response_is_worth_what_the_critic_says_of_the_state_it_ended_in():
    responses = responses_of(
        [prompt(0), prompt(1)], [generation(1, 2, cut=True), generation(3)], [scored(2.0), scored(5.0)], [0, 1]
    )
    asked = with_bootstrap_targets(responses)
    assert [sequence.token_ids.tolist() for sequence in asked] == [[7, 8, 1, 2, 2], [7, 8, 3]]
    assert [sequence.num_trained for sequence in asked] == [3, 1]
    responses.values, responses.bootstrap = split_last_values(
        [floats(1.0, 2.0, 8.0), floats(3.0)], responses.truncated_B
    )
    settings = settings_of("ppo", ActorCriticPolicyConfig(gamma=0.5))
    samples, _ = learning_samples(responses, None, settings, kl_coef=0.0)
    # The last token has its score and half of 8, the one before half of that; the finished response has its score.
    assert samples[0].columns["returns"].tolist() == [3.0, 6.0]
    assert samples[1].columns["returns"].tolist() == [5.0]
    assert samples[0].columns["old_values"].tolist() == [1.0, 2.0]


def test_the_rewards_of_turns_stand_at_their_last_sampled_tokens_and_observations_count_for_nothing():
    """With gamma = .5 and lambda = 1, tokens 1, 2 and 3 have rewards 0, 1 and 4, minus .5 for clipping at 4.5.

    For three turns with 4 each, the cumulative sums are clipped to 4, 4.5 and 4.5, so the last turn has 0.
    """
    episode = Episode(turns=((0, 2), (4, 5)), turn_rewards=(1.0, 4.0))
    played = Generation([1, 2, 9, 9, 3], [-0.1, -0.2, -0.3], "stop", 0, episode)
    responses = responses_of([prompt(0)], [played], [scored(5.0, environment=5.0)], [0])
    assert responses.sequences[0].loss_mask.tolist() == [False] * 2 + [True] * 2 + [False] * 2 + [True]
    responses.values = [floats(0.0, 0.0, 0.0)]
    reward = RewardConfig(reward_funcs=["environment"], reward_clip_range=(-4.5, 4.5))
    settings = settings_of("ppo", ActorCriticPolicyConfig(gamma=0.5), reward)
    samples, _ = learning_samples(responses, None, settings, kl_coef=0.0)
    assert samples[0].columns["returns"].tolist() == [0.5 * (1 + 0.5 * 3.5), 1 + 0.5 * 3.5, 3.5]
    longer = Episode(turns=((0, 1), (2, 3), (4, 5)), turn_rewards=(4.0, 4.0, 4.0))
    clipped = responses_of([prompt(0)], [replace(played, episode=longer)], [scored(12.0, environment=12.0)], [0])
    clipped.values = [floats(0.0, 0.0, 0.0)]
    samples, _ = learning_samples(clipped, None, settings, kl_coef=0.0)
    assert samples[0].columns["returns"].tolist() == [4 + 0.5 * 0.5, 0.5, 0.0]
    grouped, _ = learning_samples(responses, None, settings_of("rloo", PolicyConfig(), reward), kl_coef=0.0)
    assert len(grouped[0].columns["advantages"]) == 3


def test_observations_become_targets_of_the_actor_with_columns_of_their_own():
    episode = Episode(turns=((0, 2), (4, 5)), turn_rewards=(1.0, 4.0))
    played = Generation([1, 2, 9, 6, 3], [-0.1, -0.2, -0.3], "stop", 0, episode)
    responses = responses_of([prompt(0)], [played], [scored(5.0)], [0])
    policy = PolicyConfig(observation_nll_coef=0.05)
    samples, _ = learning_samples(responses, None, settings_of("rloo", policy), kl_coef=0.0)
    (sample,) = with_observations(samples, policy)
    assert sample.token_ids[sample.loss_mask].tolist() == [1, 2, 9, 6, 3]
    assert sample.columns["observed"].tolist() == [0, 0, 1, 1, 0]
    assert sample.columns["rollout_logprobs"].tolist() == floats(-0.1, -0.2, 0, 0, -0.3).tolist()
    assert samples[0].token_ids[samples[0].loss_mask].tolist() == [1, 2, 3]
    assert with_observations(samples, PolicyConfig()) is samples
    no_turn = replace(samples[0], loss_mask=np.zeros(7, bool), columns={"advantages": floats()})
    assert with_observations([no_turn], policy)[0].columns["observed"].size == 0
    column = StoredArray(StoredChunk(None, lambda _: samples[0].columns["rollout_logprobs"]), 0, 3)
    (read,) = with_observations([replace(samples[0], columns={}, stored={"rollout_logprobs": column})], policy)
    assert read.columns["rollout_logprobs"].tolist() == sample.columns["rollout_logprobs"].tolist()
    assert not read.stored


@pytest.mark.parametrize(("std", "unit"), [("none", 1.0), ("group", None)])
def test_turns_after_the_same_observation_are_compared_by_their_returns(std, unit):
    """Two episodes of a prompt with turn rewards 0, 1 and 1, 0, 4, so returns 0.5, 1 and 2, 2, 4 with gamma 0.5.

    Their second turns follow the same observation, and the third turn is alone. The means are (1 + 5) / 2 = 3 for
    episodes, 1.25 for the first turns and 1.5 for the second. An equal episode of another prompt is compared with none.
    """
    reward = RewardConfig(reward_funcs=["environment"])
    short, long = Episode(((0, 2), (4, 5)), (0.0, 1.0)), Episode(((0, 1), (3, 4), (5, 6)), (1.0, 0.0, 4.0))
    played = [
        Generation([1, 2, 9, 6, 3], [-0.1, -0.2, -0.3], "stop", 0, short),
        Generation([4, 9, 6, 5, 8, 7], [-0.1, -0.2, -0.3], "stop", 0, long),
    ]
    given = [scored(value, environment=value) for value in (1.0, 5.0, 1.0)]
    responses = responses_of([prompt(0)] * 2 + [prompt(1)], [*played, played[0]], given, [0, 0, 1])
    policy = GroupPolicyConfig(advantage="gigpo", advantage_std=std, gigpo_gamma=0.5, gigpo_weight=2.0)
    policy = policy.model_copy(update={"init_kl_coef": 0.0})
    samples, metrics = learning_samples(responses, None, settings_of("gigpo", policy, reward), kl_coef=0.0)
    first, second, other = (sample.columns["advantages"].tolist() for sample in samples)
    episode, turns = (2.0, (0.75, 0.5)) if unit else (0.5**0.5, (0.5**0.5, 0.5**0.5))
    by_turn = [episode + 2 * turns[0], episode + 2 * turns[1], episode]
    assert first == pytest.approx([-by_turn[0], -by_turn[0], -by_turn[1]], rel=1e-4)
    assert second == pytest.approx(by_turn, rel=1e-4)
    assert other == [0.0, 0.0, 0.0]
    assert metrics["advantage/repeated_states"] == pytest.approx(4 / 7)


def test_tokens_of_correct_responses_are_marked_if_the_loss_has_a_term_for_them():
    given = [scored(1.0, "correct"), scored(2.0, "wrong")]
    responses = responses_of([prompt(0)] * 2, [generation(1, 2), generation(3)], given, [0, 0])
    samples, _ = learning_samples(responses, None, settings_of("rloo", PolicyConfig(correct_nll_coef=0.1)), kl_coef=0.0)
    assert [sample.columns["correct"].tolist() for sample in samples] == [[1.0, 1.0], [0.0]]
    plain, _ = learning_samples(responses, None, settings_of("rloo", PolicyConfig()), kl_coef=0.0)
    assert "correct" not in plain[0].columns


def test_rewards_compared_apart_are_clipped_and_weighted_each():
    responses = responses_of(
        [prompt(0), prompt(0)],
        [generation(1), generation(2)],
        [scored(0.0, exact=1.0, reward_model=99.0), scored(0.0, exact=0.0, reward_model=-99.0)],
        [0, 0],
    )
    reward = RewardConfig(
        reward_funcs=["exact"],
        reward_weights=[2.0],
        reward_pretrain="rm",
        reward_model_weight=0.5,
        reward_clip_range=(-10.0, 10.0),
    )
    parts = [(weight, part_B.tolist()) for weight, part_B in weighted_parts(responses, reward)]
    assert parts == [(2.0, [1.0, 0.0]), (0.5, [10.0, -10.0])]
    assert responses.only([False, True]).parts["exact"].tolist() == [0.0]


SCALES = (1e-6, 1e-3, 50.0, 1e6)


def advantages_at(scale: float, algorithm: str, policy: PolicyConfig, *, kl: float = 0.0) -> np.ndarray:
    """Return advantages of two groups of three one-token responses; scores differ within both, and KL is `kl` nats."""
    values = [scale * value for value in (0.1, 0.7, 0.3, 1.0, 0.4, 0.2)]
    prompts, generations = [prompt(n // 3) for n in range(6)], [generation(n) for n in range(6)]
    groups, scores = [n // 3 for n in range(6)], [scored(value, exact=value) for value in values]
    responses = responses_of(prompts, generations, scores, groups)
    responses.values = [floats(0.0)] * 6
    responses.old_logprobs = [floats(-1.0)] * 6
    responses.frozen_logprobs["ref"] = [floats(-1.0 - n * kl) for n in range(6)]
    greedy = responses_of(prompts[::3], generations[::3], [scored(0.25 * scale), scored(0.5 * scale)], [0, 1])
    samples, _ = learning_samples(responses, greedy, settings_of(algorithm, policy), kl_coef=0.01)
    return np.concatenate([sample.columns["advantages"] for sample in samples])


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize(
    ("algorithm", "policy", "is_normalised"),
    [
        ("ppo", ActorCriticPolicyConfig(gamma=1.0, lambd=1.0), True),
        ("reinforce++", ReinforcePolicyConfig(), True),
        ("reinforce++_group", PolicyConfig(), True),
        ("grpo", GroupPolicyConfig(), True),
        ("grpo", GroupPolicyConfig(advantage_std="none"), False),
        ("grpo_passk", GroupPolicyConfig(), True),
        ("gdpo", GroupPolicyConfig(), True),
        ("rloo", PolicyConfig(), False),
        ("remax", PolicyConfig(), False),
    ],
)
def test_advantages_do_not_depend_on_the_scale_of_rewards_or_are_proportional_to_it(
    scale, algorithm, policy, is_normalised
):
    one, other = advantages_at(1.0, algorithm, policy), advantages_at(scale, algorithm, policy)
    assert np.abs(one).max() > 0.1
    np.testing.assert_allclose(other, one if is_normalised else scale * one, rtol=1e-5, atol=1e-6 * min(scale, 1.0))


@pytest.mark.parametrize("algorithm", ["reinforce++", "reinforce++_group", "grpo", "grpo_passk"])
def test_rounding_of_the_divergence_is_no_advantage_where_all_scores_are_equal(algorithm):
    policy = ReinforcePolicyConfig() if algorithm == "reinforce++" else GroupPolicyConfig(use_kl_loss=False)
    assert np.abs(advantages_at(0.0, algorithm, policy, kl=1e-7)).max() < 0.01


def test_groups_that_differ_by_rounding_are_alike_for_the_filter_the_metric_and_advantages():
    """0.1 + 0.2 and 0.3 differ by 6e-17, as do 0.1 + 0.2 - 0.3 and 0."""
    weights = {"a": 1.0, "b": 1.0, "c": 1.0}
    sums = [(0.1, 0.2, 0.0), (0.3, 0.0, 0.0), (0.1, 0.2, -0.3), (0.0, 0.0, 0.0)]
    scores = [join({n: Score(v, "scored", "") for n, v in zip("abc", parts, strict=True)}, weights) for parts in sums]
    responses = responses_of(
        [prompt(n // 2) for n in range(4)], [generation(n) for n in range(4)], scores, [0, 0, 1, 1]
    )
    for group in (scores[:2], scores[2:]):
        assert usefulness(group, DynamicSamplingConfig(dynamic_filtering=True)) == "alike"
    assert zero_std_metrics(scores, [0, 0, 1, 1]) == {"frac_reward_zero_std": 1.0}
    for algorithm in ("grpo", "grpo_passk", "rloo", "reinforce++_group"):
        samples, _ = learning_samples(responses, None, settings_of(algorithm, GroupPolicyConfig()), kl_coef=0.0)
        assert all(not sample.columns["advantages"].any() for sample in samples)


def test_clipped_scores_are_counted_and_clipping_that_leaves_no_difference_is_noticed():
    scores, groups, clip_range = [scored(value) for value in (50.0, 99.0, 5.0)], [0, 0, 1], (-10.0, 10.0)
    assert clip_metrics(scores, clip_range) == {"reward_clipped": pytest.approx(2 / 3)}
    assert clip_metrics(scores, None) == clip_metrics([FAILED], clip_range) == {}
    assert clipped_flat([50.0, 99.0, 5.0], groups, clip_range)
    assert not clipped_flat([50.0, 99.0, 5.0], [0, 0, 0], clip_range)
    assert not clipped_flat([50.0, 50.0, 5.0], groups, clip_range)  # equal before clipping


def test_without_a_reference_the_score_alone_is_rewarded_and_no_divergence_is_reported():
    responses = two_responses(2.0, -1.0)
    responses.values = [floats(0.0, 0.0), floats(0.0)]
    settings = settings_of("ppo", ActorCriticPolicyConfig(gamma=0.5))
    samples, metrics = learning_samples(responses, None, settings, kl_coef=0.5)
    assert samples[0].columns["returns"].tolist() == [1.0, 2.0]
    assert samples[1].columns["returns"].tolist() == [-1.0]
    assert "old_logprobs" not in samples[0].columns
    assert metrics.keys() == {"advantage_abs"}


def test_greedy_responses_are_shaped_alike_and_compared_with_by_prompt():
    prompts = [prompt(0), prompt(0), prompt(1), prompt(2)]
    answers = [generation(1), generation(2, 2, 2, 2, cut=True), generation(3), generation(4)]
    responses = responses_of(prompts, answers, [scored(3.0), scored(5.0), scored(7.0), scored(9.0)], [0, 0, 1, 2])
    greedy = responses_of(
        [prompt(0), prompt(1), prompt(2)],
        [generation(1, 1, 1, 1, cut=True), generation(1), generation(1)],
        [scored(8.0), FAILED, scored(4.0)],
        [0, 1, 2],
    )
    kept = responses.in_groups_of(greedy)
    assert kept.scores_B.tolist() == [3.0, 5.0, 9.0]  # the response to the second prompt has no group to compare with
    reward = RewardConfig(reward_funcs=["exact"], stop_properly_penalty_coef=0.5)
    settings = settings_of("remax", PolicyConfig(mask_truncated=True), reward)
    samples, metrics = learning_samples(kept, greedy, settings, kl_coef=0.0)
    assert [sample.token_ids.tolist() for sample in samples] == [[7, 8, 1], [7, 8, 4]]  # one was truncated
    assert [sample.columns["advantages"].tolist() for sample in samples] == [[3.0 - 4.0], [9.0 - 4.0]]
    assert metrics == {"advantage_abs": 3.0}


def test_columns_have_a_value_for_every_trained_token():
    responses = two_responses(1.0, 2.0)
    responses.values = [floats(0.0, 1.0), floats(2.0)]
    samples, _ = learning_samples(responses, None, settings_of("ppo"), kl_coef=0.0)
    for sample in samples:
        assert {len(column) for column in sample.columns.values()} == {sample.num_trained}
        assert {column.dtype for column in sample.columns.values()} == {np.dtype(np.float32)}


def test_failed_rewards_are_not_averaged_in():
    metrics = rollout_metrics(
        [generation(1, 2, 3, 4, cut=True), generation(1), generation(1), generation(1, 2)],
        [
            scored(1.0, "correct", exact=1.0, format=1.0),
            scored(0.0, "wrong", exact=0.0, format=0.5),
            scored(-1.0, "invalid", exact=0.0, format=0.0),
            FAILED,
        ],
    )
    assert metrics == pytest.approx(
        {
            "reward": 0.0,
            "reward_std": (2 / 3) ** 0.5,
            "response_length": 2.0,
            "response_length_max": 4.0,
            "truncated": 0.25,
            "accuracy": 1 / 3,
            "reward/exact": 1 / 3,
            "reward/format": 2.5 / 4,
        }
    )


def test_failures_are_counted_by_kind_where_there_are_any():
    late, odd = (Score(None, "failed", failure=kind) for kind in ("timeout", "bad_result"))
    assert failure_metrics([late, scored(1.0), odd, late]) == {
        "reward_failed": 0.75,
        "reward/failed_bad_result": 1.0,
        "reward/failed_timeout": 2.0,
    }
    assert failure_metrics([scored(1.0)]) == {"reward_failed": 0.0}


def test_plain_scores_have_no_accuracy():
    assert "accuracy" not in rollout_metrics([generation(1)], [scored(3.0)])


def test_rewards_are_asked_about_prompt_and_response():
    response = generation(3, cut=True)
    text = text_of_response(response, lambda token_ids: f"<{token_ids}>")
    request = score_request(prompt(4), response, text, group="7", index=1, size=2)
    assert (request.query, request.prompt, request.response, request.label) == (
        "a.jsonl 4? <[3]>",
        "a.jsonl 4? ",
        "<[3]>",
        "4",
    )
    assert (request.num_tokens, request.truncated, request.token_ids) == (1, True, [3])
    assert (request.group, request.sample, request.group_size) == ("7", 1, 2)


def test_rows_of_samples_say_everything_about_a_response():
    score = scored(1.0, "correct", exact=1.0)
    assert sample_row(sample_of(prompt(4), generation(1, 2, cut=True), score, text="[1, 2]")) == {
        "id": "a.jsonl:4/0.0@0",
        "source": "a.jsonl",
        "row": 4,
        "group": 0,
        "sample": 0,
        "weight_version": 0,
        "prompt": "a.jsonl 4? ",
        "response": "[1, 2]",
        "label": "4",
        "reward": 1.0,
        "verdict": "correct",
        "detail": "",
        "answer": None,
        "length": 2,
        "finish_reason": "length",
        "rollout_logprob": -0.3,
        "reward/exact": 1.0,
    }
    row = sample_row(sample_of(prompt(5), generation(3), FAILED))
    assert (row["reward"], row["verdict"], row["detail"]) == (None, "failed", "timed out after 30 s")


def test_the_id_of_a_sample_leads_to_its_row_and_its_weights():
    response = Generation([20, 2], [-0.1, -0.02], "stop", 12)
    sample = sample_of(Prompt([17, 10, 18, 28], "2+3=", "5", "sums.jsonl", 16), response, group=340, index=2)
    assert sample.id == "sums.jsonl:16/340.2@12"
    assert replace(sample, index=None).id == "sums.jsonl:16/340.greedy@12"


def test_steps_are_dealt_in_the_order_of_the_rollout_whatever_the_numbers_of_its_groups():
    """With dynamic sampling, surplus comes first and postponed prompts follow: groups 7, 6, 8."""

    def steps_of(*groups: int) -> list[list[int]]:
        numbers = [group for group in groups for _ in range(2)]
        responses = responses_of([prompt(0)] * 6, [generation(1)] * 6, [scored(1.0)] * 6, numbers)
        plan = plan_updates(
            6,
            BatchConfig(train_batch_size=2),
            CriticConfig(),
            iteration=1,
            groups_B=responses.groups_B.numpy(),
            num_sampled=6,
        )
        return [step.tolist() for step in plan.actor]

    assert steps_of(7, 6, 8) == steps_of(0, 1, 2)


def test_bounds_of_no_response_are_a_single_zero():
    responses = responses_of([prompt(0)], [generation(1)], [FAILED], [0])
    assert responses.cu.tolist() == [0]
    assert torch.equal(responses.scores_B, torch.zeros(0))


def test_the_share_of_groups_without_spread_leaves_out_failed_scores_and_groups_of_one() -> None:
    scores = [scored(value) for value in (1.0, 1.0, 0.0, 1.0, 2.0)] + [FAILED, scored(3.0)]
    assert zero_std_metrics(scores, [0, 0, 1, 1, 2, 2, 3]) == {"frac_reward_zero_std": 0.5}
    assert zero_std_metrics(scores[:2], [0, 1]) == {}


def test_rewards_are_reported_by_the_source_that_rows_name() -> None:
    def judged(source: str | None, score: Score) -> Sample:
        return sample_of(replace(prompt(0), data_source=source), generation(1), score)

    scores = [scored(1.0, "correct"), scored(0.0, "wrong"), scored(0.5, "wrong")]
    found = source_metrics([judged(*one) for one in zip(("math", "code", "code"), scores, strict=True)])
    assert found == {
        "source/math/reward": 1.0,
        "source/math/accuracy": 1.0,
        "source/code/reward": 0.25,
        "source/code/accuracy": 0.0,
    }
    assert source_metrics([judged("math", scored(1.0)), judged(None, scored(1.0))]) == {}
    assert source_metrics([judged(str(n), scored(1.0)) for n in range(40)]) == {}
