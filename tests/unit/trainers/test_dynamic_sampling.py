"""Dynamic sampling: which groups are kept, and that training data depends neither on timing nor on a resume."""

import dataclasses
import json
from collections import Counter
from collections.abc import Callable

import numpy as np
import pytest
from online_fakes import BATCH, NUM_PROMPTS, PROMPTS, SAMPLES_EACH, WITHOUT_REFERENCE, Run
from samples import sample_of

from rlhf_cli.config.rollout import DynamicSamplingConfig
from rlhf_cli.data.prompts import Prompt
from rlhf_cli.data.rollouts import Branch, Episode, Generation
from rlhf_cli.errors import RunError
from rlhf_cli.models.vision.pictures import PlacedPicture, picture_of_pixels
from rlhf_cli.rewards.records import Score, ScoreRequest
from rlhf_cli.runs.online.group_files import SURPLUS, load_surplus, save_surplus
from rlhf_cli.trainers.offline.loop import Finished
from rlhf_cli.trainers.online.groups import longest_needed, sort_round, usefulness
from rlhf_cli.trainers.online.prompt_source import planned_iterations, prompt_at
from rlhf_cli.trainers.online.samples import Group
from rlhf_cli.trainers.online.state import LoopState

PLAIN = DynamicSamplingConfig(dynamic_filtering=True)
BETWEEN = DynamicSamplingConfig(dynamic_filtering=True, dynamic_filtering_reward_range=(0.25, 0.75))
RIGHT, WRONG, NONE = Score(1.0, "correct"), Score(0.0, "wrong"), Score(0.0, "invalid")
FAILED = Score(None, "failed", "grader broke")


def scored(*values: float) -> list[Score]:
    return [Score(value, "scored") for value in values]


@pytest.mark.parametrize(
    ("scores", "config", "found"),
    [
        ([RIGHT, WRONG], PLAIN, "useful"),
        ([RIGHT, RIGHT], PLAIN, "too_easy"),
        ([WRONG, NONE], PLAIN, "too_hard"),
        # Wrong answers are all wrong, even if another reward differs.
        ([WRONG, dataclasses.replace(WRONG, value=-0.5)], PLAIN, "too_hard"),
        ([RIGHT, dataclasses.replace(WRONG, value=1.0)], PLAIN, "alike"),
        (scored(0.2, 0.2), PLAIN, "alike"),
        (scored(0.2, 0.3), PLAIN, "useful"),
        ([RIGHT, FAILED, RIGHT], PLAIN, "too_easy"),
        ([RIGHT, FAILED], PLAIN, "failed"),
        (scored(0.0, 0.5), BETWEEN, "too_hard"),  # the bounds of the range are excluded
        (scored(0.0, 0.6), BETWEEN, "useful"),
        (scored(0.5, 0.5), BETWEEN, "useful"),
        (scored(0.5, 1.0), BETWEEN, "too_easy"),
    ],
)
def test_what_the_scores_of_a_group_say_of_its_prompt(scores, config, found):
    assert usefulness(scores, config) == found


def group(place: int, *lengths: int, useful: bool = True) -> Group:
    prompt = Prompt([1], "p", "1", "a.jsonl", place)
    answers = [Generation([7] * length, [-0.5] * length, "stop", 0) for length in lengths]
    scores = [RIGHT, *[WRONG if useful else RIGHT] * (len(lengths) - 1)]
    found = enumerate(zip(answers, scores, strict=True))
    return [sample_of(prompt, one, score, group=place, index=n, text="r") for n, (one, score) in found]


def test_the_batch_is_full_at_the_group_that_completes_it_in_the_order_of_the_prompts():
    groups = [group(0, 2, 3), group(1, 9, 1, useful=False), group(2, 4, 1), group(3, 8, 8)]
    assert longest_needed(groups, 2, PLAIN) == 9  # filtered groups also have to be waited for
    assert longest_needed(groups, 1, PLAIN) == 3
    assert longest_needed(groups, 4, PLAIN) is None
    assert longest_needed([groups[0], None, *groups[2:]], 2, PLAIN) is None
    assert longest_needed([*groups[:3], None], 2, PLAIN) == 9


def test_behind_a_full_batch_short_groups_are_surplus_and_longer_or_unfinished_ones_are_asked_again():
    groups = [
        group(10, 2, 5),
        group(12, 1, 1),
        group(13, 6, 1),  # longer than 5: it may or may not have finished
        group(15, 5, 4),
        group(16, 1, 1, useful=False),
        None,
    ]
    found = sort_round([10, 12, 13, 15, 16, 17], groups, missing=1, config=PLAIN)
    assert [one[0].group for one in found.accepted] == [10]
    assert [one[0].group for one in found.surplus] == [12, 15]
    assert found.postponed == [13, 17]
    assert [one[0].group for one in found.judged] == [10, 12, 15, 16]


def test_of_a_round_that_does_not_fill_the_batch_everything_counts():
    found = sort_round([0, 1], [group(0, 9, 9), group(1, 1, 1, useful=False)], missing=2, config=PLAIN)
    assert ([one[0].group for one in found.accepted], found.surplus, found.postponed) == ([0], [], [])


def test_surplus_comes_out_of_a_checkpoint_as_it_went_in(tmp_path):
    scores = [Score(0.1 + 0.2, "scored", "é", {"a": 1 / 3}), FAILED]
    odd = [dataclasses.replace(one, score=score) for one, score in zip(group(3, 2, 1), scores, strict=True)]
    groups = [odd, group(5, 1, 1)]
    save_surplus(tmp_path, groups)
    assert load_surplus(tmp_path, {one[0].group: one[0].prompt for one in groups}.__getitem__) == groups


def test_surplus_keeps_the_experts_of_responses_and_branches(tmp_path):
    (sample,) = group(3, 2)
    experts = np.array([[[1, 300]]], dtype=np.uint16)
    branch = Branch([1], [2], ((0, 1),), routed_experts=experts[:, :, :1])
    response = dataclasses.replace(
        sample.response, routed_experts=experts, episode=Episode(((0, 1),), (1.0,), earlier=(branch,))
    )
    save_surplus(tmp_path, [[dataclasses.replace(sample, response=response)]])
    ((found,),) = load_surplus(tmp_path, lambda place: sample.prompt)
    np.testing.assert_array_equal(found.response.routed_experts, experts, strict=True)
    np.testing.assert_array_equal(found.branches[0].routed_experts, experts[:, :, :1], strict=True)


def test_surplus_gets_the_pictures_of_its_prompt_again_and_no_checkpoint_has_pixels(tmp_path):
    picture = picture_of_pixels("digest", np.zeros((64, 64, 3), dtype=np.uint8))
    plain = group(3, 2, 1)
    prompt = dataclasses.replace(plain[0].prompt, pictures=(PlacedPicture(picture, 0, 1, token=1),))
    carried = [dataclasses.replace(sample, prompt=prompt) for sample in plain]
    save_surplus(tmp_path, [carried])
    assert (tmp_path / SURPLUS).stat().st_size < 500
    assert load_surplus(tmp_path, lambda place: prompt) == [carried]


def even(request: ScoreRequest) -> Score:
    """Score 1 if the sum of the digits is even."""
    return RIGHT if sum(map(int, request.response)) % 2 == 0 else WRONG


def run(*, oversample: float = 3.0, judge: Callable[[ScoreRequest], Score] = even, rounds: int = 8, **settings) -> Run:
    dynamic = DynamicSamplingConfig(dynamic_filtering=True, dynamic_oversample=oversample, dynamic_max_rounds=rounds)
    made = Run(algorithm="rloo", policy=WITHOUT_REFERENCE, dynamic=dynamic, episodes=8, **settings)
    made.scorer.judge = judge  # type: ignore[method-assign, assignment]
    made.engines.longest = 60
    return made


def trained(made: Run) -> list[list[list[int]]]:
    """Return the tokens of each sample of each update."""
    return [[sample.token_ids.tolist() for sample in samples] for samples, _ in made.actor.updates]


def test_every_iteration_trains_on_full_groups_that_differ():
    made = run()
    made(total_iterations=4)
    for _, rows in made.tracker.rows:
        assert len(rows) == 2 * BATCH
        assert all(
            {first["reward"], second["reward"]} == {0.0, 1.0} for first, second in zip(*[iter(rows)] * 2, strict=True)
        )
    for _, metrics in made.tracker.logged:
        assert metrics["accuracy"] == 0.5
        assert ("dynamic/too_easy" in metrics) == (metrics["dynamic/rounds"] > 0)
    assert len(made.engines.requests) > 4 or made.engines.limits  # some prompts were replaced


def test_what_is_trained_on_does_not_depend_on_what_arrives_first():
    runs = []
    orders: list[Callable[[int, Generation], float]] = [
        lambda number, response: number,
        lambda number, response: -number,
        lambda number, response: len(response.token_ids),
        lambda number, response: np.random.default_rng(number).random(),
    ]
    for order in orders:
        made = run()
        made.engines.arrives = order
        made(total_iterations=6)
        runs.append(made)
    assert runs[2].engines.limits  # sorted by length, the batch was full before the last response
    for other in runs[1:]:
        assert trained(other) == trained(runs[0])
        assert other.tracker.logged == runs[0].tracker.logged
        assert other.tracker.rows == runs[0].tracker.rows
        assert other.engines.requests == runs[0].engines.requests
    assert any(metrics["dynamic/carried_in"] for _, metrics in runs[0].tracker.logged)
    assert any(metrics["dynamic/postponed"] for _, metrics in runs[0].tracker.logged)


def test_a_resumed_run_has_the_same_surplus_and_asks_the_same(tmp_path):
    whole, saved = run(), []

    def of_run(place: int) -> Prompt:
        return prompt_at(place, PROMPTS, whole.settings)

    whole(total_iterations=6, save_steps=1)
    carrying = [state for state in whole.saved[:-1] if state.source.surplus and state.source.postponed]
    for state in carrying or [whole.saved[2]]:
        save_surplus(tmp_path, state.source.surplus)
        saved.append(LoopState.of(json.loads(json.dumps(state.plain())), surplus=load_surplus(tmp_path, of_run)))
    assert carrying
    for state in saved:
        again = run()
        again.engines.version = state.iteration  # like the weights that engines receive on a resume
        again(state=state, total_iterations=6)
        assert trained(again) == trained(whole)[state.iteration :]
        assert again.tracker.logged == whole.tracker.logged[state.iteration :]


def test_samples_of_an_earlier_policy_are_corrected_against_the_present_one():
    made = run()
    made(total_iterations=6)
    carried = [metrics["dynamic/carried_in"] for _, metrics in made.tracker.logged]
    assert {0.0} < set(carried)
    for (samples, _), on_policy, number in zip(made.actor.updates, made.actor.on_policy, carried, strict=True):
        assert on_policy == (number == 0)
        assert all(("old_logprobs" in sample.columns) == (number > 0) for sample in samples)


def test_without_oversampling_nothing_is_left_over():
    made = run(oversample=0.0)
    made(total_iterations=4)
    assert not made.engines.limits
    assert all(metrics["dynamic/carried_over"] == 0 for _, metrics in made.tracker.logged)


def test_no_place_in_the_order_of_the_run_is_trained_on_twice_and_training_ends_with_the_prompts():
    made = run()
    made(total_iterations=16, save_steps=1)
    last = made.saved[-1]
    assert last.iteration < 16
    assert last.source.num_taken == NUM_PROMPTS * 8
    asked = sum(metrics["dynamic/prompts"] for _, metrics in made.tracker.logged)
    postponed = sum(metrics["dynamic/postponed"] for _, metrics in made.tracker.logged)
    assert asked == NUM_PROMPTS * 8 + postponed > NUM_PROMPTS * 8
    answers = [tuple(tokens) for step in trained(made) for tokens in step]
    assert len(set(answers)) > 0.9 * len(answers)


@pytest.mark.parametrize(("save_steps", "saved"), [(-1, []), (1, [1]), (5, [1])])
def test_a_run_whose_last_prompts_teach_nothing_ends_as_others_do(save_steps, saved):
    made, evaluated = run(oversample=0.0, rounds=99), []
    made.scorer.judge = lambda request: RIGHT if made.actor.updates else even(request)  # type: ignore[method-assign]
    made.evaluate = lambda iteration, is_last: evaluated.append((iteration, is_last))
    assert made(total_iterations=16, save_steps=save_steps) == Finished(1, interrupted=False)
    assert evaluated == [(0, False), (1, False), (1, True)]
    assert [state.iteration for state in made.saved] == saved
    # Engines that slept have lost their weights, which the last evaluation needs.
    assert made.journal[-4:] == [
        *("engines.sleep", "actor.wake_weights", "engines.receive_weights 1", "actor.sleep"),
    ]


@pytest.mark.parametrize(("prompts", "iterations"), [(6, 16), (7, 19)])
def test_iterations_are_planned_as_if_no_prompt_were_replaced(prompts, iterations):
    settings = run().settings  # eight episodes in sequence, three prompts at a time
    assert planned_iterations(prompts, settings) == iterations
    bounded = settings.rollout.model_copy(update={"max_iterations": 5})
    assert planned_iterations(prompts, dataclasses.replace(settings, rollout=bounded)) == 5


def test_a_prompt_that_two_episodes_ask_in_one_round_has_two_groups():
    made = run()  # the first round needs 6 prompts for 12 samples
    made(total_iterations=1)
    asked = made.scorer.asked[0]
    assert max(Counter(request.prompt for request in asked).values()) > SAMPLES_EACH
    assert max(Counter(request.group for request in asked).values()) == SAMPLES_EACH


def test_a_short_batch_is_trained_on_and_said():
    made = run(oversample=0.0, rounds=1)
    made(total_iterations=1)
    assert len(made.tracker.rows[0][1]) == 4
    (message,) = made.tracker.messages
    assert message.startswith("Iteration 1: 3 prompts in 1 rounds gave 2 of 3 groups (")
    assert message.endswith("dynamic_max_rounds is reached")


def failing(*, limit: float, rounds: int, fails_in: int, fails: int) -> Run:
    """Return a run whose rounds ask three prompts twice without a kept group; the first rewards of some rounds fail."""
    made = run(judge=lambda request: RIGHT, oversample=0.0, rounds=rounds)
    reward = made.settings.reward.model_copy(update={"reward_max_failures": limit})
    made.settings = dataclasses.replace(made.settings, reward=reward)
    made.scorer.fails = lambda index: index < fails and len(made.scorer.asked) <= fails_in
    return made


def test_failures_of_groups_that_were_replaced_are_counted():
    made = run(oversample=0.0)
    made.scorer.fails = lambda index: index < 2 and len(made.scorer.asked) == 1
    reward = made.settings.reward.model_copy(update={"reward_max_failures": 1.0})
    made.settings = dataclasses.replace(made.settings, reward=reward)
    made(total_iterations=2)
    first, second = (metrics for _, metrics in made.tracker.logged)
    assert (first["reward/failed_raised"], first["reward_failed"]) == (2.0, 0.25)
    assert not any(name.startswith("reward/failed") for name in second)


def test_rewards_that_failed_are_a_share_of_those_of_all_rounds():
    # A third of the first round's six, which is a sixth of the iteration's twelve.
    with pytest.raises(RunError, match="no response to train on"):
        failing(limit=2 / 12, rounds=2, fails_in=1, fails=2)()
    with pytest.raises(RunError, match=r"^2 of 6 rewards failed, more than --reward_max_failures 0\.16 allows: grader"):
        failing(limit=0.16, rounds=2, fails_in=1, fails=2)()


@pytest.mark.parametrize(("limit", "num_rounds"), [(0.24, 1), (0.26, 2), (0.99, 4)])
def test_a_run_ends_with_the_round_that_later_ones_cannot_make_up_for(limit, num_rounds):
    made = failing(limit=limit, rounds=4, fails_in=4, fails=6)  # six of at most 24 in each round
    with pytest.raises(RunError, match=rf"^{6 * num_rounds} of {6 * num_rounds} rewards failed"):
        made()
    assert len(made.engines.requests) == num_rounds


def test_an_iteration_without_a_useful_group_is_skipped_with_a_line_and_counted():
    made = run(oversample=0.0, rounds=2)
    made.scorer.judge = lambda request: RIGHT if len(made.tracker.logged) == 1 else even(request)  # type: ignore[method-assign]
    made(total_iterations=3, save_steps=1)
    assert len(made.actor.updates) == 2
    second, third = (metrics for _, metrics in made.tracker.logged[1:])
    assert (second["skipped_iterations"], third["skipped_iterations"]) == (1.0, 1.0)
    assert (second["dynamic/too_easy"], second["num_tokens"]) == (1.0, 0.0)
    assert made.tracker.rows[1] == (2, [])
    (line,) = [message for message in made.tracker.messages if "skipped" in message]
    assert line.startswith(
        "Iteration 2: 6 prompts in 2 rounds gave 0 of 3 groups (100% all right, 0% all wrong, 0% all"
    )
    assert "dynamic_max_rounds is reached, so it is skipped: choose prompts" in line
    assert [LoopState.of(state.plain()).skipped_in_a_row for state in made.saved] == [0, 1, 0]


def test_without_any_useful_group_the_run_stops_and_says_what_the_prompts_were():
    made = run(judge=lambda request: RIGHT, oversample=0.0, rounds=2)
    with pytest.raises(RunError, match="the last 4 iterations had no response to train on"):
        made()
    assert [message.partition(" (")[2][:42] for message in made.tracker.messages[:4]] == [
        "100% all right, 0% all wrong, 0% all alike"
    ] * 4
    with pytest.raises(RunError, match="0% all right, 100% all wrong"):
        run(judge=lambda request: NONE)()
