"""Judges that apply rubrics, compare pairs, or order groups, tested with real HTTP servers in this process."""

import json
from collections.abc import Iterator
from dataclasses import replace

import pytest
from http_servers import Answer, Server, running
from judge_answers import MODELS, part_of, question_in, says
from scoring import finished, group
from test_rewards_judge import config, judged, refused

from rlhf_cli.rewards.judge.judge import judgement_line
from rlhf_cli.rewards.judge.rubrics import items_of, reward_of
from rlhf_cli.rewards.records import ScoreRequest
from rlhf_cli.rewards.scorer import Scorer

RUBRIC = [
    {"criterion": "States 42.", "weight": 3},
    {"description": "Shows steps.", "points": 1},
    {"criterion": "Is rude.", "weight": -2},
]


@pytest.fixture
def server() -> Iterator[Server]:
    with running(Server(health=MODELS)) as started:
        yield started


def with_rubric(rubric: object, response: str = "42") -> ScoreRequest:
    return replace(group(response)[0], row=json.dumps({"prompt": "p", "columns": {"rubric": rubric}}))


def items(*met: object, numbers: list[object] | None = None) -> Answer:
    listed = numbers or list(range(1, len(met) + 1))
    found = [{"item": number, "reason": f"r{number}", "met": one} for number, one in zip(listed, met, strict=True)]
    return says(json.dumps({"items": found}))


def test_a_rubric_weighs_criteria_and_keeps_verdict_and_reason_of_each(server):
    server.answer = lambda _: items(True, False, True, numbers=[1, 3, 2])
    (score,) = judged(config(server, judge_method="rubric"), with_rubric(json.dumps(RUBRIC)))
    assert (score.value, score.parts) == (1.0, {"judge": 1.0})
    assert score.judgements == [
        {"criterion": "States 42.", "weight": 3.0, "met": True, "reason": "r1"},
        {"criterion": "Shows steps.", "weight": 1.0, "met": True, "reason": "r2"},
        {"criterion": "Is rude.", "weight": -2.0, "met": False, "reason": "r3"},
    ]
    assert [judgement_line(judgement) for judgement in score.judgements][1:] == [
        "met, weight 1: Shows steps.: r2",
        "not met, weight -2: Is rude.: r3",
    ]
    question = question_in(server.asked[0])
    assert part_of(question, "rubric") == "1. States 42.\n2. Shows steps.\n3. Is rude."
    assert part_of(question, "response") == "42"


def test_rewards_of_rubrics():
    weighed = items_of(RUBRIC)
    assert reward_of(weighed, [True, False, False]) == 0.75
    assert reward_of(weighed, [False, False, True]) == -0.5
    assert reward_of(items_of(["Is short.", "Is kind."]), [True, False]) == 0.5


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (items(True, True), "gave verdicts on the items [1, 2], not on each of 1 to 3 once"),
        (
            items(True, True, True, numbers=[1, 1, 3]),
            "gave verdicts on the items [1, 1, 3], not on each of 1 to 3 once",
        ),
        (
            items(True, True, True, numbers=[1, True, 3]),
            "gave verdicts on the items [1, true, 3], not on each of 1 to 3",
        ),
        (items(True, True, True, True), "gave verdicts on the items [1, 2, 3, 4], not on each of 1 to 3 once"),
        (items(True, "yes", True), 'gave the verdict "yes" on item 2, not true or false'),
        (items(True, None, True), "gave the verdict null on item 2, not true or false"),
        (says('{"items": [1, 2, 3]}'), "gave the items [1, 2, 3], not a list of objects"),
        (says('{"items": {}}'), "gave the items {}, not a list of objects"),
        (says('{"items": [{"met": true}]}'), """gave a verdict without 'item': {"met": true}"""),
        (says('{"score": 9}'), """gave a verdict without 'items': {"score": 9}"""),
    ],
)
def test_verdicts_on_wrong_items_are_failures(server, answer, reason):
    server.answer = lambda _: answer
    (score,) = judged(config(server, judge_method="rubric"), with_rubric(RUBRIC))
    assert (score.value, score.failure) == (None, "bad_result")
    assert score.detail.startswith(f"judge {server.base} {reason}")
    assert [f"judge {judgement['failed']}" for judgement in score.judgements] == [score.detail]


@pytest.mark.parametrize(
    ("rubric", "said"),
    [
        (None, "the row has no 'rubric' (--judge_rubric_key)"),
        ("be nice", "column 'rubric' is not a list of criteria in JSON"),
        ([], "column 'rubric' is not a list of criteria"),
        ([{"weight": 1}], "column 'rubric' has no text in 'criterion' of item 1"),
        (["a", {"criterion": "b", "weight": "2"}], "column 'rubric' has no number in 'weight' of item 2"),
        ([{"criterion": "b", "weight": -1}], "column 'rubric' has no criterion with a positive weight"),
    ],
)
def test_bad_rubrics_are_found_before_the_run_and_fail_alone(server, rubric, said):
    good, bad = with_rubric(RUBRIC), with_rubric(rubric)
    server.answer = lambda _: items(True, True, False)
    settings = config(server, judge_method="rubric", reward_max_failures=0.5)
    with Scorer(settings) as scorer:
        assert refused(lambda: scorer.check_rubrics([good.row, bad.row, bad.row])) == (
            f"--judge_method rubric: 2 of 3 prompts have no usable rubric; the first: {said}"
        )
        scorer.check_rubrics([good.row, bad.row])
        scores = scorer.score([good, bad])
    assert [score.value for score in scores] == [1.0, None]
    assert (scores[1].detail, scores[1].failure) == (f"judge: {said}", "unjudged")
    assert len(server.asked) == 1


def longer_is_better(body: dict) -> Answer:
    question = question_in(body)
    first, second = (len(part_of(question, f"response_{number}")) for number in (1, 2))
    better = "tie" if first == second else 1 if first > second else 2
    return says(json.dumps({"reason": "length", "better": better}))


def test_pairs_are_judged_in_both_orders(server):
    server.answer = longer_is_better
    scores = judged(config(server, judge_method="pairwise"), *group("ccc", "a", "bb"))
    assert [score.value for score in scores] == [1.0, 0.0, 0.5]
    assert scores[0].metrics == {"judge/position_flips": 0.0}
    assert len(server.asked) == 6
    shown = {tuple(part_of(question_in(body), f"response_{number}") for number in (1, 2)) for body in server.asked}
    assert len(shown) == 6, "each pair in both orders"
    assert scores[2].judgements == [
        {"against": 0, "shown": "second", "won": 0.0, "reason": "length"},
        {"against": 0, "shown": "first", "won": 0.0, "reason": "length"},
        {"against": 1, "shown": "second", "won": 1.0, "reason": "length"},
        {"against": 1, "shown": "first", "won": 1.0, "reason": "length"},
    ]
    assert judgement_line(scores[2].judgements[3]) == "shown first, better than sample 1: length"


def test_a_preference_for_a_position_cancels(server):
    server.answer = lambda _: says('{"reason": "the first", "better": 1}')
    scores = judged(config(server, judge_method="pairwise"), *group("ccc", "a", "bb"))
    assert [score.value for score in scores] == [0.5, 0.5, 0.5]
    assert [score.metrics for score in scores] == [{"judge/position_flips": 1.0}] * 3


def test_equal_responses_are_tied_without_a_question(server):
    server.answer = longer_is_better
    scores = judged(config(server, judge_method="pairwise"), *group("a", "bb", "a", "a"))
    assert [score.value for score in scores] == [pytest.approx(1 / 3), 1.0, pytest.approx(1 / 3), pytest.approx(1 / 3)]
    assert len(server.asked) == 6
    assert [score.value for score in judged(config(server, judge_method="pairwise"), *group("a", "a"))] == [0.5, 0.5]


def test_a_response_that_a_judge_cannot_compare_fails_alone(server):
    server.answer = lambda body: says("?") if "bad" in question_in(body) else longer_is_better(body)
    scores = judged(config(server, judge_method="pairwise"), *group("ccc", "a", "bad"))
    assert [score.value for score in scores] == [1.0, 0.0, None]
    fault = f"{server.base} gave no verdict in JSON: ?"
    assert scores[2].detail == f"judge {fault}"
    assert scores[2].judgements == [
        {"against": other, "shown": shown, "failed": fault} for other in (0, 1) for shown in ("second", "first")
    ]
    assert len(scores[0].judgements) == 4, "also the failed comparisons of a response with a reward"
    assert judgement_line(scores[0].judgements[2]) == f"shown first, not compared with sample 2: {fault}"


@pytest.mark.parametrize("better", [0, 3, True, None, "first", [1]])
def test_a_winner_that_is_none_of_both_is_a_failure(server, better):
    server.answer = lambda _: says(json.dumps({"better": better}))
    scores = judged(config(server, judge_method="pairwise"), *group("a", "b"))
    assert [score.value for score in scores] == [None, None]
    assert scores[0].detail.endswith(f'gave {json.dumps(better)} as the better response, not 1, 2 or "tie"')


def by_length(body: dict) -> Answer:
    question = question_in(body)
    lengths = {number: len(part_of(question, f"response_{number}")) for number in (1, 2, 3)}
    return says(json.dumps({"reason": "length", "order": sorted(lengths, key=lambda number: -lengths[number])}))


def test_an_ordered_group_is_ordered_twice(server):
    server.answer = by_length
    settings = config(server, judge_method="listwise")
    scores = judged(settings, *group("ccc", "a", "bb"))
    assert [score.value for score in scores] == [1.0, 0.0, 0.5]
    assert scores[2].judgements == [{"rank": 2, "of": 3, "reason": "length"}] * 2
    assert judgement_line(scores[0].judgements[0]) == "rank 1 of 3: length"
    assert [part_of(question_in(body), "response_1") for body in server.asked] in (["ccc", "bb"], ["bb", "ccc"])
    server.answer = lambda _: says('{"order": [1, 2, 3]}')
    assert [score.value for score in judged(settings, *group("ccc", "a", "bb"))] == [0.5, 0.5, 0.5]


@pytest.mark.parametrize("order", [[1, 2], [1, 2, 2], [0, 1, 2], [1, 2, 3, 4], ["1", "2", "3"], "1, 2, 3", None])
def test_an_order_of_other_responses_is_a_failure_of_the_group(server, order):
    server.answer = lambda _: says(json.dumps({"order": order}))
    scores = judged(config(server, judge_method="listwise"), *group("ccc", "a", "bb"))
    assert [score.value for score in scores] == [None] * 3
    assert f"gave the order {json.dumps(order)}, not each of 1 to 3 once" in scores[0].detail


@pytest.mark.parametrize("method", ["pairwise", "listwise"])
def test_a_single_response_cannot_be_compared(server, method):
    (score,) = judged(config(server, judge_method=method), *group("a"))
    assert (score.value, score.detail) == (None, "judge: compares the responses to a prompt, but there is only one")
    assert not server.asked


def test_groups_are_compared_when_their_last_response_arrives_in_any_order(server):
    server.answer = by_length
    first, second, third = group("ccc", "a", "bb")
    others = group("a", "bb", "ccc")
    with Scorer(config(server, judge_method="listwise")) as scorer, scorer.session() as session:
        session.add([third, others[0]])
        session.add([first])
        assert session.ready() == []
        assert not server.asked
        session.add([*others[1:], second])
        assert [score.value for score in finished(session)] == [0.5, 0.0, 1.0, 0.5, 1.0, 0.0]
