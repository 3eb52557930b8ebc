"""The verifier `math`: extraction of answers, equality, and time limits."""

import itertools
import json
from pathlib import Path

import pytest

from rlhf_cli.config.scoring import RewardConfig
from rlhf_cli.rewards.records import Score, ScoreRequest
from rlhf_cli.rewards.scorer import Scorer
from rlhf_cli.rewards.verifiers.mathematics import find_answer, math, same_answer


@pytest.mark.parametrize(
    ("response", "answer"),
    [
        (r"first \boxed{4}, then \boxed{5}. Checked in 3 ways.", "5"),
        (r"\boxed{5} and \boxed{6", "5"),
        (r"\fbox{5}", "5"),
        (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"<think>\boxed{5}</think><answer>6</answer>", "6"),
        (r"<answer>6</answer> rather \boxed{7}", "7"),
        (r"<answer>so it is \boxed{7}</answer>", "7"),
        ("<answer>5</answer> and <answer> 6\n</answer>", "6"),
        ("<answer>The answer is 5 apples.</answer>", "5"),
        ("<answer>The answer is $x^2$ for 5 of them</answer>", "x^2"),
        (r"<answer>That gives \(\frac12\).</answer>", r"\frac12"),
        ("<answer>5 square meters</answer>", "5 square meters"),
        ("<answer>6", "6"),
        ("It is 18.", "18"),
        ("9 eggs at $2 are $18, as 9 * 2 = 18!", "18"),
        ("It falls to -5 degrees", "-5"),
        ("That is 3/4 of it", "3/4"),
        ("1,000,000 (one million)", "1,000,000"),
        (r"so $x = \frac{1}{2}$.", r"\frac{1}{2}"),
        ("12.5%", "12.5%"),
        ("8-3", "3"),
        ("**42**", "42"),
        (r"\boxed{5", "5"),
        (r"\boxed{}", ""),
        ("<answer></answer>", ""),
        ("I do not know", None),
        ("a1", None),
        ("9" * 10_000, None),
        ("", None),
    ],
)
def test_the_answer_is_the_last_box_or_tag_or_number(response: str, answer: str | None) -> None:
    assert find_answer(response) == answer


EQUAL = [
    ("1,000", "1000"),
    ("0.5", r"\frac12"),
    ("0.5", r"\dfrac{1}{2}"),
    ("0.5", r"50\%"),
    (r"\dfrac{1}{2}", r"50\%"),
    ("(1,2)", r"\left( 1, 2 \right)"),
    ("(1,2)", "1, 2"),
    (r"\left(\dfrac12, \sqrt{8}\right)", r"(0.5, 2\sqrt2)"),
    ("[1,2)", r"\left[ 1, 2 \right)"),
    (r"\{1,2\}", r"\{2, 1\}"),
    ("2, 1", "1,2"),
    (r"1, 5", r"3 \pm 2"),
    ("x=5, y=4", "y = 4, x = 5"),
    ("x = 5", "5"),
    ("x=5", "x = 5.0"),
    (r"x \in [1,2]", "[1,2]"),
    ("f(x) = x^2 + 1", "1+x^2"),
    ("x^2+2x+1", "(x+1)^2"),
    (r"\sqrt{8}", r"2\sqrt{2}"),
    (r"\frac{\pi}{2}", r"\pi/2"),
    (r"2\frac12", "2.5"),
    ("10^3", "1000"),
    (r"\frac{10{,}000}{2}", "5000"),
    ("5 cm", "5"),
    ("5 cm", r"5\text{ cm}"),
    (r"\sqrt2\text{ cm}", r"\sqrt{2}"),
    (r"90^\circ", "90"),
    (r"\text{East}", "east"),
    (r"\text{(A)}", "A"),
    ("x > 5", "5 < x"),
    ("p - q", "-q + p"),
    (r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}", r"\begin{pmatrix}1\\2\end{pmatrix}"),
    (r"(-\infty, 1) \cup (2, \infty)", r"(-\infty,1)\cup(2,\infty)"),
    ("$18$", "18"),
    (r"\(x+1\)", "1 + x"),
    ("9" * 10_000, "9" * 10_000),
    (r"(0,100) \cup (200,300)", r"(0, 100)\cup(200, 300)"),
    (r"(0,100) \cup (200,300)", r"(200,300) \cup (0,100)"),
    ("(1,100),(2,200)", "(1, 100), (2, 200)"),
    ("f(1,100)", "f(1, 100)"),
    ("1,100, 2,200", "1100, 2200"),
    ("1,100", "1, 100"),
    (r"32,\! 349", "32349"),
    (r"32,\!349", "32,349"),
    (r"1\text{ and }2", "1,2"),
    (r"1, 2,\text{ and }3", "1,2,3"),
    (r"x=1\text{ or }x=2", "1, 2"),
    ("(p,q)=(3,2)", "(3,2)"),
    ("(p, q) = (3, 2)", "(p,q)=(3,2)"),
    (r"\emptyset", r"\varnothing"),
    (r"\{\}", r"\emptyset"),
]
DIFFERENT = [
    ("(1,2)", "12"),
    ("(1,2)", "(12)"),
    ("(1,2)", "(2,1)"),
    ("(1,2)", "(1,2,3)"),
    ("[1,2)", "(1,2)"),
    (r"\{1,1,2\}", r"\{1,2,2\}"),
    ("x=5, y=4", "x=3, y=4"),
    ("x=5, y=4", "x=5"),
    ("x=5", "y=5"),
    ("5 cm", "5 m"),
    (r"5\text{ cm}", r"5\text{ m}"),
    (r"\sqrt2\text{ cm}", r"\sqrt2\text{ m}"),
    (r"\sqrt2", "1.4"),
    (r"\pi", "3.14"),
    (r"\frac12", "12"),
    ("x^2+1", "x^2"),
    (r"\text{east}", r"\text{west}"),
    ("__import__('os').getpid()", "1"),
    ("print(6*7)", "42"),
    ("9" * 10_000, "9" * 9_999 + "8"),
    ("", "0"),
    (r"(0,100) \cup (200,300)", r"(0,100) \cup (200,400)"),
    ("(1,100),(2,200)", "(1100),(2200)"),
    ("f(1,100)", "f(1100)"),
    ("(p,q)=(3,2)", "(q,p)=(3,2)"),
    ("(p,q)=(3,2)", "(2,3)"),
    ("1,100", "1, 101"),
    (r"\emptyset", r"\{1\}"),
    (r"\text{land}", r"\text{l},\text{d}"),
]


@pytest.mark.parametrize(("one", "other"), EQUAL, ids=range(len(EQUAL)))
def test_equal_answers(one: str, other: str) -> None:
    assert same_answer(one, other)
    assert same_answer(other, one)


@pytest.mark.parametrize(("one", "other"), DIFFERENT, ids=range(len(DIFFERENT)))
def test_different_answers(one: str, other: str) -> None:
    assert not same_answer(one, other)
    assert not same_answer(other, one)


@pytest.mark.parametrize(
    ("response", "label", "status"),
    [
        (r"so \boxed{1{,}000}", "1000", "correct"),
        (r"so \boxed{0.50}", r"it is \boxed{\frac12}", "correct"),
        ("so it is 18.", "9 * 2 = 18\n#### 18", "correct"),
        (r"\boxed{(1, 3)}", r"\left( 1, 2 \right)", "wrong"),
        (r"\boxed{}", "1", "invalid"),
        ("<answer></answer>", "1", "invalid"),
        ("I do not know", "1", "invalid"),
        ("", "1", "invalid"),
        ("5", None, "failed"),
        ("5", " ", "failed"),
        (r"\boxed{__import__('os').getpid()}", "1", "wrong"),
        (r"\boxed{" + "9" * 10_000 + "}", "1", "wrong"),
        (r"\boxed{" + "{" * 5_000 + "}" * 5_000 + "}", "1", "wrong"),
        (r"\boxed{" + "(" * 900 + "1" + ")" * 900 + "}", "2", "wrong"),
        (r"\boxed{" + r"\sqrt{" * 60 + "2" + "}" * 60 + "}", "2", "wrong"),
        (r"\boxed{" + "1," * 450 + "}", "2", "wrong"),
        ("<answer>" + "a" * 1_000_000 + "</answer>", "2", "wrong"),
        ("<answer>" + r"\(" * 500_000 + "</answer>", "2", "wrong"),
        (" " * 1_000_000 + "7" + " " * 1_000_000, "7", "correct"),
    ],
)
def test_verdicts(response: str, label: str | None, status: str) -> None:
    assert math(response, label).status == status


def test_equal_answers_have_the_same_key() -> None:
    texts = ("0.50", r"\frac12", r"\dfrac{1}{2}", r"\frac{1}{2}", r"50\%")
    keys = [math(rf"\boxed{{{text}}}", "1").answer for text in texts]
    assert set(keys) == {"1/2"}
    assert math(r"\boxed{\left(1, 2\right)}", "1").answer == math(r"\boxed{(1, 2)}", "1").answer == "(1, 2)"


def request(response: str, label: str = "1") -> ScoreRequest:
    return ScoreRequest(
        response, "", response, label, num_tokens=1, truncated=False, group=response, sample=0, group_size=1
    )


def test_what_takes_too_long_fails_alone() -> None:
    settings = RewardConfig(reward_funcs=["math"], reward_timeout=2.0, reward_max_failures=0.5)
    endless = r"\boxed{\binom{100000000}{50000000}}"
    with Scorer(settings) as scorer:
        scores = scorer.score([request(r"\boxed{1}"), request(endless), request(r"\boxed{2}")])
    assert [score.status for score in scores] == ["correct", "failed", "wrong"]
    assert scores[1] == Score(None, "failed", "math did not answer within 2 s", {}, failure="timeout")


DATA = Path(__file__).parents[4] / "shared" / "data"


@pytest.mark.skipif(not DATA.exists(), reason="the data are not beside the checkout")
def test_every_answer_of_math500_equals_itself_in_other_dress() -> None:
    answers = [row["final_answer"] for row in json.loads((DATA / "math500.json").read_text())]
    assert len(answers) == 500
    for answer in answers:
        dressed = answer.replace(r"\frac", r"\dfrac").replace(",", r",\ ").replace(r"\left", "").replace(r"\right", "")
        assert math(rf"Thus $x$ is \boxed{{{dressed}}}, as was to be shown in 3 steps.", answer).status == "correct"
    neighbours = [pair for pair in itertools.pairwise(answers) if pair[0] != pair[1]]
    equal = [pair for pair in neighbours if math(rf"\boxed{{{pair[1]}}}", pair[0]).status != "wrong"]
    assert equal == [("5", "x=5")]


def test_deep_brackets_are_no_formula_and_cost_no_time():
    # The grammar would need more than half a minute for the first.
    assert math(rf"\boxed{{{'(' * 1000}}}", "x").status == "wrong"
    assert math(rf"\boxed{{{'(' * 17}x{')' * 17}}}", "2x").status == "wrong"
    assert math(rf"\boxed{{{'(' * 17}x{')' * 17}}}", f"{'(' * 17}x{')' * 17}").status == "correct"


@pytest.mark.parametrize(("answer", "label"), [("**x^2+1**", "1+x^2"), ("**Tuesday**", "Tuesday")])
def test_bold_answers_are_compared_without_their_marks(answer, label):
    assert math(rf"\boxed{{{answer}}}", label).status == "correct"
