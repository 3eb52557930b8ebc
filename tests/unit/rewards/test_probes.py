"""Responses of known quality, and how a reward is judged by its scores for them."""

from fractions import Fraction
from itertools import chain

import pytest

from rlhf_cli.rewards.probes.judging import (
    Scale,
    Scored,
    best_form,
    compares_text,
    constant_parts,
    depends_on_row,
    earning_junk,
    failures_of,
    lines_of,
    overpaid_junk,
)
from rlhf_cli.rewards.probes.labels import answer_of, close_answers, other_answers, sort_key, spellings, surely_differ
from rlhf_cli.rewards.probes.responses import FORMS, Probe, Role, programs, sprays, wanted_form
from rlhf_cli.rewards.records import Score
from rlhf_cli.rewards.verifiers.builtin import gsm8k
from rlhf_cli.rewards.verifiers.mathematics import math

PLAIN, HASHES, BOX = FORMS[0], FORMS[3], FORMS[4]


def answer(label: str):
    found = answer_of(label)
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("label", "text", "kind"),
    [
        ("2 * 500 = 1,000\n#### 1,000", "1,000", "number"),
        (r"So it is \boxed{\frac{1}{2}}.", r"\frac{1}{2}", "number"),
        ('["0.5", "1/2"]', "0.5", "number"),
        ("(B)", "(B)", "choice"),
        ("x^2 + 1", "x^2 + 1", "formula"),
        ("New York", "New York", "text"),
    ],
)
def test_a_label_has_an_answer(label, text, kind):
    assert (answer(label).text, answer(label).kind) == (text, kind)


@pytest.mark.parametrize(
    "label", [None, "", '{"inputs": ["1"], "outputs": ["2"]}', "assert f(1) == 2", '["assert f(1) == 2"]', '{"a": 1}']
)
def test_labels_that_are_no_answers_have_none(label):
    assert answer_of(label) is None


@pytest.mark.parametrize(
    ("label", "equal", "dressed"),
    [
        ("1000", {"1,000", "1000.00"}, {"$1000", "1000 apples", "x = 1000", "$1000$", "1000.", "**1000**"}),
        ("1,234.5", {"1234.5", "1234.500"}, {"2469/2", r"\frac{2469}{2}"}),
        ("-0.5", {"-0.500"}, {"-1/2", r"-\frac{1}{2}"}),
        ("1/3", set(), {r"\frac{1}{3}"}),
        (r"\frac{\pi}{4}", {r"\dfrac{\pi}{4}"}, {r"$\frac{\pi}{4}$"}),
        ("(B)", set(), {"B.", "b", "**(B)**"}),
        ("Paris", set(), {"PARIS", "paris", "Paris."}),
    ],
)
def test_spellings_have_the_value_of_the_label(label, equal, dressed):
    found = spellings(answer(label))
    assert {one.text for one in found if one.is_equal_value} == equal
    assert dressed <= {one.text for one in found if not one.is_equal_value}
    assert all(math(rf"\boxed{{{one.text}}}", label).status == "correct" for one in found if one.is_equal_value)


@pytest.mark.parametrize(
    ("one", "other", "differ"),
    [
        ("1000", "1,000.0", False),
        ("0.5", "1/2", False),
        ("50%", "0.5", False),
        ("5", "50", True),
        ("B", "(B)", False),
        ("B", "C", True),
        ("Paris", "paris.", False),
        ("Paris", "Paris, France", False),
        ("Paris", "London", True),
        ("x+1", "1+x", False),
        ("2", "two", False),
    ],
)
def test_answers_differ_only_for_certain(one, other, differ):
    assert surely_differ(answer(one), answer(other)) is differ


@pytest.mark.parametrize("label", ["42", "1,000", "-3", "0.5", "0", "D", "Paris", "x^2", "5 cm", r"\frac{1}{2}"])
def test_wrong_answers_are_wrong(label):
    texts = [text for _, text in close_answers(answer(label))]
    assert texts
    assert all(math(rf"\boxed{{{text}}}", label).status != "correct" for text in texts)


def test_close_answers_contain_the_right_one():
    assert dict(close_answers(answer("42"))) == {
        "right answer + 1": "43",
        "right answer, negated": "-42",
        "right answer within a longer number": "742",
        "right answer as start of a longer number": "427",
    }


def test_equal_answers_are_neighbours_in_sorted_order():
    labels = ["paris", "1,000", "0.5", "7", "Paris.", "1000.0", "1/2"]
    found = sorted(map(answer, labels), key=sort_key)
    assert [one.text for one in found] == ["0.5", "1/2", "7", "1,000", "1000.0", "paris", "Paris."]


@pytest.mark.parametrize(
    ("prompt", "form"),
    [
        ("Put the answer in \\boxed{}.", BOX),
        ("End with #### and the number.", HASHES),
        ("Use <think> </think> and <answer> </answer>.", FORMS[5]),
        ("Use <answer> </answer> with \\boxed{} in it.", FORMS[6]),
        ("The last line is Answer: $Answer", FORMS[2]),
        ("Question: 2+2?\nAnswer:", None),
        ("2+2?", None),
    ],
)
def test_a_prompt_asks_for_a_form(prompt, form):
    assert wanted_form(prompt) == form


def test_sprays_hide_the_right_answer_among_wrong_ones():
    others = [answer(str(number)) for number in range(10, 14)]
    found = {probe.name: probe for probe in sprays(0, answer("42"), PLAIN, others)}
    assert other_answers(answer("42"), others) == ["10", "11", "12", "13", "43", "-42", "742", "427"]
    middle = found["many answers, right one in the middle"]
    assert (middle.role, middle.response.split()) == (
        "spray",
        ["10", "11", "12", "13", "42", "43", "-42", "742", "427"],
    )
    assert found["three answers in one place"].response == "10 or 42 or 427"
    assert found["many answers, right one last"].role == "other"
    assert [probe.name for probe in found.values() if gsm8k(probe.response, "42").status == "correct"] == []


def test_programs_define_the_tested_function():
    sources = [probe.response for probe in programs(0, "assert add(1, 2) == 3")]
    assert any("def add(*arguments): return None" in source for source in sources)
    sources = [probe.response for probe in programs(0, '{"fn_name": "mul", "inputs": [[1, 2]], "outputs": [2]}')]
    assert any("def mul(*arguments): return None" in source for source in sources)


def scored(role: Role, name: str, *values: float | None, is_sure: bool = True) -> list[Scored]:
    return [
        Scored(
            Probe(row, role, name, "text", is_sure), Score(value, "failed" if value is None else "scored", "it broke")
        )
        for row, value in enumerate(values)
    ]


def judged(*ones: list[Scored]) -> dict[str, str]:
    """Judge by a threshold of 0.5."""
    return {line.name: line.level for line in lines_of(chain(*ones), lambda one: one.value >= 0.5)}


def test_the_threshold_is_halfway_between_wrong_and_right():
    scale = Scale({0: 1.0, 1: 3.0, 2: 0.0}, {0: 0.0, 1: 1.0, 2: 0.0})
    # Row 2 does not tell right from wrong, so the medians 1 and 0 count.
    assert [scale.threshold(row) for row in range(4)] == [0.5, 2.0, 0.5, 0.5]
    assert scale.tells
    assert not Scale({0: 1.0}, {0: 1.0}).tells
    assert not Scale({}, {}).tells


def test_right_answers_must_be_paid_and_wrong_ones_must_not():
    assert judged(
        scored("right", "refused", 1.0, 0.4),
        scored("right", "paid", 1.0, 0.5),
        scored("form", "other form", 0.0),
        scored("spelling", "equal", 1.0, 0.0),
        scored("spelling", "dressed", 1.0, 0.0, is_sure=False),
        scored("wrong", "wrong", 0.0, 0.5),
        scored("wrong", "maybe equal", 0.0, 1.0, is_sure=False),
        scored("wrong", "mostly paid", 1.0, 1.0, is_sure=False),
        scored("junk", "junk", 1.0),
        scored("junk", "question", 1.0, is_sure=False),
        scored("spray", "spray", 0.0, 1.0),
        scored("other", "last", 1.0),
    ) == {
        "refused": "fault",
        "paid": "",
        "other form": "",
        "equal": "fault",
        "dressed": "note",
        "wrong": "fault",
        "maybe equal": "note",
        "mostly paid": "fault",
        "junk": "fault",
        "question": "note",
        "spray": "fault",
        "last": "",
    }


def test_lines_count_what_is_paid_and_what_failed():
    (line,) = lines_of(scored("junk", "empty", 1.0, 0.0, None, 0.5), lambda one: one.value >= 0.5)
    assert (line.count, line.num_failed, line.paid, line.mean) == (4, 1, 2, 0.5)
    (failure,) = failures_of(scored("junk", "empty", 1.0, 0.0, None, None))
    assert (failure.reason, failure.names, failure.count, failure.first.probe.row) == ("it broke", ["empty"], 2, 2)
    (line,) = lines_of(scored("junk", "empty", 1.0), None)
    assert (line.paid, line.level) == (None, "")


def test_a_reward_that_refuses_all_spellings_compares_text():
    pays = lambda one: one.value >= 0.5  # noqa: E731
    refused, paid = scored("spelling", "a", 0.0, 0.0), scored("spelling", "b", 1.0)
    assert compares_text(lines_of(refused, pays))
    assert not compares_text(lines_of(refused + paid, pays))
    assert not compares_text(lines_of(scored("junk", "empty", 0.0), pays))


def test_the_best_form_separates_and_the_wanted_one_wins_a_tie():
    trials = dict.fromkeys(FORMS, Scale({0: 0.0}, {0: 0.0}))
    trials |= {HASHES: Scale({0: 1.0}, {0: 0.0}), BOX: Scale({0: 0.99}, {0: 0.0})}
    assert best_form(trials, None) == HASHES
    assert best_form(trials, BOX) == BOX
    assert best_form({form: Scale({0: -2.0}, {0: -1.0}) for form in FORMS}, BOX) == BOX
    # The prompts ask for a form that the reward does not know.
    assert best_form(trials, PLAIN) == HASHES


def test_rewards_that_depend_on_the_row_are_told_from_constant_ones():
    pairs = [
        (
            Score(1.5, "scored", parts={"math": 1.0, "format": 0.5}),
            Score(0.5, "scored", parts={"math": 0, "format": 0.5}),
        ),
        (Score(None, "failed"), Score(1.0, "scored", parts={"format": 1.0})),
    ]
    assert depends_on_row(pairs) == {"", "math"}
    ones = [Scored(Probe(0, "junk", "", ""), score) for pair in pairs for score in pair]
    assert constant_parts(ones) == {}
    assert constant_parts(ones[:2]) == {"format": 0.5}


def test_junk_that_earns_as_much_as_an_answer_is_named():
    answers, junk = scored("form", "box", 1.0, 0.5), [*scored("junk", "empty", 0.5, 0.9), *scored("junk", "dots", 0.0)]
    assert earning_junk(lines_of([*answers, *junk], None)) == []
    assert earning_junk(lines_of([*scored("form", "box", 0.7), *junk], None)) == [
        '"empty" earns 0.7, an answer at most 0.7'
    ]
    several = [*junk, *scored("junk", "words", 0.9)]
    assert earning_junk(lines_of([*scored("form", "box", 0.7), *several], None)) == [
        '"words" and 1 more kind of responses without an answer earn up to 0.9, an answer at most 0.7'
    ]


def test_junk_that_earns_more_than_answers_differ_is_a_fault():
    answers = [*scored("form", "box", 1.0), *scored("form", "words", 0.5), *scored("junk", "dots", 0.0)]
    assert overpaid_junk([*answers, *scored("junk", "empty", 1.5)]) == []
    found = overpaid_junk([*answers, *scored("junk", "empty", 1.6)])
    assert found == ['"empty" earns 1.6, an answer at most 1']
    # Equal to the only answer, as with a reward for the format.
    assert overpaid_junk([*scored("form", "box", 1.0), *scored("junk", "empty", 1.0)]) == []


def test_the_value_of_a_number_is_exact():
    assert sort_key(answer("0.1"))[1] == Fraction(1, 10)
