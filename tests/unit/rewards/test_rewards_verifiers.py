"""Verifiers: extraction of answers, equality of numbers, and speed."""

import json
from pathlib import Path

import pytest

from rlhf_cli.rewards.verifiers.answers import last_boxed
from rlhf_cli.rewards.verifiers.builtin import boxed, exact, gsm8k, label_number
from rlhf_cli.rewards.verifiers.mathematics import math
from rlhf_cli.rewards.verifiers.number_parsing import parse_number, same_number

VERIFIERS = {"gsm8k": gsm8k, "boxed": boxed, "exact": exact, "math": math}


def equal(one: str, other: str) -> bool:
    left, right = parse_number(one), parse_number(other)
    assert left is not None, one
    assert right is not None, other
    return same_number(left, right)


@pytest.mark.parametrize(
    ("written", "plain"),
    [
        ("1,000", "1000"),
        ("1{,}000", "1000"),
        (r"1\,000", "1000"),
        ("1,234,567.50", "1234567.5"),
        ("$18", "18"),
        (r"\$18", "18"),
        ("$18$", "18"),
        ("£18", "18"),
        (r"\(18\)", "18"),
        ("**18**", "18"),
        (r"\text{18}", "18"),
        ("18.", "18"),
        ("18.00", "18"),
        ("+18", "18"),
        ("018", "18"),
        (".5", "0.5"),
        ("-$5", "-5"),
        ("$-5", "-5"),
        ("\u22125", "-5"),
        (r"\frac12", "0.5"),
        (r"\dfrac{1}{2}", "0.5"),
        (r"\tfrac{ 1 }{ 2 }", "0.5"),
        (r"-\frac{1}{2}", "-0.5"),
        (r"\frac{-1}{2}", "-0.5"),
        ("3/4", "0.75"),
        ("2e3", "2000"),
        ("1.5e-1", "0.15"),
        ("50%", "0.5"),
        (r"50\%", "0.5"),
        (r"50\%", "50"),
        ("50 %", "50%"),
        (r"90^\circ", "90"),
        ("18 dollars", "18"),
        (r"5\text{ cm}", "5"),
        (r"5\,\mathrm{cm}", "5 cm"),
        ("9" * 900, "9" * 900 + ".0"),
    ],
)
def test_the_same_number_written_in_two_ways_is_equal(written: str, plain: str) -> None:
    assert equal(written, plain)
    assert equal(plain, written)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("18", "-18"),
        ("18", "18.01"),
        ("1,000", "1"),
        ("50%", "0.5%"),
        ("50%", "5"),
        ("5 cm", "5 m"),
        ("1/3", "0.333"),
        ("0.1", "0.10000000000000001"),  # equal as floats
        (r"\frac12", "12"),
    ],
)
def test_different_numbers_are_not_equal(one: str, other: str) -> None:
    assert not equal(one, other)


@pytest.mark.parametrize(
    "text",
    [
        *("", "abc", "(1,2)", "1,2", "1,00", "10,0000", "x=5", "x=5, y=4", "5x", "5 x", "2^3", "3*4", "3 + 4", "3-4"),
        *("18 or 19", "1.2.3", "1/0", "1e9999", "0x10", "5!", "--5", r"\frac{1}{0}", r"\sqrt{4}", "9" * 10_000, "nan"),
        *("__import__('os').getpid()", "1_000", "inf", "\u00b2"),
    ],
)
def test_what_is_no_plain_number_is_none(text: str) -> None:
    assert parse_number(text) is None


@pytest.mark.parametrize(
    ("text", "content"),
    [
        (r"so \boxed{5}", "5"),
        (r"\boxed{4}, no: \boxed{5}. Done in 3 steps.", "5"),
        (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"\boxed{\boxed{5}}", "5"),
        (r"\fbox{5}", "5"),
        (r"\boxed {5}", "5"),
        (r"\boxed{5} and \boxed{6", "5"),
        (r"{ \boxed{5}", "5"),
        (r"} \boxed{5}", "5"),
        (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
        (r"\boxed{}", ""),
        (r"\boxed{5", None),
        (r"\boxed{\frac{1}{2}", None),
        (r"\boxed{5\}", None),
        (r"\boxed 5", None),
        ("5", None),
    ],
)
def test_the_last_balanced_box_is_found(text: str, content: str | None) -> None:
    assert last_boxed(text) == content


@pytest.mark.parametrize(
    ("response", "status"),
    [
        ("#### 18", "correct"),
        ("#### 18.", "correct"),
        ("#### $18", "correct"),
        ("####18", "correct"),
        ("She makes 9 * 2 = 18.\n#### 18\nThat is 1 more than 17.", "correct"),
        ("#### 18 dollars, as 9 eggs at 2 are 18", "correct"),
        ("#### 17\n#### 18", "correct"),
        ("#### 18\n#### 17", "wrong"),
        ("#### 1,800", "wrong"),
        ("#### eighteen", "invalid"),
        ("#### 9 + 9", "invalid"),
        ("#### 1" + "8" * 10_000, "invalid"),
        ("####", "invalid"),
        ("18", "invalid"),
        ("", "invalid"),
    ],
)
def test_gsm8k_takes_the_number_behind_the_marker(response: str, status: str) -> None:
    assert gsm8k(response, "18").status == status
    assert gsm8k(response, "2 * 9 = <<2*9=18>>18\n#### 18").status == status


@pytest.mark.parametrize(
    ("response", "status"),
    [
        (r"Thus \boxed{1000}. There are 3 other ways.", "correct"),
        (r"\boxed{\$1,000.}", "correct"),
        (r"\boxed{1000 \text{ m}}", "correct"),
        (r"\boxed{10^3}", "correct"),
        (r"\boxed{10^n}", "invalid"),
        (r"\boxed{100}", "wrong"),
        (r"\boxed{1000", "invalid"),
        (r"\boxed{}", "invalid"),
        (r"\boxed{exec('1000')}", "invalid"),
        ("1000", "invalid"),
    ],
)
def test_boxed_takes_the_number_in_the_last_box(response: str, status: str) -> None:
    assert boxed(response, "1000").status == status
    assert boxed(response, r"so it is \boxed{1{,}000}").status == status


def test_exact_compares_the_whole_response() -> None:
    assert exact(" 42\n", "42").status == "correct"
    assert exact("42.0", "42").status == "wrong"
    assert exact("the answer is 42", "42").status == "wrong"
    assert exact("  ", "42").status == "invalid"


@pytest.mark.parametrize("name", VERIFIERS)
def test_a_missing_label_is_a_failure_not_a_wrong_answer(name: str) -> None:
    assert VERIFIERS[name](r"#### 5 \boxed{5}", None).status == "failed"


@pytest.mark.parametrize("name", ["gsm8k", "boxed"])
def test_a_label_that_is_no_number_is_a_failure_whatever_the_response(name: str) -> None:
    for response in (r"#### 5 \boxed{5}", "", "no answer"):
        verdict = VERIFIERS[name](response, "x + 1")
        assert (verdict.status, verdict.detail) == ("failed", "label 'x + 1' is not a number")


HOSTILE = [
    r"\boxed{" * 200_000,
    "{" * 500_000 + "}" * 500_000,
    r"\boxed{" + "9" * 1_000_000 + "}",
    r"\boxed{" + "(" * 100_000 + "}",
    r"\boxed{" + r"\text{" * 100 + "5" + "}" * 101,
    r"\boxed{" + "1," * 400 + "}",
    r"\boxed{" + "1 " * 400 + "}",
    r"\boxed{" + "a " * 400 + "}",
    r"\boxed{5 " + "ab " * 300 + "}",
    r"\boxed{" + "\\frac" * 190 + "}",
    "#### " + "1" * 1_000_000,
    "#### " * 200_000,
    "#### 1" + " a" * 500_000,
    "####" + " " * 1_000_000,
    r"\boxed{1e999}" + r"\boxed{1e-999}",
]


@pytest.mark.timeout(60)  # superlinear algorithms take minutes to years
@pytest.mark.parametrize("text", HOSTILE, ids=range(len(HOSTILE)))
def test_hostile_responses_are_judged(text: str) -> None:
    for verifier in VERIFIERS.values():
        assert verifier(text, "18").status in ("wrong", "invalid")


GSM8K = Path(__file__).parents[4] / "shared" / "data" / "gsm8k_train.jsonl"


@pytest.mark.skipif(not GSM8K.exists(), reason="the GSM8K file is not beside the checkout")
def test_every_solution_of_gsm8k_is_correct_by_its_own_label() -> None:
    answers = [json.loads(line)["answer"] for line in GSM8K.read_text().splitlines()]
    assert len(answers) > 7_000
    for answer in answers:
        assert label_number(answer) is not None, answer
        assert gsm8k(answer, answer).status == "correct"
        assert gsm8k(answer + "1", answer).status in ("wrong", "invalid")


@pytest.mark.parametrize(
    ("verifier", "first", "second"),
    [
        (gsm8k, "#### 1,000 dollars", "so\n#### $1000.00"),
        (boxed, r"\boxed{\frac12}", r"hence \boxed{0.50}."),
        (boxed, r"\boxed{50\%}", r"\boxed{1/2}"),
        (gsm8k, "#### 50 %", "#### 0.5"),
        (exact, " 7\n", "7"),
    ],
)
def test_answers_written_differently_have_the_same_key(verifier, first, second):
    label = "7"
    answers = [verifier(response, label).answer for response in (first, second)]
    assert answers[0] == answers[1] is not None
    assert verifier("", label).answer is None


def test_different_answers_have_different_keys():
    answers = [boxed(rf"\boxed{{{number}}}", "7").answer for number in ("7", "-7", "0.7", "7%", "70", "0.7%")]
    assert len(set(answers)) == 6
