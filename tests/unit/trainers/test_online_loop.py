"""The online loop with fakes: order and arguments of calls, and resumed runs."""

import dataclasses
import gc
import json
import weakref
from collections.abc import Callable

import numpy as np
import pytest
from online_fakes import (
    BATCH,
    NUM_PROMPTS,
    ONE_STEP,
    SAMPLES_EACH,
    WITH_REFERENCE,
    WITHOUT_REFERENCE,
    FakeTracker,
    Run,
)

from rlhf_cli.algorithms.entropy import EntropyState
from rlhf_cli.algorithms.estimators.gae import ActorCriticPolicyConfig
from rlhf_cli.algorithms.estimators.group import GroupPolicyConfig
from rlhf_cli.config.model import ReferenceConfig
from rlhf_cli.config.policy import PolicyConfig
from rlhf_cli.config.roles import CriticConfig, KLTerm
from rlhf_cli.config.rollout import RolloutConfig
from rlhf_cli.config.scoring import RewardConfig
from rlhf_cli.config.train import BatchConfig, OptimConfig
from rlhf_cli.data.rollouts import SamplingParams, scattered_seed
from rlhf_cli.errors import ProcessDied, RunError
from rlhf_cli.trainers.offline.loop import Finished
from rlhf_cli.trainers.online.state import LoopState, SourceState
from rlhf_cli.trainers.online.update_plan import StepCounts, count_steps

TWO_STEPS = BatchConfig(train_batch_size=BATCH * SAMPLES_EACH, max_epochs=2)
WITH_REWARD_MODEL = RewardConfig(reward_funcs=["exact"], reward_pretrain="rm", reward_model_weight=0.5)


def test_one_role_computes_after_the_other():
    run = Run(policy=WITH_REFERENCE, batch=TWO_STEPS)
    run(total_iterations=1)
    assert run.journal == [
        *("engines.wake_cache", "engines.generate", "engines.sleep"),
        "scorer.score",
        *("ref.logprobs", "actor.logprobs", "critic.values", "critic.update"),
        # The weights are not moved until the engines have received them.
        *("actor.update", "engines.receive_weights 1", "actor.sleep"),
    ]


class _Cycle:
    def __init__(self) -> None:
        self.itself = self


def test_cycles_of_an_iteration_are_freed_at_its_end_without_the_collector(monkeypatch):
    run, held = Run(), []
    update = run.actor.update

    def keep_and_update(*args, **named):
        held.append(weakref.ref(_Cycle()))
        return update(*args, **named)

    monkeypatch.setattr(run.actor, "update", keep_and_update)
    gc.disable()
    try:
        run(total_iterations=2)
    finally:
        gc.enable()
    assert [one() for one in held] == [None, None]


def test_a_reward_model_is_awake_between_the_other_rewards_and_the_first_forward_pass():
    run = Run(reward=WITH_REWARD_MODEL)
    run(total_iterations=1)
    assert run.journal[2:6] == ["engines.sleep", "scorer.score", "reward.scores", "critic.values"]


def test_steps_are_rewards_of_tokens_in_the_returns_of_a_critic():
    policy = ActorCriticPolicyConfig(init_kl_coef=0.0, gamma=1.0, lambd=1.0)
    plain, stepped = Run(policy=policy), Run(policy=policy, step_weight=0.5)
    for run in (plain, stepped):
        run(total_iterations=1)
    for before, after in zip(plain.critic.updates[0][0], stepped.critic.updates[0][0], strict=True):
        ids = after.token_ids[after.loss_mask]
        later = np.cumsum(ids[::-1])[::-1] / 10  # the fake finds a step at every token
        np.testing.assert_allclose(after.columns["returns"] - before.columns["returns"], 0.5 * later, rtol=1e-5)
    assert stepped.journal[3:5] == ["scorer.score", "steps.rewards"]
    assert stepped.tracker.logged[0][1]["num_steps"] == plain.tracker.logged[0][1]["response_length"]


def test_steps_move_the_advantages_of_a_group_and_not_the_reward():
    policy = GroupPolicyConfig(init_kl_coef=0.0)
    plain, stepped = Run(policy=policy, algorithm="grpo"), Run(policy=policy, algorithm="grpo", step_weight=0.5)
    for run in (plain, stepped):
        run(total_iterations=1)
    assert plain.tracker.logged[0][1]["reward"] == stepped.tracker.logged[0][1]["reward"]
    pairs = zip(plain.actor.updates[0][0], stepped.actor.updates[0][0], strict=True)
    assert any(not np.array_equal(a.columns["advantages"], b.columns["advantages"]) for a, b in pairs)
    assert len({value for sample in stepped.actor.updates[0][0] for value in sample.columns["advantages"]}) > 6


def test_a_reward_model_adds_its_weighted_score_of_prompt_and_response_and_is_logged_apart():
    run = Run(reward=WITH_REWARD_MODEL)
    run(total_iterations=1)
    metrics, rows = run.tracker.logged[0][1], run.tracker.rows[0][1]
    last_tokens = [float(row["response"][-1]) for row in rows]  # the fake decoder writes one digit per token
    assert [row["reward/reward_model"] for row in rows] == last_tokens
    lengths = [row["length"] for row in rows]
    assert [row["reward"] for row in rows] == [n + 0.5 * last for n, last in zip(lengths, last_tokens, strict=True)]
    assert metrics["reward/reward_model"] == pytest.approx(np.mean(last_tokens))
    samples, _ = run.critic.updates[0]  # with gamma = lambda = 1 a return is the score
    assert [sample.columns["returns"][-1] for sample in samples] == [row["reward"] for row in rows]


def test_phases_follow_each_other_and_do_not_overlap():
    run = Run()
    run(total_iterations=1)
    names = ["generate", "reward", "reward", "forward", "advantage", "train", "transfer"]
    assert run.tracker.phases == [name for phase in names for name in (phase, None)]


@pytest.mark.parametrize(
    ("policy", "batch", "computed", "on_policy"),
    [
        (WITHOUT_REFERENCE, ONE_STEP, False, True),
        (WITHOUT_REFERENCE, TWO_STEPS, True, False),
        (WITHOUT_REFERENCE, BatchConfig(train_batch_size=3), True, False),
        (WITH_REFERENCE, ONE_STEP, True, True),  # needed for the KL divergence
    ],
)
def test_old_logprobs_are_computed_only_where_they_count(policy, batch, computed, on_policy):
    run = Run(policy=policy, batch=batch)
    run(total_iterations=1)
    assert ("actor.logprobs" in run.journal) == computed
    assert run.actor.on_policy == [on_policy]
    samples, _ = run.actor.updates[0]
    assert all(("old_logprobs" in sample.columns) == computed for sample in samples)


def test_exactly_the_sampled_tokens_are_trained_with_the_samplers_logprobs():
    run = Run()
    run(total_iterations=1)
    answers = [run.engines._answer(request) for request in run.engines.requests[0]]
    samples, _ = run.actor.updates[0]
    for request, answer, sample in zip(run.engines.requests[0], answers, samples, strict=True):
        assert sample.token_ids.tolist() == request.prompt_ids + answer.token_ids
        assert sample.loss_mask.tolist() == [False] * 2 + [True] * len(answer.token_ids)
        assert sample.columns["rollout_logprobs"].tolist() == answer.logprobs


def test_rewards_see_the_decoded_text_of_prompt_and_response():
    run = Run()
    run(total_iterations=1)
    request, answer = run.engines.requests[0][0], run.tracker.rows[0][1][0]
    number = request.prompt_ids[0] - 20
    assert run.scorer.asked[0][0].query == f"prompt {number}: {answer['response']}"
    assert (run.scorer.asked[0][0].label, answer["reward"]) == (str(number), len(answer["response"]))


def test_sampling_follows_the_settings():
    run = Run()
    run(total_iterations=1)
    assert run.engines.sampling == [SamplingParams(max_new_tokens=4, temperature=1.0, top_p=1.0)]


def test_every_sampling_setting_of_a_rollout_reaches_the_engines():
    rollout = RolloutConfig(temperature=0.7, top_p=0.9, top_k=20, min_p=0.05, stop=["x"])
    settings = dataclasses.replace(Run().settings, rollout=rollout)
    assert settings.sampling == SamplingParams(1024, temperature=0.7, top_p=0.9, top_k=20, min_p=0.05, stop=("x",))


def test_every_prompt_is_asked_once_an_episode_and_its_samples_are_neighbours():
    run = Run()
    run()
    prompts = [[request.prompt_ids[0] - 20 for request in requests] for requests in run.engines.requests]
    assert all(numbers[0::2] == numbers[1::2] for numbers in prompts)
    assert sorted(prompts[0] + prompts[1]) == sorted(prompts[2] + prompts[3]) == sorted([*range(NUM_PROMPTS)] * 2)
    assert prompts[:2] != prompts[2:]  # the second epoch has a different order


def test_failed_rewards_are_left_out_of_both_updates():
    run = Run(fails=lambda index: index in (1, 4))
    run(total_iterations=1)
    kept = [request.prompt_ids for i, request in enumerate(run.engines.requests[0]) if i not in (1, 4)]
    for model in (run.actor, run.critic):
        samples, steps = model.updates[0]
        assert [sample.token_ids[:2].tolist() for sample in samples] == kept
        assert sorted(steps[0]) == [0, 1, 2, 3]
    metrics, rows = run.tracker.logged[0][1], run.tracker.rows[0][1]
    assert metrics["reward_failed"] == pytest.approx(2 / 6)
    assert metrics["reward"] == pytest.approx(np.mean([row["reward"] for row in rows if row["reward"] is not None]))
    assert [row["verdict"] for row in rows].count("failed") == 2


def test_failures_of_graders_and_of_the_reward_model_count_together():
    def run(limit: float) -> Run:
        reward = WITH_REWARD_MODEL.model_copy(update={"reward_max_failures": limit})
        made = Run(reward=reward, fails=lambda index: index in (0, 1))
        assert made.reward_model is not None
        made.reward_model.scores = lambda sequences: [1.0, np.nan, np.nan, 1.0, 1.0, 1.0]  # type: ignore[method-assign]
        return made

    enough = run(0.5)
    enough(total_iterations=1)
    metrics = enough.tracker.logged[0][1]
    assert (metrics["reward/failed_raised"], metrics["reward/failed_bad_result"]) == (2.0, 1.0)
    assert metrics["reward_failed"] == 0.5
    with pytest.raises(
        RunError, match=r"^3 of 6 rewards failed, more than --reward_max_failures 0\.49 allows: grader b"
    ):
        run(0.49)(total_iterations=1)


def test_clipping_that_makes_all_scores_equal_is_reported():
    def run(**settings: object) -> Run:
        made = Run(reward=RewardConfig(reward_funcs=["exact"], **settings))  # type: ignore[arg-type]
        made(total_iterations=1)
        return made

    clipped = run(reward_clip_range=(-2.0, 0.5))
    assert clipped.tracker.logged[0][1]["reward_clipped"] == 1.0
    expected = "Iteration 1: --reward_clip_range -2 0.5 makes all compared scores equal (unclipped: 1 to 4)"
    assert clipped.tracker.messages[0].startswith(expected)
    assert not run(reward_clip_range=(0.0, 3.0)).tracker.messages
    assert "reward_clipped" not in run().tracker.logged[0][1]


def test_an_iteration_whose_rewards_all_failed_ends_the_run_before_anything_is_trained():
    run = Run(fails=lambda index: True)
    with pytest.raises(RunError, match=r"iteration 1: every reward failed \(grader broke\)"):
        run()
    assert run.journal[-1] == "scorer.score"


def test_what_was_trained_before_an_iteration_without_rewards_is_saved():
    run = Run()
    run.scorer.fails = lambda index: len(run.tracker.logged) == 2
    with pytest.raises(RunError, match=r"iteration 3: every reward failed"):
        run()
    assert [state.iteration for state in run.saved] == [2]
    assert run.tracker.messages == ["Saved iteration 2; resume with --load_checkpoint"]
    run.scorer.fails = lambda index: False
    run(state=run.saved[0])
    whole = Run()
    whole()
    assert run.tracker.rows == whole.tracker.rows


@pytest.mark.parametrize("role", ["actor", "critic"])
def test_too_many_skipped_steps_end_the_run_after_their_iteration_which_is_saved(role):
    run = Run(batch=TWO_STEPS, optim=OptimConfig(max_skipped_steps=2))
    run.evaluate = lambda iteration, is_last: run.journal.append(f"evaluate {iteration}")
    getattr(run, role).found = {"skipped_in_a_row": 2.0}
    run(total_iterations=1)  # as many as allowed
    getattr(run, role).found = {"skipped_in_a_row": 3.0}
    message = r"in 3 optimizer steps in a row \(--max_skipped_steps 2\).* iteration 2 is saved"
    with pytest.raises(RunError, match=message):
        run(state=LoopState(1, 0.0, 0.0, source=SourceState(1)))
    assert [state.iteration for state in run.saved] == [2]
    assert [step for step, _ in run.tracker.logged] == [1, 2]
    assert run.journal[-3:] == ["engines.receive_weights 2", "actor.sleep", "engines.sleep"]


def test_nothing_is_saved_twice_or_of_roles_that_died():
    for save_steps, error in ((1, RunError("too many rewards failed")), (-1, ProcessDied("engine 0 died"))):
        run = Run()
        run.scorer.fails = raise_later(run.tracker, error)
        with pytest.raises(RunError, match=error.args[0]):
            run(save_steps=save_steps)
        assert len(run.saved) == (2 if save_steps == 1 else 0)


def raise_later(tracker: FakeTracker, error: RunError) -> Callable[[int], bool]:
    """Return a grader that fails in the third iteration."""

    def fails(index: int) -> bool:
        if len(tracker.logged) == 2:
            raise error
        return False

    return fails


def test_the_adaptive_coefficient_follows_the_measured_divergence():
    run = Run(policy=ActorCriticPolicyConfig(init_kl_coef=0.1, kl_target=0.5, kl_horizon=100))
    run(total_iterations=2, save_steps=1)
    # The actor is at -1 and the reference at -1.25: 0.25 nats per token, summed over each response.
    lengths = [row["length"] for row in run.tracker.rows[0][1]]
    kl = 0.25 * float(np.mean(lengths))
    assert run.tracker.logged[0][1]["kl"] == pytest.approx(kl)
    error = min(max(kl / 0.5 - 1, -0.2), 0.2)
    assert error != 0
    assert run.saved[0].kl_coef == pytest.approx(0.1 * (1 + error * 6 / 100))
    assert [metrics["kl_coef"] for _, metrics in run.tracker.logged] == pytest.approx([0.1, run.saved[0].kl_coef])


def test_a_coefficient_without_target_is_fixed():
    run = Run(policy=WITH_REFERENCE)
    run(save_steps=1)
    assert {state.kl_coef for state in run.saved} == {0.1}


def test_the_weight_of_the_entropy_follows_every_step_and_goes_on_after_a_resume():
    policy = ActorCriticPolicyConfig(init_kl_coef=0.0, entropy_target=0.2, entropy_delta=1e-3)
    run = Run(policy=policy, batch=TWO_STEPS)
    run(total_iterations=2, save_steps=1)  # the fake actor always measures 0.1 nats
    assert [metrics["entropy_coef"] for _, metrics in run.tracker.logged] == pytest.approx([0.0, 2e-3])
    assert [weights.entropy.coef for weights in run.actor.weights if weights] == pytest.approx([0.0, 2e-3])
    again = Run(policy=policy, batch=TWO_STEPS)
    again(state=LoopState.of(json.loads(json.dumps(run.saved[0].plain()))), total_iterations=2)
    assert again.actor.weights == run.actor.weights[1:]
    above = Run(policy=policy, batch=ONE_STEP)
    above.actor.found = {"entropy": 0.3}
    above(total_iterations=1, save_steps=1)
    assert above.saved[0].weights(above.settings).entropy == EntropyState(0.0, applied=False)


@pytest.mark.parametrize("batch", [ONE_STEP, TWO_STEPS])
def test_a_divergence_in_the_loss_is_measured_there_and_steers_the_coefficient(batch):
    policy = PolicyConfig(init_kl_coef=0.1, use_kl_loss=True, kl_estimator="k3", kl_target=0.5, kl_horizon=100)
    run = Run(policy=policy, batch=batch, algorithm="rloo")
    run.actor.found = {"kl": 5.0}
    run(total_iterations=1, save_steps=1)
    # The reference is needed; the actor only where its anchor is.
    assert ("actor.logprobs" in run.journal) == (batch is TWO_STEPS)
    samples, _ = run.actor.updates[0]
    assert all((sample.columns["ref_logprobs"] == -1.25).all() for sample in samples)
    assert [weights.kl for weights in run.actor.weights if weights] == [{"ref": KLTerm(0.1, "k3")}]
    assert run.saved[0].kl_coef == pytest.approx(0.1 * (1 + 0.2 * 6 / 100))
    assert run.tracker.logged[0][1]["kl_coef"] == 0.1
    # Rewards are lengths, so only the difference to the other response of the prompt remains.
    lengths = [row["length"] for row in run.tracker.rows[0][1]]
    leads = [lengths[i] - lengths[i ^ 1] for i in range(6)]
    assert [sample.columns["advantages"][0] for sample in samples] == leads


def test_without_a_critic_none_is_asked_for_anything():
    run = Run(algorithm="rloo")
    run(total_iterations=1)
    assert run.journal == [
        *("engines.wake_cache", "engines.generate", "engines.sleep", "scorer.score"),
        *("actor.update", "engines.receive_weights 1", "actor.sleep"),
    ]
    assert run.actor.on_policy == [True]


def test_greedy_responses_are_scored_with_the_others_and_not_trained_on():
    run = Run(algorithm="remax", reward=WITH_REWARD_MODEL)
    run(total_iterations=1)
    assert run.journal[:4] == ["engines.wake_cache", "engines.generate", "engines.generate", "engines.sleep"]
    assert [sampling.greedy for sampling in run.engines.sampling] == [False, True]
    sampled, greedy = run.engines.requests
    assert [request.prompt_ids for request in greedy] == [request.prompt_ids for request in sampled[::2]]
    (asked,) = run.scorer.asked
    assert [request.group_size for request in asked] == [SAMPLES_EACH] * 6 + [1] * 3
    assert len({request.group for request in asked}) == 3 + 3  # greedy responses are not part of a group
    samples, steps = run.actor.updates[0]
    assert [sample.token_ids[:2].tolist() for sample in samples] == [r.prompt_ids for r in sampled]
    assert sorted(index for step in steps for index in step) == [0, 1, 2, 3, 4, 5]
    metrics, rows = run.tracker.logged[0][1], run.tracker.rows[0][1]
    assert len(rows) == 6
    answers = [run.engines._answer(request) for request in greedy]
    baselines = [len(answer.token_ids) + 0.5 * answer.token_ids[-1] for answer in answers]
    assert metrics["greedy_reward"] == pytest.approx(np.mean(baselines))
    assert metrics["reward"] == pytest.approx(np.mean([row["reward"] for row in rows]))
    expected = [row["reward"] - baselines[i // 2] for i, row in enumerate(rows)]
    assert [sample.columns["advantages"][0] for sample in samples] == pytest.approx(expected)


def test_responses_to_a_prompt_whose_greedy_one_has_no_score_are_left_out():
    run = Run(algorithm="remax", fails=lambda index: index == 7)  # the greedy response to the second prompt
    run(total_iterations=1)
    samples, _ = run.actor.updates[0]
    kept = [request.prompt_ids for i, request in enumerate(run.engines.requests[0]) if i not in (2, 3)]
    assert [sample.token_ids[:2].tolist() for sample in samples] == kept
    with pytest.raises(RunError, match=r"every reward failed \(grader broke\)"):
        Run(algorithm="remax", fails=lambda index: index >= 6)()


def test_cut_responses_are_left_out_of_both_updates_where_that_is_asked_for():
    run = Run(policy=ActorCriticPolicyConfig(init_kl_coef=0.0, mask_truncated=True))
    run(total_iterations=1)
    rows = run.tracker.rows[0][1]
    whole = [row["length"] for row in rows if row["finish_reason"] == "stop"]
    assert 0 < len(whole) < 6
    for model in (run.actor, run.critic):
        samples, steps = model.updates[0]
        assert [sample.num_trained for sample in samples] == whole
        assert sorted(steps[0]) == list(range(len(whole)))
    assert run.tracker.logged[0][1]["reward"] == pytest.approx(np.mean([row["reward"] for row in rows]))


MASKED = ActorCriticPolicyConfig(init_kl_coef=0.0, mask_truncated=True)


def truncated_in(run: Run, iterations: range) -> Run:
    """Truncate all responses of these iterations and no others."""
    answer = run.engines._answer

    def truncated(request: object) -> object:
        is_truncated = len(run.engines.requests) in iterations
        return dataclasses.replace(answer(request), finish_reason="length" if is_truncated else "stop")  # type: ignore[arg-type]

    run.engines._answer = truncated  # type: ignore[assignment,method-assign]
    return run


def test_an_iteration_whose_responses_are_all_truncated_is_skipped_and_counted():
    run = truncated_in(Run(policy=MASKED), range(2, 4))
    run(save_steps=1)
    skipped = "is skipped: all scored responses were truncated and excluded by mask_truncated; raise max_new"
    assert [message[: len(skipped) + 12] for message in run.tracker.messages] == [
        f"Iteration 2 {skipped}",
        f"Iteration 3 {skipped}",
    ]
    assert len(run.actor.updates) == len(run.critic.updates) == 2
    assert [number for number, _ in run.tracker.logged] == [1, 2, 3, 4]
    metrics = [metrics for _, metrics in run.tracker.logged]
    assert [one.get("skipped_iterations") for one in metrics] == [None, 1.0, 2.0, 2.0]
    assert metrics[1]["truncated"] == 1.0
    assert "loss" not in metrics[1]
    assert [state.skipped_in_a_row for state in run.saved] == [0, 1, 2, 0]
    # Engines that slept have lost their weights and receive them again.
    third = run.journal.index("engines.receive_weights 2")
    assert run.journal[third - 1 : third + 2] == ["actor.wake_weights", "engines.receive_weights 2", "actor.sleep"]


def test_too_many_skipped_iterations_end_the_run_which_is_saved():
    run = truncated_in(Run(policy=MASKED, optim=OptimConfig(max_skipped_steps=1)), range(2, 9))
    with pytest.raises(RunError, match=r"the last 2 iterations had no response to train on \(--max_skipped_steps 1\)"):
        run()
    assert [state.iteration for state in run.saved] == [3]
    assert run.tracker.messages[-1] == "Saved iteration 3; resume with --load_checkpoint"
    assert LoopState.of(run.saved[0].plain()).skipped_in_a_row == 2


def test_a_run_that_has_trained_on_nothing_does_not_end_well():
    run = truncated_in(Run(policy=MASKED), range(9))
    with pytest.raises(RunError, match=r"the last 4 iterations had no response to train on.*raise max_new_tokens"):
        run()
    assert [state.iteration for state in run.saved] == [4]


def test_metrics_of_several_steps_are_means_and_maxima():
    run = Run(batch=BatchConfig(train_batch_size=2))
    run(total_iterations=1)
    metrics = run.tracker.logged[0][1]
    assert (metrics["loss"], metrics["ratio_max"]) == (1.0, 10.0)  # of 0, 1, 2 and 10, 9, 8
    assert (metrics["critic/loss"], metrics["weight_version"]) == (1.0, 1.0)
    assert metrics["num_tokens"] == sum(len(sample) for sample in run.actor.updates[0][0])


def test_every_step_of_every_epoch_has_its_own_samples():
    run = Run(batch=BatchConfig(train_batch_size=2, max_epochs=3))
    run(total_iterations=2)
    orders = []
    for _, steps in run.actor.updates:
        assert [len(step) for step in steps] == [2] * 9
        epochs = [[*steps[i], *steps[i + 1], *steps[i + 2]] for i in (0, 3, 6)]
        assert all(sorted(epoch) == [0, 1, 2, 3, 4, 5] for epoch in epochs)
        orders += epochs
    assert len({tuple(order) for order in orders}) == 6
    assert [steps for _, steps in run.critic.updates] == [steps for _, steps in run.actor.updates]


def test_the_critic_has_as_many_steps_as_it_is_given_and_the_actor_keeps_its_own():
    run = Run(batch=BatchConfig(train_batch_size=6, max_epochs=2), critic=CriticConfig(critic_update_steps=4))
    run(total_iterations=1)
    (_, actor), (_, critic) = run.actor.updates[0], run.critic.updates[0]
    assert [len(step) for step in actor] == [6, 6]
    assert [len(step) for step in critic] == [2, 2, 1, 1] * 2  # equal sizes if divisible
    assert [[i for step in half for i in step] for half in (critic[:4], critic[4:])] == actor


def test_more_steps_of_the_critic_than_responses_have_one_each():
    critic = CriticConfig(critic_update_steps=12)
    run = Run(batch=BatchConfig(train_batch_size=6), critic=critic, fails=lambda index: index < 2)
    run(total_iterations=1)
    assert [len(step) for step in run.critic.updates[0][1]] == [1, 1, 1, 1]


def test_the_critic_is_trained_alone_at_first_and_the_engines_get_the_same_weights_again():
    run = Run(batch=BatchConfig(train_batch_size=6), critic=CriticConfig(freezing_actor_steps=2))
    run(total_iterations=3)
    assert (len(run.critic.updates), len(run.actor.updates)) == (3, 1)
    assert [call for call in run.journal if call.startswith("engines.receive")] == [
        f"engines.receive_weights {iteration}" for iteration in (1, 2, 3)
    ]  # the engines that slept have lost their weights
    assert "loss" not in run.tracker.logged[0][1]
    assert "critic/loss" in run.tracker.logged[0][1]


def test_steps_of_a_whole_run_are_counted_for_both():
    batch, critic = BatchConfig(train_batch_size=128 * 64), CriticConfig(critic_update_steps=12, freezing_actor_steps=3)
    assert count_steps(128 * 64, batch, critic, iterations=10) == StepCounts(actor=7, critic=120)
    assert count_steps(128 * 64, batch, critic, iterations=3).actor == 0
    batch = BatchConfig(train_batch_size=4, max_epochs=2)
    assert count_steps(10, batch, CriticConfig(), iterations=5) == StepCounts(30, 30)


def test_the_reference_moves_when_it_is_due_and_the_actor_rests():
    run = Run(policy=WITH_REFERENCE, reference=ReferenceConfig(ref_sync_steps=2), episodes=3)
    run(total_iterations=5)
    moves = [number for number, call in enumerate(run.journal) if call == "ref.move"]
    assert [run.journal[number - 2 : number + 1] for number in moves] == [
        [f"engines.receive_weights {iteration}", "actor.sleep", "ref.move"] for iteration in (2, 4)
    ]


def test_the_critic_is_asked_for_the_last_state_of_cut_responses_alone():
    plain, run = Run(), Run(critic=CriticConfig(bootstrap_truncated=True))
    plain(total_iterations=1)
    run(total_iterations=1)
    cut = [row["finish_reason"] == "length" for row in run.tracker.rows[0][1]]
    assert any(cut)
    assert not all(cut)
    for is_cut, before, sample in zip(cut, plain.critic.updates[0][0], run.critic.updates[0][0], strict=True):
        # The fake critic returns 0, .1, .2, .3 and .4 for the state after four tokens; gamma = lambda = 1.
        more = 0.4 if is_cut else 0.0
        assert sample.columns["returns"].tolist() == pytest.approx((before.columns["returns"] + more).tolist())
        assert sample.num_trained == len(sample.columns["old_values"])


def test_a_prompt_is_expected_to_get_responses_as_long_as_last_time_or_as_those_of_its_source():
    run = Run(stop_after=3)
    run()
    asked = [
        [(request.prompt_ids[0] - 20, request.expected_tokens) for request in batch] for batch in run.engines.requests
    ]
    lengths = [[row["length"] for row in rows] for _, rows in run.tracker.rows]
    own = {
        prompt: round(np.mean(lengths[i][j : j + 2]))
        for i in (0, 1)
        for j, (prompt, _) in enumerate(asked[i])
        if j % 2 == 0
    }
    assert {expected for _, expected in asked[0]} == {0}
    assert {expected for _, expected in asked[1]} == {round(np.mean(lengths[0]))}  # never asked before
    assert asked[2] == [(prompt, own[prompt]) for prompt, _ in asked[2]]
    assert len(set(own.values())) > 1
    assert sum(len(of_source) for of_source in run.saved[-1].source.prompt_lengths.values()) == NUM_PROMPTS


def test_a_run_of_one_episode_keeps_no_lengths_of_prompts():
    run = Run(episodes=1, stop_after=1)
    run()
    assert run.saved[-1].source.lengths
    assert not run.saved[-1].source.prompt_lengths


def test_no_two_requests_of_a_run_share_a_seed():
    seeds = {scattered_seed(42, place * 8 + sample) for place in range(200 * 128) for sample in range(8)}
    assert len(seeds) == 200 * 1024
    assert min(seeds) >= 0
    assert max(seeds) < 2**31


def test_runs_of_other_seeds_ask_with_other_seeds():
    first, second = Run(), Run(batch=BatchConfig(train_batch_size=6, seed=43))
    first(total_iterations=1)
    second(total_iterations=1)
    seeds = [{request.seed for request in run.engines.requests[0]} for run in (first, second)]
    assert not seeds[0] & seeds[1]


def test_the_rollout_seed_changes_seeds_but_no_prompts():
    first, second = Run(), Run()
    rollout = second.settings.rollout.model_copy(update={"rollout_seed": 43})
    second.settings = dataclasses.replace(second.settings, rollout=rollout)
    first(total_iterations=1)
    second(total_iterations=1)
    requests = [run.engines.requests[0] for run in (first, second)]
    assert [one.prompt_ids for one in requests[0]] == [one.prompt_ids for one in requests[1]]
    assert not {one.seed for one in requests[0]} & {one.seed for one in requests[1]}


def test_a_stop_saves_after_the_iteration_and_ends():
    run = Run(stop_after=2)
    assert run() == Finished(2, interrupted=True)
    assert [state.iteration for state in run.saved] == [2]
    assert run.journal[-1] == "actor.sleep"


def test_a_stop_in_the_last_iteration_is_the_end():
    run = Run(stop_after=4)
    assert run() == Finished(4, interrupted=False)
    assert run.saved == []


def test_a_stop_in_an_iteration_that_is_saved_anyway_saves_once():
    run = Run(stop_after=2)
    run(save_steps=2)
    assert [state.iteration for state in run.saved] == [2]


@pytest.mark.parametrize(("save_steps", "saved"), [(-1, []), (1, [1, 2, 3, 4]), (3, [3, 4]), (9, [4])])
def test_checkpoints_are_written_when_due_and_at_the_end(save_steps, saved):
    run = Run()
    run(save_steps=save_steps)
    assert [state.iteration for state in run.saved] == saved


@pytest.mark.parametrize("policy", [WITHOUT_REFERENCE, ActorCriticPolicyConfig(init_kl_coef=0.1, kl_target=0.5)])
def test_a_resumed_run_repeats_requests_steps_and_coefficients(policy):
    whole, first = Run(policy=policy, batch=TWO_STEPS), Run(policy=policy, batch=TWO_STEPS, stop_after=2)
    whole()
    first()
    state = LoopState.of(json.loads(json.dumps(first.saved[-1].plain())))  # as in a checkpoint
    second = Run(policy=policy, batch=TWO_STEPS)
    second(state=state)
    assert first.engines.requests + second.engines.requests == whole.engines.requests
    assert [steps for run in (first, second) for _, steps in run.actor.updates] == [
        steps for _, steps in whole.actor.updates
    ]
    both = first.tracker.logged + second.tracker.logged
    assert both == whole.tracker.logged
    assert second.journal[-2] == "engines.receive_weights 4"


def test_a_finished_run_that_is_resumed_does_nothing():
    run = Run()
    assert run(state=LoopState(4, 0.0, 0.0)) == Finished(4, interrupted=False)
    assert run.journal == []


def test_after_a_failure_no_role_is_asked_for_anything():
    """Ranks that wait for a dead one would never answer, and the run would hang."""
    run = Run()
    run.critic.error = RunError("critic rank 0 died")
    with pytest.raises(RunError, match="critic rank 0 died"):
        run()
    assert run.journal[-1] == "critic.update"
