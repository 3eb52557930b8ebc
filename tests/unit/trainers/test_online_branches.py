"""Episodes with several branches: each episode is counted once, and each token is trained once."""

import json
from dataclasses import asdict

import numpy as np
from online_fakes import EXACT, ONE_STEP, WITH_REFERENCE, FakeModel, Run
from samples import sample_of

from rlhf_cli.algorithms.estimators.gae import ActorCriticPolicyConfig
from rlhf_cli.algorithms.estimators.group import GroupPolicyConfig
from rlhf_cli.algorithms.estimators.table import ESTIMATORS
from rlhf_cli.config.model import ReferenceConfig
from rlhf_cli.config.roles import CriticConfig
from rlhf_cli.config.rollout import RolloutConfig
from rlhf_cli.config.scoring import RewardConfig
from rlhf_cli.config.train import BatchConfig, OptimConfig
from rlhf_cli.data.prompts import Prompt
from rlhf_cli.data.rollouts import Branch, Episode, Generation, GenerationRequest
from rlhf_cli.rewards.parts import NO_REWARD, episode_part
from rlhf_cli.rewards.records import Score
from rlhf_cli.trainers.online.batch import (
    learning_samples,
    plan_over_samples,
    split_last_values,
    with_bootstrap_targets,
)
from rlhf_cli.trainers.online.groups import longest
from rlhf_cli.trainers.online.metrics import episode_metrics
from rlhf_cli.trainers.online.rollout import score_request
from rlhf_cli.trainers.online.sample_rows import episode_columns
from rlhf_cli.trainers.online.samples import Rollout
from rlhf_cli.trainers.online.state import OnlineSettings
from rlhf_cli.trainers.online.update_plan import UpdatePlan

PROMPT = Prompt([7, 8], "?", None, "d", 0)
EARLIER = Branch([5], [1, 2, 90, 3], ((0, 2), (3, 4)), ({"role": "user", "content": "early"},))
BRANCHED = Generation(
    [91, 4, 5],
    [-0.1, -0.2, -0.3, -0.4, -0.5],
    "length",
    0,
    Episode(
        ((1, 3),), (2.0,), ({"role": "user", "content": "late"},), None, [6, 6], earlier=(EARLIER,), num_repeated=1
    ),
)
"""Trains 1, 2 and 3 in the first branch, 4 and 5 in the second."""
PLAIN = Generation([9], [-0.7], "stop", 0)


def settings_of(algorithm: str, reward: RewardConfig = EXACT) -> OnlineSettings:
    kind = ActorCriticPolicyConfig if algorithm == "ppo" else GroupPolicyConfig
    rollout, policy = RolloutConfig(max_new_tokens=9), kind(init_kl_coef=0.0)
    return OnlineSettings(
        estimator=ESTIMATORS[algorithm],
        rollout=rollout,
        reward=reward,
        policy=policy,
        batch=BatchConfig(),
        critic=CriticConfig(),
        reference=ReferenceConfig(),
        optim=OptimConfig(),
    )


def responses_of(*generations: Generation, scores: tuple[float, ...]) -> Rollout:
    found = enumerate(zip(generations, scores, strict=True))
    return Rollout([sample_of(PROMPT, one, Score(score, "scored"), index=n) for n, (one, score) in found])


def test_the_branches_of_an_episode_share_its_advantage_and_its_group_counts_it_once():
    """Scores 3, 1 and 2 in a group have advantages 1, -1 and 0, independent of the number of branches."""
    responses = responses_of(BRANCHED, PLAIN, PLAIN, scores=(3.0, 1.0, 2.0))
    samples, _ = learning_samples(responses, None, settings_of("grpo"), kl_coef=0.0)
    assert [sample.token_ids.tolist() for sample in samples] == [
        [5, 1, 2, 90, 3],
        [6, 6, 91, 4, 5],
        [7, 8, 9],
        [7, 8, 9],
    ]
    assert [sample.loss_mask.astype(int).tolist() for sample in samples[:2]] == [
        [0, 1, 1, 0, 1],
        [0, 0, 0, 1, 1],
    ]
    advantages = [sample.columns["advantages"].round(3).tolist() for sample in samples]
    assert advantages == [[1.0] * 3, [1.0] * 2, [-1.0], [0.0]]
    logprobs = [sample.columns["rollout_logprobs"].round(3).tolist() for sample in samples]
    assert np.allclose(np.concatenate(logprobs[:2]), BRANCHED.logprobs)


def test_the_steps_of_an_update_have_all_branches_of_their_responses():
    responses = responses_of(PLAIN, BRANCHED, PLAIN, scores=(1.0, 2.0, 3.0))
    plan = UpdatePlan([np.array([2, 1]), np.array([0])], [np.array([1, 0, 2])])
    found = plan_over_samples(plan, responses, ActorCriticPolicyConfig())
    assert [step.tolist() for step in found.actor] == [[3, 1, 2], [0]]
    assert [step.tolist() for step in found.critic] == [[1, 2, 0, 3]]


def test_a_critic_values_branches_in_their_order_and_the_end_of_the_last_one():
    """With gamma = lambda = 1 and values 0, a return is the score at the last token plus 8 for the state after it."""
    responses = responses_of(BRANCHED, PLAIN, scores=(2.0, 1.0))
    asked = with_bootstrap_targets(responses)
    assert [sequence.num_trained for sequence in asked] == [3, 3, 1]
    values = [np.zeros(3, np.float32), np.array([0, 0, 8], np.float32), np.zeros(1, np.float32)]
    joined = responses.by_response(values)
    responses.values, responses.bootstrap = split_last_values(joined, responses.truncated_B)
    samples, _ = learning_samples(responses, None, settings_of("ppo"), kl_coef=0.0)
    assert [sample.columns["returns"].tolist() for sample in samples] == [[10.0] * 3, [10.0] * 2, [1.0]]


def test_the_reward_of_a_program_stands_at_the_end_of_its_last_branch():
    reward = RewardConfig(reward_funcs=["environment"])
    responses = responses_of(BRANCHED, scores=(2.0,))
    responses.scores = [Score(2.0, "scored", "", {"environment": 2.0})]
    responses.values, responses.bootstrap = [np.zeros(5, np.float32)], [0.0]
    samples, _ = learning_samples(responses, None, settings_of("ppo", reward), kl_coef=0.0)
    assert [sample.columns["returns"].tolist() for sample in samples] == [[2.0] * 3, [2.0] * 2]


def test_metrics_and_rows_know_all_branches():
    found = episode_metrics([BRANCHED])
    assert found == {
        "episode/turns": 3.0,
        "episode/calls": 0.0,
        "episode/malformed_calls": 0.0,
        "episode/observed_tokens": 2.0,
        "episode/failed": 0.0,
        "episode/truncated": 0.0,
        "episode/branches": 2.0,
        "episode/repeated_requests": 1.0,
    }
    assert episode_columns(BRANCHED)["branches"] == [[{"role": "user", "content": "early"}]]


def test_a_group_is_as_long_as_its_longest_branch():
    """Programs are stopped by their longest branch, so groups must be measured in the same way."""
    group = [sample_of(PROMPT, BRANCHED), sample_of(PROMPT, PLAIN, index=1)]
    assert (longest(group), BRANCHED.longest, PLAIN.longest) == (4, 4, 1)


def test_an_episode_is_the_same_after_a_checkpoint():
    assert BRANCHED.episode is not None
    assert Episode.of(json.loads(json.dumps(asdict(BRANCHED.episode)))) == BRANCHED.episode


def test_a_program_without_a_reward_fails_its_part_alone():
    silent = Generation([1], [-0.1], "stop", 0, Episode(((0, 1),), (), ({"role": "assistant", "content": "x"},)))
    request = score_request(PROMPT, silent, "x", group="0", index=0, size=1)
    part = episode_part(request)
    assert (part.value, part.status, part.detail, part.failure) == (None, "failed", NO_REWARD, "environment")


def test_the_loop_asks_all_models_about_all_branches_and_trains_each():
    """Each response has two branches, and the columns of all models must be assigned to the right sequence."""

    def branched(request: GenerationRequest) -> Generation:
        return BRANCHED

    run = Run(policy=WITH_REFERENCE, batch=ONE_STEP)
    run.engines._answer = branched  # type: ignore[method-assign]
    lengths: list[list[int]] = []
    for model in (run.actor, run.critic, run.reference):
        assert isinstance(model, FakeModel)
        inner = model.logprobs

        def logprobs(sequences, inner=inner):
            lengths.append([sequence.num_trained for sequence in sequences])
            return inner(sequences)

        model.logprobs = logprobs  # type: ignore[method-assign]
    run(total_iterations=1)
    (update,) = run.actor.updates
    samples, steps = update
    assert sorted(steps[0]) == list(range(12))
    assert lengths
    assert all(one == [3, 2] * 6 for one in lengths)
    for sample in samples:
        assert {len(values) for values in sample.columns.values()} == {sample.num_trained}


def test_observations_are_targets_of_the_actor_alone():
    run = Run(policy=WITH_REFERENCE.model_copy(update={"observation_nll_coef": 0.1}), batch=ONE_STEP)
    run.engines._answer = lambda request: BRANCHED  # type: ignore[method-assign]
    run(total_iterations=1)
    ((trained, _),), ((valued, _),) = run.actor.updates, run.critic.updates
    assert [sample.columns["observed"].tolist() for sample in trained] == [[0, 0, 1, 0], [0, 0]] * 6
    assert [sample.num_trained for sample in valued] == [3, 2] * 6
    assert all("observed" not in sample.columns for sample in valued)


def test_turns_of_branches_follow_the_conversation_of_their_branch():
    found = list(sample_of(PROMPT, BRANCHED).observed_turns)
    assert [length for length, _ in found] == [2, 1, 2]
    assert [np.frombuffer(seen, np.int32).tolist() for _, seen in found] == [[5], [90], [6, 6, 91]]
    assert list(sample_of(PROMPT, PLAIN).observed_turns) == [(1, np.array([7, 8], np.int32).tobytes())]
