"""Verdicts of `math` on different notations of the same answers, and on numbers that cannot be computed."""

import time

import pytest

from rlhf_cli.rewards.verifiers.mathematics import same_answer
from rlhf_cli.rewards.verifiers.number_parsing import last_number

SAME = [
    # mixed numbers, exponents without braces
    ("1 1/2", "1.5"),
    ("-2 1/3", r"-\frac{7}{3}"),
    (r"2\frac{3}{4}", "11/4"),
    ("2^-3", r"\frac{1}{8}"),
    ("2^10", "1024"),
    ("x^-1", r"\frac{1}{x}"),
    # repeating decimals
    (r"0.\overline{3}", r"\frac13"),
    (r"0.\bar{3}", r"\frac13"),
    (r"0.\dot{3}", r"\frac13"),
    (r"-0.1\overline{6}", r"-\frac16"),
    (r"0.\dot{1}4285\dot{7}", r"\frac17"),
    (r"1.\overline{27}", r"\frac{14}{11}"),
    (r"0.\overline{9}", "1"),
    (r"0.\overline{3}x", r"\frac{x}{3}"),
    # numbers against formulas
    (r"\frac{1}{10^{20}}", "1e-20"),
    (r"10^{-19}\times 1.6", "1.6e-19"),
    (r"1.6\times{10}^{-19}", "1.6e-19"),
    (r"\sqrt{3+2\sqrt{2}}-1-\sqrt{2}", "0"),
    # angles in degrees
    (r"\sin 30^\circ", r"\frac12"),
    (r"\cos(60^{\circ})", "0.5"),
    (r"\tan^2 60^\circ", "3"),
    ("\\sin 30\u00b0", "0.5"),
    (r"2\cos 30^\circ", r"\sqrt{3}"),
    # complex numbers
    ("3i", r"i\cdot 3"),
    ("i^2", "-1"),
    (r"e^{i\pi}", "-1"),
    ("(1+i)^2", "2i"),
    (r"\frac{1}{i}", "-i"),
    (r"\sqrt{-4}", "2i"),
    (r"\frac{1+i}{2}", "0.5+0.5i"),
    # units with exponents
    (r"6.02 \times 10^{23} \text{ mol}^{-1}", r"6.02\times 10^{23}"),
    (r"5\text{ s}^{-1}", "5"),
    # intervals and inequalities, sets
    ("x>3", r"(3,\infty)"),
    (r"(3,\infty)", "x>3"),
    ("1<x<2", "(1,2)"),
    (r"1 \le x \le 2", "[1,2]"),
    (r"(-\infty, \infty)", r"\mathbb{R}"),
    ("(-\u221e, 3]", "x \u2264 3"),
    (r"\{1,1,2\}", r"\{2,1\}"),
    # characters instead of commands
    ("\u221a2", r"\sqrt{2}"),
    ("2\u221a(3)", r"\sqrt{12}"),
    ("\u00bd", "0.5"),
    ("x\u00b2", "x^2"),
    ("\u20132", "-2"),
    ("\u221e", r"\infty"),
    ("3\u03c0", r"3\pi"),
]
DIFFERENT = [
    ("e^{-1000}", "0"),
    ("e^{-1000}", "e^{-1001}"),
    (r"\frac{1}{10^{20}}", "2e-20"),
    ("1 1/2", "11/2"),
    ("1 1/2", "0.5"),
    ("1 1/2", "1.6"),
    ("2^-3", "2^3"),
    (r"0.\overline{3}", "0.3"),
    (r"0.\overline{12}", r"0.\overline{13}"),
    (r"0.1\overline{6}", r"0.\overline{16}"),
    (r"\sin 30", r"\frac12"),
    (r"\sin 30^\circ", r"\cos 30^\circ"),
    ("2+3i", "2-3i"),
    ("i", "-i"),
    ("i", "1"),
    (r"5\text{ s}^{-1}", r"5\text{ s}^{-2}"),
    ("x>3", "x<3"),
    ("x>3", r"[3,\infty)"),
    ("1<x<2", "[1,2]"),
    ("1<x<2", "(1,3)"),
    ("3", "(3,4)"),
    (r"\{1,1,2\}", r"\{1,2,3\}"),
    (r"\{1,2\}", r"\{1,2,3\}"),
    ("(1,1,2)", "(1,2)"),
    ("5\u201310", "-5"),
]
HUGE = [
    ("10^{10^{10}}", "1"),
    ("9^{9^{9^9}}", "5"),
    ("10^{-10^{10}}", "0"),
    ("2^{10^9}", "2^{10^9}+1"),
    ("99999999^{99999999}", "99999999^{99999998}"),
    ("1000000!", "1000001!"),
    ("((((9!)!)!)!)", "1"),
    ("(1+10^{-50})^{10^{50}}", "e"),
    (r"\begin{pmatrix}10^{10^{10}}\\1\end{pmatrix}", r"\begin{pmatrix}1\\1\end{pmatrix}"),
]


@pytest.mark.parametrize(("one", "other"), SAME)
def test_notations_of_one_answer_are_the_same(one, other) -> None:
    assert same_answer(one, other)
    assert same_answer(other, one)


@pytest.mark.parametrize(("one", "other"), DIFFERENT)
def test_other_answers_differ(one, other) -> None:
    assert not same_answer(one, other)
    assert not same_answer(other, one)


@pytest.mark.parametrize(("one", "other"), HUGE)
def test_numbers_too_long_to_compute_differ_at_once(one, other) -> None:
    begin = time.process_time()
    assert not same_answer(one, other)
    assert time.process_time() - begin < 2


def test_numbers_too_long_to_compute_are_the_same_if_written_alike() -> None:
    assert same_answer("10^{10^{10}}", r"10 ^ {10 ^ { 10 }}")
    assert same_answer("2^{100000}", "4^{50000}")


def test_the_last_number_of_a_text_may_be_mixed() -> None:
    assert last_number("She needs 2 1/2 cups.") == "2 1/2"
    assert last_number(r"She needs 2\frac{1}{2} cups.") == r"2\frac{1}{2}"
    assert last_number("In 2023 1/2 of them") == "1/2"
