"""Prompts drawn by the variance of their rewards: weights, metrics, and runs that repeat after a resume."""

import dataclasses
import json
from collections import Counter
from collections.abc import Sequence

import numpy as np
import pytest
from online_fakes import NUM_PROMPTS, SAMPLES_EACH, Run

from rlhf_cli.rewards.records import Score, ScoreRequest
from rlhf_cli.trainers.online.curriculum import (
    FLOOR,
    curriculum_metrics,
    draw_prompts,
    reward_variance,
    variances_after,
)
from rlhf_cli.trainers.online.state import LoopState

FAILED = Score(None, "failed", "grader broke")
PROMPTS = ("0", "1", "2", "3")


@pytest.mark.parametrize(
    ("scores", "expected"),
    [
        ([Score(1.0, "correct"), Score(0.0, "wrong")], 0.25),
        ([Score(1.0, "correct"), Score(1.0, "correct"), Score(1.0, "correct"), Score(0.0, "wrong")], 0.1875),
        ([Score(2.0, "scored"), Score(2.0, "scored"), FAILED], 0.0),
        ([Score(2.0, "scored", filter=1.0), Score(2.0, "scored", filter=0.0)], 0.25),
        ([Score(1.0, "scored"), FAILED], None),
    ],
)
def test_variances_of_groups(scores, expected):
    assert reward_variance(scores) == expected


def counts(
    variances: dict[str, float], keys: Sequence[str] = PROMPTS, *, size: int = 1, draws: int = 4000
) -> list[float]:
    """Return how often each prompt is drawn, as a share of all draws."""
    drawn = Counter[int]()
    for iteration in range(draws):
        chosen = draw_prompts(variances, keys, size=size, seed=7, iteration=iteration).tolist()
        assert len(set(chosen)) == size
        drawn.update(chosen)
    return [drawn[index] / (draws * size) for index in range(len(keys))]


def test_prompts_are_drawn_in_proportion_to_their_variances():
    # The mean positive variance is 0.2, so that of 0 counts as 0.02; the new prompt 3 counts like the largest.
    floor = FLOOR * 0.2
    weights = np.array([0.25, 0.15, floor, 0.25])
    found = counts({"0": 0.25, "1": 0.15, "2": 0.0})
    np.testing.assert_allclose(found, weights / weights.sum(), atol=0.025)  # 3 standard errors


def test_prompts_of_a_source_share_its_weight():
    # Source b is new, so it counts like a.
    found = counts({"a": 0.2, "c": 0.05}, ["a", "a", "a", "b", "c", "c"])
    np.testing.assert_allclose(found, np.array([0.2 / 3, 0.2 / 3, 0.2 / 3, 0.2, 0.025, 0.025]) / 0.45, atol=0.025)


def test_the_variance_of_a_source_is_a_moving_average_and_that_of_a_prompt_the_last_one():
    before, found = {"a": 0.25, "b": 0.1}, {"a": [0.0, 0.1], "c": [0.2]}
    assert variances_after(before, found, "variance") == {"a": 0.05, "b": 0.1, "c": 0.2}
    averaged = {"a": pytest.approx(0.8 * 0.25 + 0.2 * 0.05), "b": 0.1, "c": 0.2}
    assert variances_after(before, found, "source_variance") == averaged


@pytest.mark.parametrize("variances", [{}, dict.fromkeys(PROMPTS, 0.0)])
def test_without_a_difference_all_prompts_are_equally_likely(variances):
    np.testing.assert_allclose(counts(variances), 0.25, atol=0.025)


def test_a_batch_of_all_prompts_has_each_once():
    assert sorted(draw_prompts({"1": 0.2}, PROMPTS, size=4, seed=0, iteration=3)) == [0, 1, 2, 3]


def test_metrics_tell_how_well_the_prompts_were_known():
    found = curriculum_metrics({"0": 0.25, "2": 0.05}, PROMPTS, num_keys=8)
    assert found == {
        "curriculum/new": 0.5,
        "curriculum/known_prompts": 0.25,
        "curriculum/variance": pytest.approx(0.15),
    }
    assert "curriculum/variance" not in curriculum_metrics({}, ["1"], num_keys=8)


def curriculum_run(sampling: str = "variance") -> Run:
    """Return a run in which only responses to prompts 1 and 4 have different rewards; these are source "learnable"."""
    made = Run(episodes=20)
    made.settings = dataclasses.replace(
        made.settings, rollout=made.settings.rollout.model_copy(update={"prompt_sampling": sampling})
    )
    made.prompts = [
        dataclasses.replace(prompt, data_source="learnable" if number in (1, 4) else "others")
        for number, prompt in enumerate(made.prompts)
    ]

    def judge(request: ScoreRequest) -> Score:
        return Score(float(request.sample) if request.label in ("1", "4") else 0.0, "scored")

    made.scorer.judge = judge  # type: ignore[method-assign]
    made.scorer.fails = lambda index: False
    return made


def prompts_of(run: Run) -> list[list[int]]:
    return [[row["row"] for row in rows[::SAMPLES_EACH]] for _, rows in run.tracker.rows]


def test_prompts_whose_rewards_vary_are_sampled_more_often():
    run = curriculum_run()
    run(total_iterations=40)
    drawn = Counter(row for rows in prompts_of(run) for row in rows)
    assert set(drawn) == set(range(NUM_PROMPTS))
    assert min(drawn[1], drawn[4]) > 2 * max(drawn[index] for index in (0, 2, 3, 5))
    first, last = run.tracker.logged[0][1], run.tracker.logged[-1][1]
    assert (first["curriculum/new"], first["curriculum/known_prompts"]) == (1.0, 0.0)
    assert (last["curriculum/new"], last["curriculum/known_prompts"]) == (0.0, 1.0)


def test_the_mixture_of_sources_follows_their_variances():
    run = curriculum_run("source_variance")
    run(total_iterations=30, save_steps=30)
    logged = [metrics for _, metrics in run.tracker.logged]
    for metrics in logged:
        assert metrics["curriculum/share/learnable"] + metrics["curriculum/share/others"] == pytest.approx(1)
    # 2 of 3 prompts at most; without a curriculum 1 of 3.
    assert np.mean([metrics["curriculum/share/learnable"] for metrics in logged[2:]]) > 0.55
    assert {row for rows in prompts_of(run) for row in rows} == set(range(NUM_PROMPTS))
    assert set(run.saved[-1].source.reward_variances) == {"learnable", "others"}


@pytest.mark.parametrize("sampling", ["variance", "source_variance"])
def test_a_resumed_run_draws_the_same_prompts(sampling):
    whole = curriculum_run(sampling)
    whole(total_iterations=8, save_steps=1)
    for state in (whole.saved[2], whole.saved[5]):
        again = curriculum_run(sampling)
        again.engines.version = state.iteration  # like the weights that engines receive on a resume
        again(state=LoopState.of(json.loads(json.dumps(state.plain()))), total_iterations=8)
        assert prompts_of(again) == prompts_of(whole)[state.iteration :]
        assert again.tracker.logged == whole.tracker.logged[state.iteration :]


def test_failed_rewards_do_not_change_what_is_known_of_a_prompt():
    run = curriculum_run()
    run(total_iterations=6, save_steps=1)
    before = run.saved[-1].source.reward_variances
    run.scorer.fails = lambda index: index % SAMPLES_EACH == 0
    run(state=run.saved[-1], total_iterations=8, save_steps=1)
    assert run.saved[-1].source.reward_variances == before
