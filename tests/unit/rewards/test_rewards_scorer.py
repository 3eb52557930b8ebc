"""The scorer with real worker processes: sums of rewards, failures, retries, and rejected settings."""

import math
import os
from pathlib import Path

import pytest
from pydantic import ValidationError
from scoring import WriteFile, asked, config, request, score, values

from rlhf_cli.backends.rollout.processes import process_tree
from rlhf_cli.config.scoring import RewardConfig
from rlhf_cli.errors import RunError, UsageError
from rlhf_cli.rewards.model_scores import with_model_scores
from rlhf_cli.rewards.parts import join, stop_if_too_many_failed
from rlhf_cli.rewards.records import Score
from rlhf_cli.rewards.scorer import Scorer

pytestmark = pytest.mark.usefixtures("no_process_is_left")


def test_verifiers_give_one_for_correct_and_zero_for_wrong_and_invalid() -> None:
    scores = score(config(reward_funcs=["gsm8k"]), "#### 18", "#### 17", "eighteen")
    assert [(s.value, s.status) for s in scores] == [(1.0, "correct"), (0.0, "wrong"), (0.0, "invalid")]
    assert scores[1].detail == "17"
    assert scores[0].parts == {"gsm8k": 1.0}
    assert [s.answer for s in scores] == ["18", "17", None]


def test_rewards_are_added_with_their_weights_and_kept_apart(reward_file: WriteFile) -> None:
    path = reward_file("""
        def reward_func(queries, prompts, labels):
            assert queries == [p + r for p, r in zip(prompts, ["18", "#### 18"])]
            assert labels == ["18", "18"]
            return [0.25, -1]
    """)
    settings = config(
        reward_funcs=["exact", "gsm8k"], reward_weights=[2.0, 0.5], reward_func=path, reward_func_weight=3.0
    )
    first, second = score(settings, "18", "#### 18")
    assert (first.value, first.status) == (2.75, "correct")
    assert first.parts == {"exact": 1.0, "gsm8k": 0.0, "reward_func": 0.25}
    assert (second.value, second.status) == (-2.5, "wrong")


def test_scores_keep_their_order_over_many_chunks_and_workers() -> None:
    responses = [f"#### {i % 40}" for i in range(1_000)]
    assert values(config(reward_funcs=["gsm8k"]), *responses) == [float(i % 40 == 18) for i in range(1_000)]


def test_no_requests_give_no_scores(reward_file: WriteFile) -> None:
    path = reward_file("def reward_func(queries, prompts, labels): raise AssertionError")
    assert score(config(reward_funcs=["gsm8k"], reward_func=path)) == []


def test_rewards_of_every_kind_add_up_with_weights_and_parameters() -> None:
    settings = config(
        reward_funcs=["format", "cosine(max_len=100)", "math", "length", "soft_overlong(max_len=100, buffer=50)"],
        reward_weights=[0.5, 1, 2, 10, 1],
    )
    right, wrong = "<think>a</think><answer>\\boxed{4}</answer>", "3"
    with Scorer(settings) as scorer:
        first, second, other = scorer.score(
            [
                asked(right, "4", tokens=0, of=2, sample=0),
                asked(wrong, "4", tokens=100, of=2, sample=1),
                asked(wrong, "4", tokens=100),
            ]
        )
    assert first.parts == {"format": 1.0, "cosine": 1.0, "math": 1.0, "length": 0.5, "soft_overlong": 0.0}
    assert (first.value, first.status, first.answer) == (8.5, "correct", "4")
    assert second.parts == {
        "format": 0.0,
        "cosine": pytest.approx(-0.1),
        "math": 0.0,
        "length": -0.5,
        "soft_overlong": -1,
    }
    assert (second.value, second.status) == (pytest.approx(-6.1), "wrong")
    assert other.parts == second.parts | {"length": 0.0}


def test_what_goes_by_a_verdict_fails_with_it() -> None:
    settings = config(reward_funcs=["cosine", "format", "boxed", "length"], reward_max_failures=0.5)
    with Scorer(settings) as scorer:
        failed, good = scorer.score(
            [asked("\\boxed{1}", "x", of=2, sample=0), asked("\\boxed{1}", "1", tokens=2, of=2, sample=1)]
        )
    assert failed == Score(None, "failed", "boxed: label 'x' is not a number", {"format": 0.0}, failure="unjudged")
    assert (good.status, good.parts["length"]) == ("correct", -0.5)


def test_rewards_without_a_verifier_give_no_verdict() -> None:
    (only,) = score(config(reward_funcs=["tag_count"]), "<answer>5</answer>")
    assert only == Score(0.5, "scored", "", {"tag_count": 0.5})


def test_a_tag_that_the_prompt_opened_counts_as_the_responses() -> None:
    answer = "a</think><answer>b</answer>"
    with Scorer(config(reward_funcs=["format"])) as scorer:
        scores = scorer.score([asked(answer, "4"), asked(answer, "4", prompt="Assistant: <think>\n")])
    assert [result.value for result in scores] == [0.0, 1.0]


def test_a_failure_is_retried_as_often_as_allowed(reward_file: WriteFile, tmp_path: Path) -> None:
    path = reward_file(f"""
        from pathlib import Path
        def reward_func(queries, prompts, labels):
            calls = Path({str(tmp_path / "calls")!r})
            calls.open("a").write("x")
            assert len(calls.read_text()) > 2, "not yet"
            return [1.0] * len(queries)
    """)
    with pytest.raises(RunError, match="AssertionError: not yet"):
        score(config(reward_func=path, reward_retries=1), "a")
    (tmp_path / "calls").unlink()
    assert values(config(reward_func=path, reward_retries=2), "a") == [1.0]
    assert (tmp_path / "calls").read_text() == "xxx"


def test_values_that_were_good_are_kept_when_others_are_asked_for_again(reward_file: WriteFile) -> None:
    path = reward_file("""
        calls = 0
        def reward_func(queries, prompts, labels):
            global calls
            calls += 1
            return [float(calls), float(calls) if calls > 1 else float("nan"), float("nan")]
    """)
    settings = config(reward_func=path, reward_retries=1, reward_max_failures=0.5)
    assert [(s.value, s.failure) for s in score(settings, "a", "b", "c")] == [
        (1.0, None),
        (2.0, None),
        (None, "bad_result"),
    ]


def test_failures_up_to_the_allowed_share_only_mark_their_samples(reward_file: WriteFile) -> None:
    path = reward_file("""
        def reward_func(queries, prompts, labels):
            return [float("nan") if "bad" in q else 1.0 for q in queries]
    """)
    responses = ["bad", "a", "b", "c"]
    scores = score(config(reward_funcs=["exact"], reward_func=path, reward_max_failures=0.25), *responses)
    assert [s.value for s in scores] == [None, 1.0, 1.0, 1.0]
    assert scores[0].parts == {"exact": 0.0}
    with pytest.raises(RunError, match=r"1 of 4 rewards failed, more than --reward_max_failures 0\.2 allows"):
        score(config(reward_func=path, reward_max_failures=0.2), *responses)


def test_labels_that_a_verifier_cannot_use_are_found_beforehand() -> None:
    with Scorer(config(reward_funcs=["exact", "boxed"], reward_max_failures=0.25)) as scorer:
        scorer.check_labels(["1", "2", "3", "x + 1"])
        with pytest.raises(UsageError, match=r"boxed: 2 of 4 prompts .* label 'x \+ 1' is not a number"):
            scorer.check_labels(["1", "2", "x + 1", "?"])
        with pytest.raises(UsageError, match=r"exact: 2 of 2 prompts .* no label"):
            scorer.check_labels([None, None])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"reward_funcs": ["gsm9k"]}, "there is no reward 'gsm9k'"),
        ({"reward_funcs": ["exact", "exact"]}, "listed twice"),
        ({"reward_funcs": ["exact"], "reward_weights": [1.0, 2.0]}, "2 values for 1"),
        ({"reward_funcs": ["exact"], "reward_clip_range": (1.0, 1.0)}, "is empty"),
    ],
)
def test_bad_reward_settings_are_refused(settings: dict, message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        RewardConfig(**settings)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"reward_pretrain": "rm", "reward_clip_range": (1.0, 1.0)}, "is empty"),
        ({"reward_pretrain": "rm", "reward_weights": [1.0]}, "1 values for 0"),
    ],
)
def test_bad_settings_of_a_reward_model_are_refused(settings: dict, message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        RewardConfig(**settings)


def test_a_reward_model_alone_starts_from_zero_and_no_process() -> None:
    with Scorer(RewardConfig(reward_pretrain="rm")) as scorer:
        scorer.check_labels([None])
        scores = scorer.score([request("a"), request("b", label=None)])
        assert not process_tree(os.getpid())
    assert scores == [Score(0.0, "scored")] * 2


def test_a_reward_models_score_is_added_with_its_weight() -> None:
    scores = [Score(1.0, "correct", "18", {"gsm8k": 1.0}), Score(0.0, "wrong"), Score(None, "failed", "grader broke")]
    joined = with_model_scores(scores, [2.0, -3.0, 4.0], weight=0.25)
    assert joined == [
        Score(1.5, "correct", "18", {"gsm8k": 1.0, "reward_model": 2.0}),
        Score(-0.75, "wrong", "", {"reward_model": -3.0}),
        Score(None, "failed", "grader broke", {"reward_model": 4.0}),
    ]


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_score_of_a_reward_model_that_is_no_number_has_failed(value: float) -> None:
    scores = [Score(1.0, "correct", "18")] * 2
    joined = with_model_scores(scores, [1.0, value], weight=1.0)
    assert joined[0].value == 2.0
    assert joined[1] == Score(None, "failed", f"the reward model's score is {value}", failure="bad_result")


def test_too_many_failures_stop_a_run_unless_scores_to_come_may_make_up_for_them() -> None:
    scores = [
        Score(1.0, "correct"),
        Score(None, "failed", "a"),
        Score(None, "failed", "b\nat"),
        Score(None, "failed", "b"),
    ]
    stop_if_too_many_failed(scores, 0.75)
    stop_if_too_many_failed(scores, 0.5, num_to_come=2)
    with pytest.raises(RunError, match=r"^3 of 4 rewards failed, more than --reward_max_failures 0\.5 allows: b$"):
        stop_if_too_many_failed(scores, 0.5, num_to_come=1)


@pytest.mark.parametrize(("first", "second"), [(1e308, 1e308), (-1e308, -1e308)])
def test_finite_rewards_that_add_up_to_no_number_have_failed(first: float, second: float) -> None:
    parts = {"a": Score(first, "scored", ""), "b": Score(second, "scored", "")}
    total = math.copysign(math.inf, first)
    failed = Score(None, "failed", f"the rewards sum to {total}", {"a": first, "b": second}, failure="bad_result")
    assert join(parts, {"a": 1.0, "b": 1.0}) == failed
    assert join(parts, {"a": 1.0, "b": 0.5}).value == 1.5 * first
    (joined,) = with_model_scores([Score(first, "scored")], [second], weight=1.0)
    assert (joined.value, joined.detail) == (None, f"the rewards sum to {total}")
