"""Verdicts of `math` on scientific and exact numbers, derived from exact arithmetic.

Each number has its value as a fraction or a sympy formula; the verdict on a pair is whether the values are equal.
"""

import itertools
from decimal import Decimal
from fractions import Fraction

import pytest
import sympy

from rlhf_cli.rewards.verifiers.mathematics import find_answer, same_answer
from rlhf_cli.rewards.verifiers.number_parsing import MAX_NUMBER_LENGTH, parse_number

SUPERSCRIPTS = str.maketrans("-0123456789", "\u207b\u2070\u00b9\u00b2\u00b3\u2074\u2075\u2076\u2077\u2078\u2079")

# (mantissa, exponent): physical constants, with neighbours that differ by a digit, a power of ten or the sign.
WRITTEN = [
    ("6.02", 23),
    ("6.022", 23),
    ("6.02", 22),
    ("1.6", -19),
    ("-1.6", -19),
    ("1.602", -19),
    ("9.11", -31),
    ("1.67", -27),
    ("6.63", -34),
    ("3.0", 8),
    ("3.0", -8),
    ("1.6", -8),
    ("4", 5),
    ("2.5", 100),
]


def spellings(mantissa: str, exponent: int) -> list[str]:
    """Return the number as written in LaTeX, in programs, in plain text, with units and in words."""
    value = Fraction(mantissa) * Fraction(10) ** exponent
    found = [
        rf"{mantissa}\times 10^{{{exponent}}}",
        rf"{mantissa} \cdot 10^{{{exponent}}}",
        rf"${mantissa}\times10^{{{exponent}}}$",
        f"{mantissa}e{exponent}",
        f"{mantissa}E{exponent:+03d}",
        f"{mantissa} x 10^{exponent}",
        f"{mantissa}*10**{exponent}",
        f"{mantissa}\u00d710{str(exponent).translate(SUPERSCRIPTS)}",
        f"{mantissa} \u00d7 10^{exponent}".replace("-", "\u2212"),
        f"{Fraction(mantissa) * 1000}e{exponent - 3}",
    ]
    if value.denominator == 1:
        found += [f"{int(value)}", f"{int(value):,}", f"{int(value):,}".replace(",", "{,}")]
    elif exponent > -40:
        found.append(f"{Decimal(mantissa).scaleb(exponent):f}")
    return found


NUMBERS = [
    (text, Fraction(mantissa) * Fraction(10) ** exponent)
    for mantissa, exponent in WRITTEN
    for text in spellings(mantissa, exponent)
]


def test_one_number_in_all_spellings_is_equal_to_itself_alone() -> None:
    """Formulas are tested below."""
    assert len(NUMBERS) > 150
    assert all(parse_number(text) is not None for text, _ in NUMBERS)
    verdicts = [(a[0], b[0], a[1] == b[1]) for a, b in itertools.combinations_with_replacement(NUMBERS, 2)]
    assert [pair for pair in verdicts if same_answer(pair[0], pair[1]) != pair[2]] == []


FORMULAS = [
    (r"2^{-60}", "2**-60"),
    (r"\left(\frac{1}{2}\right)^{60}", "2**-60"),
    (r"2^{-61}", "2**-61"),
    (r"\frac{1}{20!}", "1/factorial(20)"),
    (r"\frac{1}{21!}", "1/factorial(21)"),
    (r"\frac{21}{21!}", "1/factorial(20)"),
    (r"\frac{16}{10} \cdot 10^{-19}", "Rational(16, 10)*10**-19"),
    (r"1.6\times 10^{-19}", "Rational(16, 10)*10**-19"),
    (r"-\frac{16}{10^{20}}", "-Rational(16, 10)*10**-19"),
    (r"\frac{1}{10^{20}}", "10**-20"),
    (r"\sqrt{10^{-40}}", "10**-20"),
    (r"\sqrt{2}\times 10^{-20}", "sqrt(2)*10**-20"),
    (r"\frac{\sqrt{8}}{2}\times 10^{-20}", "sqrt(2)*10**-20"),
    (r"\sqrt{3}\times 10^{-20}", "sqrt(3)*10**-20"),
    (r"e^{-300}", "exp(-300)"),
    (r"e^{-301}", "exp(-301)"),
    (r"0.5\pi", "pi/2"),
    (r"\frac{\pi}{2}", "pi/2"),
    (r"\sqrt{3+2\sqrt{2}}-\sqrt{2}", "1"),
    (r"2^{100}+1", "2**100+1"),
    (r"2^{100}", "2**100"),
    ("0.00000016", "Rational(16, 10)*10**-7"),
]


def test_formulas_are_equal_as_their_exact_values_are() -> None:
    values = [(text, sympy.sympify(formula)) for text, formula in FORMULAS]
    pairs = list(itertools.combinations_with_replacement(values, 2))
    assert len(pairs) > 250
    wrong = [(a[0], b[0]) for a, b in pairs if same_answer(a[0], b[0]) != (sympy.simplify(a[1] - b[1]) == 0)]
    assert wrong == []


@pytest.mark.parametrize(
    ("one", "other", "is_equal"),
    [
        (r"\sqrt{2}", "1.41421356", True),  # rounded
        (r"\sqrt{2}", "1.414213", True),  # truncated
        (r"\sqrt{2}", "1.41421357", False),
        (r"\sqrt{2}", "-1.41421356", False),
        (r"\sqrt{2}", "1.4142", False),  # too few digits
        (r"\pi", "3.14159", True),
        (r"\pi", "3.14", False),
        (r"\sqrt{2}\times 10^{-20}", r"1.41421356\times 10^{-20}", True),
        (r"\sqrt{2}\times 10^{-20}", r"1.41421356\times 10^{-21}", False),
        (r"\frac{1}{3}", "0.333333333", False),  # both are exact
        (r"\frac{2\cdot 1}{6}", "0.333333333", False),
        (r"9.11\times 10^{-31}\text{ kg}", r"9.11e-31 kg", True),
        (r"9.11\times 10^{-31}\text{ kg}", r"1.67\times 10^{-27}\text{ kg}", False),
        (r"9.11\times 10^{-31}\text{ kg}", r"9.11\times 10^{-31}", True),
        (r"3\times 10^{8}\text{ m/s}^2", "3e8 m/s^2", True),
        (r"1.6\times 10^{-19}x", r"1.7\times 10^{-19}x", False),
        (r"1.6\times 10^{-19}x", r"\frac{16x}{10^{20}}", True),
        (r"\begin{pmatrix}10^{-20}\\1\end{pmatrix}", r"\begin{pmatrix}10^{-21}\\1\end{pmatrix}", False),
        (r"\left(10^{-20}, 1\right)", r"\left(10^{-21}, 1\right)", False),
        (r"x = 10^{-20}", r"10^{-21}", False),
        (r"5\cdot 10^{3}\%", r"5000\%", True),
    ],
)
def test_decimals_units_and_symbols(one: str, other: str, is_equal: bool) -> None:
    assert same_answer(one, other) == same_answer(other, one) == is_equal


@pytest.mark.parametrize(
    ("response", "answer"),
    [
        (r"so it is 6.02 \times 10^{23} in all", r"6.02 \times 10^{23}"),
        ("about 5 x 10^3.", "5 x 10^3"),
        ("it has 2 x 3 parts", "3"),
        ("Avogadro's number is 6.02\u00d710\u00b2\u00b3", "6.02\u00d710^{23}"),
    ],
)
def test_the_last_number_of_a_text_has_its_power_of_ten(response: str, answer: str) -> None:
    assert find_answer(response) == answer


def test_the_longest_number_has_a_key() -> None:
    number = parse_number("9" * (MAX_NUMBER_LENGTH - 20) + r"\times 10^{-999}")
    assert number is not None
    assert len(number.key) > MAX_NUMBER_LENGTH
